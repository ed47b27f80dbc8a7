"""Rank 0's way of publishing a version: who is in the weight group, the broadcast, who acknowledged, who is STALE, who
comes late.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from tandem.protos import common_pb2, common_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import MissingBaseWeightsError, UnavailableError, WeightTransferError
from tandem.protos.manifest import encode_manifest, weights_digest
from tandem.protos.types import WeightGroupAddress, WeightManifest
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.registry import Sampler
from tandem.services.config import Recipe
from tandem.services.rpc.client import connect, from_rpc_error
from tandem.trainer.weight_sender import WeightSender

log = logging.getLogger(__name__)

WEIGHTS_FOLDER = "weights"
WITH_BASE_FOLDER = "with-base"
_PING_SECONDS = 2.0
_GRACE_SECONDS = 5.0  # the sampler's own deadline names the cause, so ours comes later
_LOOK_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 30.0

Member = tuple[str, int]
"""One start of one sampler: its id and generation."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What publishing a version took. Seconds are the slowest sampler's; None if no sampler acknowledged any.

    `num_bytes` is the version's size as it travels, 0 if the weights are those of the one before.
    """

    acknowledged: int
    num_bytes: int
    transfer_seconds: float | None
    stall_seconds: float | None
    weights_digest: str

    def figures(self) -> dict[str, Any]:
        """By name of metrics.jsonl."""
        return {
            "samplers_acknowledged": self.acknowledged,
            "weight_bytes": self.num_bytes,
            "weight_transfer_seconds": self.transfer_seconds,
            "weight_stall_seconds": self.stall_seconds,
            "weights_digest": self.weights_digest,
        }


class Publisher:
    """Publishes versions to every sampler that can take part, and lets a thread catch up those that cannot or that come
    late.

    A sampler takes part if it is alive and neither failed the last time nor is being caught up. One that fails is STALE
    from that publication on and leaves the weight group; it comes back through the thread, or by starting anew.
    """

    def __init__(self, buffer: Buffer, sender: WeightSender, recipe: Recipe, incarnation: int) -> None:
        self._buffer = buffer
        self._sender = sender
        self._host = recipe.run.host
        self._folder = recipe.folder / WEIGHTS_FOLDER
        self._backend = recipe.weights.backend
        self._deadline_seconds = recipe.weights.deadline_seconds
        self._incarnation = incarnation
        self._lines = SamplerLines()
        self._lock = threading.Lock()
        self._joined: frozenset[Member] = frozenset()
        self._group_name = ""
        self._failed: set[Member] = set()
        self._lack_base: set[Member] = set()
        self._busy: set[Member] = set()
        self._patience: dict[Member, tuple[int, float]] = {}
        self._newest: WeightManifest | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve_late_joiners, name="late-joiners", daemon=True)
        self._thread.start()

    def publish(self, version: int, *, changed: bool) -> Publication:
        """Brings a version to the samplers and retires the credits of what was trained for it. All ranks are inside
        `broadcast` meanwhile.

        Not `changed`: only the version's number goes out, to the samplers that carry the version before.

        Raises:
            FencedError: another trainer took over.
        """
        if self._error is not None:
            raise self._error
        self._buffer.check_incarnation(self._incarnation)
        taking_part = members = self._begin(version, changed)
        try:
            if changed and not WeightSender.fetched_by_samplers(self._backend):
                members = self._gather_group(taking_part)
            acknowledged = self._broadcast(version, members, changed)
            self._buffer.publish(self._incarnation, version, [sampler for sampler, _ in acknowledged])
        finally:
            with self._lock:
                self._busy -= set(map(_member, taking_part))
        self._sender.release()
        self._forget_folders()
        replies = [reply for _, reply in acknowledged]
        return Publication(
            acknowledged=len(replies),
            num_bytes=_copy_bytes(self._sender) if changed else 0,
            transfer_seconds=max((reply.transfer_seconds for reply in replies), default=None),
            stall_seconds=max((reply.stall_seconds for reply in replies), default=None),
            weights_digest=copy_digest(self._sender),
        )

    def close(self) -> None:
        """Ends the thread, the group and the channels."""
        self._ended.set()
        self._thread.join(timeout=_LOOK_SECONDS + 1.0)
        self._sender.close()
        self._lines.close()

    def _begin(self, version: int, changed: bool) -> list[Sampler]:
        """The samplers that take part; the thread leaves them alone until the publication is over."""
        # A version without changes is a bare number: it means nothing to a sampler that is not LIVE, with other
        # weights.
        samplers = [s for s in self._buffer.samplers() if s.alive and (changed or s.state == "LIVE")]
        with self._lock:
            taking_part = [s for s in samplers if _member(s) not in self._busy | self._failed]
            self._busy |= {_member(sampler) for sampler in taking_part}
        if left_out := [sampler.id for sampler in samplers if sampler not in taking_part]:
            log.info("weights: version %d reaches %s later", version, ", ".join(left_out), extra={"version": version})
        return taking_part

    def _gather_group(self, members: Sequence[Sampler]) -> list[Sampler]:
        """Makes sure that the open group is exactly these samplers' and ours; who does not come is left out."""
        with self._lock:
            if self._joined == frozenset(map(_member, members)):
                return list(members)
        self._leave_group()
        deadline = time.monotonic() + self._deadline_seconds
        present = self._answering(members)
        while present and time.monotonic() < deadline:
            came = self._meet(present, deadline - time.monotonic())
            if len(came) == len(present):
                with self._lock:
                    self._joined = frozenset(map(_member, present))
                return present  # the sender's group stands
            present = came
        return []

    def _answering(self, samplers: Sequence[Sampler]) -> list[Sampler]:
        calls = {
            s.id: self._lines.info(s).Info.future(common_pb2.InfoRequest(), timeout=_PING_SECONDS) for s in samplers
        }
        return [
            sampler for sampler in samplers if self._answer(sampler, calls[sampler.id], "does not answer") is not None
        ]

    def _meet(self, samplers: Sequence[Sampler], timeout_seconds: float) -> list[Sampler]:
        """Opens a group of all these samplers; returns those that joined, all of them if the group stands."""
        world_size = 1 + sum(sampler.tensor_parallel_size for sampler in samplers)
        address = self._sender.prepare(self._host, world_size, self._backend, timeout_seconds)
        self._group_name = address.group_name
        calls = []
        first_rank = 1
        for sampler in samplers:
            calls.append(self._join(sampler, address, first_rank, timeout_seconds))
            first_rank += sampler.tensor_parallel_size
        connected = True
        try:
            self._sender.connect(timeout_seconds)
        except WeightTransferError as error:
            log.warning("weights: %s", error)
            connected = False
        came = [s for s, call in zip(samplers, calls, strict=True) if self._answer(s, call, "did not join") is not None]
        if not connected or len(came) < len(samplers):
            self._sender.close()
        return came if connected or len(came) < len(samplers) else []

    def _broadcast(
        self, version: int, members: Sequence[Sampler], changed: bool
    ) -> list[tuple[Sampler, rollout_pb2.UpdateWeightsReply]]:
        """Sends the version; returns who acknowledged every digest. The others have failed."""
        location = str(self._folder / f"{version:06d}") if self._backend == "disk" else ""
        manifest = self._sender.manifest(self._incarnation, version, self._backend, changed=changed, location=location)
        if WeightSender.fetched_by_samplers(self._backend):
            manifest = self._sender.broadcast(manifest, self._deadline_seconds)
            calls = [self._update(sampler, manifest) for sampler in members]
        else:
            calls = [self._update(sampler, manifest, self._group_name) for sampler in members]
            try:
                manifest = self._sender.broadcast(manifest, self._deadline_seconds)
            except WeightTransferError as error:  # the copy is whole all the same, and so is its manifest
                log.warning("weights: version %d: %s", version, error, extra={"version": version})
                assert self._sender.copy is not None
                manifest = self._sender.copy.manifest
                self._leave_group()
        if manifest.buckets:
            self._newest = manifest
        elif self._newest is not None:
            self._newest = replace(self._newest, incarnation=self._incarnation, policy_version=version)
        replies = [self._acknowledgement(sampler, call, manifest) for sampler, call in zip(members, calls, strict=True)]
        if None in replies:
            self._leave_group()
        return [(sampler, reply) for sampler, reply in zip(members, replies, strict=True) if reply is not None]

    def _join(self, sampler: Sampler, address: WeightGroupAddress, first_rank: int, timeout_seconds: float) -> Any:
        request = rollout_pb2.JoinWeightGroupRequest(
            host=address.host,
            port=address.port,
            group_name=address.group_name,
            first_rank=first_rank,
            world_size=address.world_size,
            backend=address.backend,
            timeout_seconds=timeout_seconds,
        )
        return self._lines.rollout(sampler).JoinWeightGroup.future(request, timeout=timeout_seconds + _GRACE_SECONDS)

    def _update(self, sampler: Sampler, manifest: WeightManifest, group_name: str = "") -> Any:
        request = rollout_pb2.UpdateWeightsRequest(
            manifest=encode_manifest(manifest), group_name=group_name, timeout_seconds=self._deadline_seconds
        )
        timeout = self._deadline_seconds + _GRACE_SECONDS
        return self._lines.rollout(sampler).UpdateWeights.future(request, timeout=timeout)

    def _acknowledgement(self, sampler: Sampler, call: Any, manifest: WeightManifest) -> Any | None:
        """The reply of a sampler that holds every bucket as it was sent, or None."""
        reply = self._answer(sampler, call, f"did not take version {manifest.policy_version}")
        if reply is not None and list(reply.digests) != [bucket.digest for bucket in manifest.buckets]:
            self._note_failure(sampler, f"acknowledged other digests for version {manifest.policy_version}")
            return None
        return reply

    def _answer(self, sampler: Sampler, call: Any, failure: str) -> Any | None:
        """The reply of a call, or None after noting that the sampler failed."""
        try:
            return call.result()
        except grpc.RpcError as error:
            cause = from_rpc_error(error)
            self._note_failure(sampler, f"{failure}: {cause}")
            if isinstance(cause, MissingBaseWeightsError):
                with self._lock:
                    self._lack_base.add(_member(sampler))
            return None

    def _note_failure(self, sampler: Sampler, words: str) -> None:
        log.warning("weights: sampler %s %s", sampler.id, words)
        with self._lock:
            self._failed.add(_member(sampler))

    def _leave_group(self) -> None:
        with self._lock:
            self._joined = frozenset()
        self._sender.close()

    def _forget_folders(self) -> None:
        """Keeps the two newest folders of the `disk` backend: a late joiner may still read the one before."""
        for folder in sorted(self._folder.glob("[0-9]*"))[:-2] if self._backend == "disk" else ():
            shutil.rmtree(folder, ignore_errors=True)

    def _serve_late_joiners(self) -> None:
        try:
            while not self._ended.wait(_LOOK_SECONDS):
                try:
                    for sampler in self._late_joiners():
                        self._catch_up(sampler)
                except UnavailableError as error:  # Redis is restarting; the loop meets the same and decides
                    log.warning("weights: %s", error)
        except BaseException as error:  # a bug, or a fence: `publish` raises it
            self._error = error

    def _late_joiners(self) -> list[Sampler]:
        """Samplers that are alive and do not carry the published version, while no publication is under way."""
        newest = self._newest
        if newest is None or newest.policy_version != self._buffer.published_version():
            return []
        now = time.monotonic()
        return [
            sampler
            for sampler in self._buffer.samplers()
            if sampler.alive
            and (sampler.state != "LIVE" or sampler.incarnation != self._incarnation)
            and self._patience.get(_member(sampler), (0, 0.0))[1] <= now
        ]

    def _catch_up(self, sampler: Sampler) -> None:
        """Gives one sampler the newest version beside the training, over a connection of its own, and admits it."""
        member = _member(sampler)
        with self._lock:
            if member in self._busy:
                return
            self._busy.add(member)
            if member in self._joined:  # it leaves that group for the private one
                self._joined = frozenset()
        manifest = None
        try:
            manifest = self._send_newest(sampler)
        finally:
            with self._lock:
                self._busy.discard(member)
                if manifest is not None:
                    self._failed.discard(member)
        if manifest is None:
            failures = self._patience.get(member, (0, 0.0))[0] + 1
            self._patience[member] = (failures, time.monotonic() + min(2.0**failures, _LONGEST_PAUSE_SECONDS))
            return
        self._patience.pop(member, None)
        # Refused if a newer version came out meanwhile; the sampler takes part in the next publication then.
        if self._buffer.admit_sampler(self._incarnation, sampler, manifest.policy_version):
            log.info("weights: sampler %s caught up with version %d", sampler.id, manifest.policy_version)

    def _send_newest(self, sampler: Sampler) -> WeightManifest | None:
        """The manifest that the sampler acknowledged, or None. If it says that it lacks the adapters' base, that goes
        with them.
        """
        if not self._answering([sampler]):
            return None
        for brings_base in (False, True):
            if brings_base == self._lacks_base(sampler):
                manifest = self._send_copy(sampler, brings_base)
                if manifest is not None:
                    with self._lock:
                        self._lack_base.discard(_member(sampler))
                    return manifest
        return None

    def _lacks_base(self, sampler: Sampler) -> bool:
        with self._lock:
            return _member(sampler) in self._lack_base

    def _send_copy(self, sampler: Sampler, brings_base: bool) -> WeightManifest | None:
        if self._backend == "disk":
            return self._send_folder(sampler, brings_base)
        seconds = self._deadline_seconds
        offer = self._sender.offer_copy(self._host, sampler.tensor_parallel_size, seconds, brings_base=brings_base)
        if self._answer(sampler, self._join(sampler, offer.address, 1, seconds), "did not join") is None:
            return None
        call = self._update(sampler, offer.manifest, offer.address.group_name)
        return None if self._acknowledgement(sampler, call, offer.manifest) is None else offer.manifest

    def _send_folder(self, sampler: Sampler, brings_base: bool) -> WeightManifest | None:
        manifest, beside = self._newest, self._folder / WITH_BASE_FOLDER
        assert manifest is not None
        if brings_base:
            manifest = self._sender.write_copy(beside, brings_base=True)
        reply = self._acknowledgement(sampler, self._update(sampler, manifest), manifest)
        shutil.rmtree(beside, ignore_errors=True)
        return None if reply is None else manifest


class SamplerLines:
    """One gRPC channel a start of a sampler, opened at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[Member, grpc.Channel] = {}

    def rollout(self, sampler: Sampler) -> rollout_pb2_grpc.RolloutServiceStub:
        """Its RolloutService."""
        return rollout_pb2_grpc.RolloutServiceStub(self._channel(sampler))

    def info(self, sampler: Sampler) -> common_pb2_grpc.InfoServiceStub:
        """Its InfoService."""
        return common_pb2_grpc.InfoServiceStub(self._channel(sampler))

    def close(self) -> None:
        """Closes all channels."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _channel(self, sampler: Sampler) -> grpc.Channel:
        with self._lock:
            member = _member(sampler)
            if member not in self._channels:
                for outdated in [other for other in self._channels if other[0] == sampler.id]:
                    self._channels.pop(outdated).close()
                self._channels[member] = connect(sampler.address)
            return self._channels[member]


def copy_digest(sender: WeightSender) -> str:
    """The digest of the newest version's weights; it stays the same over versions that changed nothing."""
    assert sender.copy is not None, "a version was broadcast"
    return weights_digest(sender.copy.manifest)


def _copy_bytes(sender: WeightSender) -> int:
    assert sender.copy is not None, "a version was broadcast"
    return sum(bucket.num_bytes for bucket in sender.copy.manifest.buckets)


def _member(sampler: Sampler) -> Member:
    return sampler.id, sampler.generation
