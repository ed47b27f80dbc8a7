"""A whole ring in which everything dies: workers with leases, the trainer between any two steps, Redis on demand."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tandem.protos.errors import NotAdmittedError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import STATES, Claim, Stage
from tandem.services.process import die_with_parent, in_thread
from tests.support import redis_ring as ring
from tests.support.fork_server import ForkServer

LEASE_SECONDS = 0.6


def _work(buffer: Buffer, claim: Claim, acknowledgements: int, chance: random.Random) -> None:
    dice = chance.random()
    if dice < 0.02:
        os._exit(9)
    if dice < 0.06:
        time.sleep(1.2 * LEASE_SECONDS)  # past the lease: the group is claimed again or this result is refused
    elif dice < 0.16:
        buffer.release(claim, "tired", chance.choice(["voluntary", "infrastructure"]))
        return
    elif dice < 0.3:
        buffer.renew([claim], LEASE_SECONDS, {claim.token: b"half of " + claim.group_id.encode()})
        if dice < 0.18:
            os._exit(9)
    assert claim.partial in (None, b"half of " + claim.group_id.encode())
    if ring.finish(buffer, claim):
        os.write(acknowledgements, f"{claim.stage} {claim.group_id}\n".encode())


def work(stage: Stage, url: str, run_id: str, name: str, acknowledgement_file: str) -> None:
    """Works until killed. Appends "<stage> <group id>" to the file for every result that the buffer acknowledged."""
    die_with_parent()
    acknowledgements = os.open(acknowledgement_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    buffer = Buffer(url, run_id)
    if stage == "prompts":
        buffer.register_sampler(name, "127.0.0.1:1", 1)
    else:
        buffer.register_service(name, "127.0.0.1:1")
    chance = random.Random()
    while True:
        try:
            claims = buffer.claim(stage, name, 3, LEASE_SECONDS, 0.5)
        except NotAdmittedError:
            time.sleep(0.02)
            continue
        for claim in claims:
            _work(buffer, claim, acknowledgements, chance)


# Workers die often, so they are forked from a process that has imported pyarrow already.
_PROCESSES = ForkServer("tests.support.buffer_chaos")


class TrainerDiedError(Exception):
    """The trainer's thread starts again as a new incarnation."""


class Chaos:
    """Two samplers and two scorers in processes, a feed and a trainer in threads, and a disk that survives.

    The trainer records, publishes, commits, and dies once between any two of these steps; its successor rolls back.
    """

    NUM_BATCHES, GROUPS_PER_BATCH, STALENESS_BUDGET = 18, 4, 1

    def __init__(self, folder: Path, url: str, seed: int) -> None:
        self.url, self.chance = url, random.Random(seed)
        self.acknowledged = folder / "acknowledged"
        self.acknowledged.touch()
        self.buffer = Buffer(url, "chaos")
        self.buffer.create(
            groups_per_batch=self.GROUPS_PER_BATCH,
            staleness_budget=self.STALENESS_BUDGET,
            target_groups=self.NUM_BATCHES * self.GROUPS_PER_BATCH,
            failure_budget={"infrastructure": 3, "data": 0},
            resume=False,
        )
        self.deaths = {"claimed": 2, "checkpoint written": 6, "written to disk": 8, "recorded": 11, "published": 16}
        self.records: dict[int, list[str]] = {}
        self.checkpoint = self.num_incarnations = self.num_checks = self.num_disturbances = 0
        self.workers: dict[str, ForkServerProcess] = {}
        self.stop = threading.Event()

    def run(self, disturb: Callable[[], None], deadline_seconds: float) -> None:
        """Runs the ring until every batch is committed; calls `disturb` after every tenth acknowledged result.

        It counts results and not seconds, so that a slow machine makes progress between disturbances.
        """
        parts = [in_thread("part", part) for part in (self._check, self._feed, self._train)]
        deadline = time.monotonic() + deadline_seconds
        try:
            while not any(part.done() for part in parts):  # the trainer is done, or a part has failed
                assert time.monotonic() < deadline, self.buffer.counts()
                self._keep_workers()
                if len(self.acknowledged.read_bytes().splitlines()) >= 10 * (self.num_disturbances + 1):
                    time.sleep(0.05 * self.chance.random())
                    self.num_disturbances += 1
                    disturb()
                time.sleep(0.01)
        finally:
            self.stop.set()
            for worker in self.workers.values():
                worker.kill()
                worker.join(10)
        for part in parts:
            part.result(20)

    def kill_a_worker(self) -> None:
        self.workers[self.chance.choice(list(self.workers))].kill()

    def assert_acknowledged_results_are_there(self) -> None:
        """A group whose result of a stage was acknowledged is past that stage."""
        lines = [line.split() for line in self.acknowledged.read_text().splitlines()]
        fields = self.buffer.connection.hash("states")
        states = {group_id.decode(): state.decode() for group_id, state in fields.items()}
        for stage, group_id in lines:
            state = states.get(group_id, "over")
            assert not state.startswith("prompts"), (stage, group_id, state)
            assert stage == "prompts" or not state.startswith("generated"), (stage, group_id, state)
        assert len({(stage, group_id) for stage, group_id in lines}) == len(lines), "a result was accepted twice"

    def _keep_workers(self) -> None:
        for name, stage in [("s0", "prompts"), ("s1", "prompts"), ("r0", "generated"), ("r1", "generated")]:
            ended = self.workers[name].exitcode if name in self.workers else 9
            assert ended in (None, 9, -9), f"worker {name} ended with {ended}: it died of something else than chaos"
            if ended is not None:
                acknowledged = str(self.acknowledged)
                self.workers[name] = _PROCESSES.start(work, stage, self.url, "chaos", name, acknowledged)

    def _check(self) -> None:
        while not self.stop.is_set():
            assert self.buffer.verify() == []
            counts = self.buffer.counts()
            assert counts["admitted"] == sum(counts[state] for state in STATES)
            self.num_checks += 1
            self.stop.wait(0.01)

    def _feed(self) -> None:
        while not self.stop.wait(0.01):
            admission = self.buffer.admission()
            if admission.wanted:
                ring.offer(self.buffer, 3, start=admission.cursor)
            else:
                self.buffer.mark_exhausted("target")

    def _train(self) -> None:
        while self.checkpoint < self.NUM_BATCHES:
            with suppress(TrainerDiedError):
                self._one_incarnation()
        self.buffer.drop_outstanding(self.num_incarnations, "run_finished")

    def _one_incarnation(self) -> None:
        incarnation = self.buffer.begin_incarnation()
        self.num_incarnations = incarnation
        later = {version: ids for version, ids in self.records.items() if version > self.checkpoint}
        self.buffer.rollback(incarnation, self.checkpoint, later)
        version = max([self.checkpoint, *self.records])
        while True:
            self.buffer.publish(incarnation, version, [s for s in self.buffer.samplers() if s.alive])
            self._may_die("published", version)
            if version % 3 == 0 or version == self.NUM_BATCHES:
                self.checkpoint = version
                self._may_die("checkpoint written", version)
                self.buffer.commit(incarnation, version)
            if version == self.NUM_BATCHES:
                return
            batch = self._next_batch(incarnation, version)
            version += 1
            self._may_die("claimed", version)
            self.records[version] = batch
            self._may_die("written to disk", version)
            self.buffer.record(incarnation, version, batch)
            self._may_die("recorded", version)

    def _may_die(self, moment: str, version: int) -> None:
        """The trainer dies once at each of its moments, spread over the run."""
        if self.deaths.get(moment) == version:
            del self.deaths[moment]
            raise TrainerDiedError

    def _next_batch(self, incarnation: int, version: int) -> list[str]:
        batch: list[str] = []
        while len(batch) < self.GROUPS_PER_BATCH:
            for sampler in self.buffer.samplers():
                if sampler.state != "LIVE":
                    self.buffer.admit_sampler(incarnation, sampler, version)
            for claim in self.buffer.claim_scored(incarnation, self.GROUPS_PER_BATCH - len(batch), 0.1):
                if self.chance.random() < 0.15:
                    self.buffer.drop_claimed(incarnation, [claim.group_id], "rejected")
                else:
                    batch.append(claim.group_id)
            assert not self.stop.is_set()
        return batch
