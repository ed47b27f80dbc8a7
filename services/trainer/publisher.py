"""Publishes versions on rank 0: broadcasts the weights to the samplers, and updates late and failed samplers."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from tandem.protos import rollout_pb2
from tandem.protos.errors import UnavailableError, WeightTransferError
from tandem.protos.manifest import weights_digest
from tandem.protos.types import WeightManifest
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import Sampler
from tandem.services.config import Recipe
from tandem.services.process import Repeated
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.run.endpoint import calling_credentials
from tandem.services.trainer.sampler_link import SamplerLink
from tandem.trainer.weight_sender import WeightSender
from tandem.trainer.weight_snapshot import WeightSnapshot

log = logging.getLogger(__name__)

_CHECK_SECONDS = 0.25
_HEARTBEAT_SECONDS = 1.0
_SILENT_CHECKS = 3


@dataclass(frozen=True, slots=True)
class Publication:
    """Measurements of one publication, by their names in metrics.jsonl. `weight_bytes` is 0 if the weights did not
    change. Seconds are the slowest sampler's, None without an acknowledgement.
    """

    samplers_acknowledged: int
    weight_bytes: int
    weight_sent_bytes: int
    """Bytes that left for the samplers, each counted once; fewer than `weight_bytes` where differences were sent."""
    weight_encode_seconds: float
    weight_transfer_seconds: float | None
    weight_stall_seconds: float | None
    weights_digest: str
    publication_seconds: float
    """From the beginning until the credits were returned."""


class Publisher:
    """Publishes versions to every sampler that is alive, did not fail its last update and is not being caught up. One
    that fails is STALE from then on and leaves the weight group; a thread updates such samplers and late ones. Another
    thread ends the waits for samplers whose heartbeat is silent.
    """

    def __init__(self, buffer: Buffer, sender: WeightSender, recipe: Recipe, incarnation: int) -> None:
        self._buffer = buffer
        self._sender = sender
        self._token = run_token(buffer.secret(), Role.internal)
        self._credentials = calling_credentials(recipe)
        self._server_name = recipe.run.server_name
        self._host = recipe.run.host
        self._folder = recipe.weights_folder
        self._backend = recipe.weights.backend
        self._deadline_seconds = recipe.weights.deadline_seconds
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._links: dict[str, SamplerLink] = {}
        self._group: frozenset[SamplerLink] = frozenset()  # members of the sender's open group
        self._group_name = ""
        self._receiving: Sequence[SamplerLink] = ()
        """The members of the group while a version is on its way to them."""
        self._newest: WeightManifest | None = None
        self.failed_updates = 0
        """Updates that a sampler failed or did not answer."""
        self._error: BaseException | None = None
        self._threads = ExitStack()
        for name, seconds, check in (
            ("catch-up", _CHECK_SECONDS, self._catch_up_samplers),
            ("sampler-heartbeats", _HEARTBEAT_SECONDS, self._give_up_silent_samplers),
        ):
            self._threads.enter_context(Repeated(name, seconds, partial(self._noting_errors, check)))

    def check(self) -> None:
        """Raises the error that ended the work of a thread: a bug, a full disk, or that another trainer took over."""
        if self._error is not None:
            raise self._error

    def publish(
        self, manifest: WeightManifest, snapshot: WeightSnapshot | None = None, group_ids: Sequence[str] = ()
    ) -> Publication:
        """Sends a version to the samplers and retires the credits of the groups that it trained. Without a snapshot,
        all ranks are in `broadcast` meanwhile. If the manifest has no buckets, the weights did not change, and only the
        version's number is sent, to the samplers that have the previous version. One thread at a time may call it.

        Raises FencedError if another trainer took over.
        """
        self.check()
        began = time.monotonic()
        self._buffer.check_incarnation(self._incarnation)
        version, changed = manifest.policy_version, bool(manifest.buckets)
        taking_part = members = self._begin(version, changed)
        try:
            if changed and not WeightSender.fetched_by_samplers(self._backend):
                members = self._gather_group(taking_part)
            acknowledged = self._broadcast(manifest, snapshot, members)
            samplers = [link.sampler for link, _ in acknowledged]
            self._buffer.publish(self._incarnation, version, samplers, group_ids)
        finally:
            self._release(taking_part)
        self._sender.release()
        self._forget_folders()
        return Publication(
            samplers_acknowledged=len(acknowledged),
            weight_bytes=sum(bucket.num_bytes for bucket in manifest.buckets),
            weight_sent_bytes=self._sender.sent_bytes,
            weight_encode_seconds=self._sender.encode_seconds,
            weight_transfer_seconds=max((reply.transfer_seconds for _, reply in acknowledged), default=None),
            weight_stall_seconds=max((reply.stall_seconds for _, reply in acknowledged), default=None),
            weights_digest=weights_digest(self._sender.copy.manifest),
            publication_seconds=time.monotonic() - began,
        )

    def close(self) -> None:
        """Stops the threads and closes the group and the channels."""
        self._threads.close()
        self._sender.close()
        with self._lock:
            for link in self._links.values():
                link.close()
            self._links.clear()

    def _link(self, sampler: Sampler) -> SamplerLink:
        """The link of the sampler's current start. The caller holds the lock. A busy link of an earlier start is closed
        by `_release`: gRPC crashes the process if a method is called for the first time on a closed channel.
        """
        link = self._links.get(sampler.id)
        if link is None or link.sampler.generation != sampler.generation:
            if link is not None and not link.busy:
                link.close()
            link = self._links[sampler.id] = SamplerLink(sampler, self._token, self._credentials, self._server_name)
        link.sampler = sampler
        return link

    def _release(self, links: Sequence[SamplerLink]) -> None:
        with self._lock:
            for link in links:
                link.busy = False
                if self._links.get(link.sampler.id) is not link:  # the sampler has started anew
                    link.close()

    def _begin(self, version: int, changed: bool) -> list[SamplerLink]:
        """The samplers that take part; the thread does not touch them until the publication is over."""
        # An unchanged version is only a number. A sampler that is not LIVE has other weights, so it cannot use it.
        samplers = [s for s in self._buffer.samplers() if s.alive and (changed or s.state == "LIVE")]
        with self._lock:
            links = [self._link(sampler) for sampler in samplers]
            taking_part = [link for link in links if not (link.busy or link.failed)]
            for link in taking_part:
                link.busy = True
        if left_out := [link.sampler.id for link in links if link not in taking_part]:
            log.info("weights: version %d reaches %s later", version, ", ".join(left_out), extra={"version": version})
        return taking_part

    def _gather_group(self, links: list[SamplerLink]) -> list[SamplerLink]:
        """Makes the open group consist of the sender and those of these samplers that join."""
        with self._lock:
            if links and self._group == frozenset(links):
                return links
        self._leave_group()
        deadline = time.monotonic() + self._deadline_seconds
        present = _answering(links)
        while present and time.monotonic() < deadline:
            joined = self._open_group(present, deadline - time.monotonic())
            if len(joined) == len(present):
                with self._lock:
                    self._group = frozenset(present)
                return present
            present = joined
        return []

    def _open_group(self, links: Sequence[SamplerLink], timeout_seconds: float) -> list[SamplerLink]:
        """Opens a group for all these samplers and returns those that joined. The group is open only if all joined."""
        world_size = 1 + sum(link.sampler.tensor_parallel_size for link in links)
        address = self._sender.prepare(self._host, world_size, self._backend)
        self._group_name = address.group_name
        calls = []
        first_rank = 1
        for link in links:
            calls.append(link.join(address, first_rank, self._incarnation, timeout_seconds))
            first_rank += link.sampler.tensor_parallel_size
        connected = True
        try:
            self._sender.connect(timeout_seconds)
        except WeightTransferError as error:
            log.warning("weights: %s", error)
            connected = False
        joined = [link for link, call in zip(links, calls, strict=True) if link.reply(call, "did not join") is not None]
        if not connected or len(joined) < len(links):
            self._sender.close()
        return joined if connected or len(joined) < len(links) else []

    def _broadcast(
        self, manifest: WeightManifest, snapshot: WeightSnapshot | None, links: Sequence[SamplerLink]
    ) -> list[tuple[SamplerLink, rollout_pb2.UpdateWeightsReply]]:
        """Sends the version and returns the samplers that acknowledged every digest. The others have failed."""
        seconds, version = self._deadline_seconds, manifest.policy_version
        base = None if snapshot is None else snapshot.base
        if base is not None and links and all(link.holds(base) for link in links):
            manifest = replace(manifest, base=base)
        if WeightSender.fetched_by_samplers(self._backend):
            manifest = self._sender.broadcast(manifest, seconds, snapshot)
            calls = [link.update(manifest, seconds) for link in links]
        else:
            self._receiving = links
            calls = [link.update(manifest, seconds, self._group_name) for link in links]
            try:
                manifest = self._sender.broadcast(manifest, seconds, snapshot)
            except WeightTransferError as error:  # the copy and its manifest are still complete
                log.warning("weights: version %d: %s", version, error, extra={"version": version})
                manifest = self._sender.copy.manifest
                self._leave_group()
        if manifest.buckets:
            self._newest = manifest
        elif self._newest is not None:
            self._newest = replace(self._newest, incarnation=self._incarnation, policy_version=version)
        replies = [link.acknowledgement(call, manifest) for link, call in zip(links, calls, strict=True)]
        self._receiving = ()
        if None in replies:
            self.failed_updates += replies.count(None)
            self._leave_group()
        return [(link, reply) for link, reply in zip(links, replies, strict=True) if reply is not None]

    def _leave_group(self) -> None:
        with self._lock:
            self._group = frozenset()
        self._sender.close()

    def _forget_folders(self) -> None:
        """Deletes all but the two newest `disk` folders; a late joiner may still read the older one."""
        for folder in sorted(self._folder.glob("[0-9]*"))[:-2] if self._backend == "disk" else ():
            shutil.rmtree(folder, ignore_errors=True)

    def _noting_errors(self, check: Callable[[], None]) -> None:
        try:
            check()
        except UnavailableError as error:  # Redis is restarting; the trainer's loop handles it
            log.warning("weights: %s", error)
        except BaseException as error:  # `check` raises it
            self._error = error

    def _give_up_silent_samplers(self) -> None:
        """Ends the waits for samplers that hang: their heartbeats are silent in several checks, because after an outage
        of Redis all are at first. The members of a weight group that such a sampler breaks get some time to answer.
        """
        with self._lock:
            used = [link for link in {*self._links.values(), *self._receiving} if link.busy]
        if not used:
            return
        alive = {(sampler.id, sampler.generation) for sampler in self._buffer.samplers() if sampler.alive}
        for link in used:
            is_silent = (link.sampler.id, link.sampler.generation) not in alive
            link.silent_checks = link.silent_checks + 1 if is_silent else 0
            if link.silent_checks >= _SILENT_CHECKS:
                link.give_up("its heartbeat is silent")
        silent_checks = max((link.silent_checks for link in self._receiving), default=0)
        if silent_checks >= _SILENT_CHECKS:
            self._sender.interrupt()
        if silent_checks >= 2 * _SILENT_CHECKS:
            for link in self._receiving:
                link.give_up("a silent sampler broke its weight group")

    def _catch_up_samplers(self) -> None:
        for sampler in self._outdated_samplers():
            self._catch_up(sampler)

    def _outdated_samplers(self) -> list[Sampler]:
        """Live samplers without the published version; none during a publication and after an error."""
        if self._error or self._newest is None or self._newest.policy_version != self._buffer.published_version():
            return []
        samplers = (sampler for sampler in self._buffer.samplers() if sampler.alive)
        return [each for each in samplers if each.state != "LIVE" or each.incarnation != self._incarnation]

    def _catch_up(self, sampler: Sampler) -> None:
        """Sends the newest version to one sampler over a separate connection during training, and admits it."""
        with self._lock:
            link = self._link(sampler)
            if link.busy or not link.may_retry:
                return
            link.busy = True
            if link in self._group:  # it leaves that group for the private one
                self._group = frozenset()
        try:
            manifest = self._send_newest(link)
            link.note_catch_up(manifest is not None)
        except WeightTransferError as error:  # there is no copy now; the next one waits for this sampler
            log.info("weights: sampler %s is caught up later: %s", sampler.id, error)
            return
        finally:
            self._release([link])
        if manifest is None:
            return
        # Refused if a newer version has been published meanwhile; the sampler then takes part in the next publication.
        if self._buffer.admit_sampler(self._incarnation, sampler, manifest.policy_version):
            log.info("weights: sampler %s caught up with version %d", sampler.id, manifest.policy_version)

    def _send_newest(self, link: SamplerLink) -> WeightManifest | None:
        """The manifest that the sampler acknowledged, or None. A sampler without the adapters' base gets it too."""
        if not _answering([link]):
            return None
        for brings_base in (False, True):
            if brings_base == link.lacks_base and (manifest := self._send_copy(link, brings_base)) is not None:
                link.lacks_base = False
                return manifest
        return None

    def _send_copy(self, link: SamplerLink, brings_base: bool) -> WeightManifest | None:
        if self._backend == "disk":
            return self._send_folder(link, brings_base)
        seconds = self._deadline_seconds
        offer = self._sender.start_copy(self._host, link.sampler.tensor_parallel_size, seconds, brings_base=brings_base)
        if link.reply(link.join(offer.address, 1, self._incarnation, seconds), "did not join") is None:
            return None
        call = link.update(offer.manifest, seconds, offer.address.group_name)
        return None if link.acknowledgement(call, offer.manifest) is None else offer.manifest

    def _send_folder(self, link: SamplerLink, brings_base: bool) -> WeightManifest | None:
        manifest, folder = self._newest, self._folder / "with-base"
        assert manifest is not None
        if brings_base:
            manifest = self._sender.write_copy(folder, brings_base=True)
        reply = link.acknowledgement(link.update(manifest, self._deadline_seconds), manifest)
        shutil.rmtree(folder, ignore_errors=True)
        return None if reply is None else manifest


def _answering(links: Sequence[SamplerLink]) -> list[SamplerLink]:
    """The samplers that answer a ping; the others have failed."""
    calls = [link.ping() for link in links]
    return [link for link, call in zip(links, calls, strict=True) if link.reply(call, "does not answer") is not None]
