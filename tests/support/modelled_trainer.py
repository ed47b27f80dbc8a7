"""A trainer whose weights are the list of the groups that entered them, and a disk that never forgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tandem.protos.errors import LedgerError
from tandem.services.buffer.rollback import check_records, recorded_version
from tandem.services.buffer.types import Sampler
from tests.support.modelled_redis import ModelledRun

Step = Literal["claim", "write", "record", "train", "broadcast", "publish", "save", "commit", "catch up"]
STEPS: tuple[Step, ...] = ("claim", "write", "record", "train", "broadcast", "publish", "save", "commit", "catch up")

Deliver = Callable[[Sampler, tuple[int, int]], bool]
"""Sends the weights of (incarnation, version) to the process of a sampler; whether it acknowledged them."""


@dataclass
class Disk:
    """`records`: version → group ids of its batch. `checkpoints`: version → the groups in the weights, in order.
    `staleness`: that of all groups of the batches. `incarnation` is the highest that has begun.
    """

    records: dict[int, list[str]] = field(default_factory=dict)
    checkpoints: dict[int, list[str]] = field(default_factory=lambda: {0: []})
    staleness: list[int] = field(default_factory=list)
    incarnation: int = 0

    @property
    def last(self) -> int:
        return max(self.records, default=0)

    @property
    def trained(self) -> list[str]:
        return [group_id for version in sorted(self.records) for group_id in self.records[version]]


class TrainerProcess:
    """Takes the run over as it starts; then it makes one step after the other, in any order that the trainer may."""

    def __init__(self, run: ModelledRun, disk: Disk, deliver: Deliver, num_batches: int) -> None:
        self._run, self.disk, self._deliver, self._num_batches = run, disk, deliver, num_batches
        self.buffer = run.open()
        self.num_losses_before = run.num_losses
        self.claimed: dict[str, int] = {}
        """Group → the version that sampled it."""
        self._sent: list[Sampler] | None = None
        self._take_over()

    def _take_over(self) -> None:
        buffer, disk, connection = self.buffer, self.disk, self.buffer.connection
        checkpoint = max(disk.checkpoints)
        check_records(connection, checkpoint, self._needed(checkpoint), recorded_version(connection))
        self.incarnation = disk.incarnation = buffer.begin_incarnation(disk.incarnation)
        buffer.rollback(self.incarnation, checkpoint, self._needed(checkpoint))
        self.weights = list(disk.checkpoints[checkpoint])
        for version in range(checkpoint + 1, disk.last + 1):
            self.weights += disk.records[version]
        self.version = self.recorded = self.published = disk.last
        self.send_and_publish([])

    def _needed(self, checkpoint: int) -> dict[int, list[str]]:
        known = min(self.buffer.committed_version(), checkpoint)
        return {version: ids for version, ids in self.disk.records.items() if version > known}

    def send_and_publish(self, group_ids: list[str]) -> None:
        weights = (self.incarnation, self.published)
        sent = [one for one in self.buffer.samplers() if self._deliver(one, weights)]
        self.buffer.publish(self.incarnation, self.published, sent, group_ids)

    @property
    def is_finished(self) -> bool:
        return self.published == self._num_batches

    def can(self, step: Step) -> bool:
        disk, size = self.disk, self._run.model.limiter.groups_per_batch
        return {
            "claim": disk.last < self._num_batches and len(self.claimed) < size and disk.last <= self.version + 1,
            "write": len(self.claimed) == size,
            "record": disk.last > self.recorded == self.version,
            "train": self.recorded > self.version and self.version <= self.published + 1,
            "broadcast": self.version > self.published and self._sent is None,
            "publish": self._sent is not None,
            "save": self.version == self.published and self.version not in disk.checkpoints,
            "commit": max(disk.checkpoints) <= self.published,
            "catch up": True,
        }[step]

    def step(self, step: Step, reject: Callable[[str], bool] = lambda _: False) -> None:
        """Makes a step that `can` be made. `reject` says which claimed groups are not trained."""
        buffer, disk, incarnation = self.buffer, self.disk, self.incarnation
        match step:
            case "claim":
                self._claim(reject)
            case "write":
                buffer.check_incarnation(incarnation)
                disk.staleness += [disk.last - version for version in self.claimed.values()]
                disk.records[disk.last + 1], self.claimed = list(self.claimed), {}
            case "record":
                self.recorded += 1
                buffer.record(incarnation, self.recorded, disk.records[self.recorded])
            case "train":
                buffer.check_incarnation(incarnation)
                self.version += 1
                self.weights += disk.records[self.version]
            case "broadcast":
                buffer.check_incarnation(incarnation)
                version = self.published + 1
                self._sent = [one for one in buffer.samplers() if self._deliver(one, (incarnation, version))]
            case "publish":
                assert self._sent is not None
                self.published += 1
                buffer.publish(incarnation, self.published, self._sent, disk.records[self.published])
                self._sent = None
            case "save":
                buffer.check_incarnation(incarnation)
                disk.checkpoints[self.version] = list(self.weights)
            case "commit":
                buffer.commit(incarnation, max(disk.checkpoints))
            case "catch up":
                self._catch_up()

    def _claim(self, reject: Callable[[str], bool]) -> None:
        wanted = self._run.model.limiter.groups_per_batch - len(self.claimed)
        ids = [one.group_id for one in self.buffer.claim_scored(self.incarnation, wanted, 0)]
        assert not set(ids).intersection(self.disk.trained), "a group that is on the disk is claimed again"
        rejected = [group_id for group_id in ids if reject(group_id)]
        if rejected:
            self.buffer.drop_claimed(self.incarnation, rejected, "zero_variance")
        survivors = [group_id for group_id in ids if group_id not in rejected]
        try:
            payloads = self.buffer.read(survivors)
        except LedgerError:
            assert self._run.num_losses > self.num_losses_before
            raise
        self.claimed |= dict(zip(survivors, map(int, payloads), strict=True))

    def _catch_up(self) -> None:
        if self._sent is not None:
            return
        for one in self.buffer.samplers():
            outdated = one.state != "LIVE" or one.incarnation != self.incarnation
            if outdated and self._deliver(one, (self.incarnation, self.published)):
                self.buffer.admit_sampler(self.incarnation, one, self.published)
