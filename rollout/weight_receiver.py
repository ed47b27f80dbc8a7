"""Receiver of weight updates. A thread receives and checks a version while the engine samples; then it is applied.

Staging takes memory for one copy of the weights on the worker's device; host memory of buckets is used again. `ipc`
needs none and reads the trainer's. When only adapters are sent, the thread merges them into the base weights and stages
the result. When differences are sent, the thread applies them to a copy of the last version that it keeps in host
memory.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from tandem.protos.bucket_delta import apply_delta
from tandem.protos.bucket_digest import DIGEST_BYTES, BucketDigest
from tandem.protos.errors import MissingVersionError, TandemError, WeightTransferError
from tandem.protos.manifest import bucket_file, decode_manifest
from tandem.protos.store_source import StoreSource
from tandem.protos.types import BucketSpec, WeightGroupAddress, WeightManifest
from tandem.protos.weight_group import (
    WeightGroup,
    begin_digest,
    bucket_tensors,
    check_bucket,
    empty_bucket,
    fill_bucket,
    import_cuda_bucket,
)
from tandem.rollout.base_weights import BaseWeights, check_factors
from tandem.rollout.bucket_memory import BucketMemory
from tandem.rollout.sampler import TransferProgress

_Arrivals = Iterator[tuple[BucketSpec, torch.Tensor, BucketDigest | None]]
"""Buckets, or differences, as they arrived, and what is known of their digests."""
Named = Iterator[tuple[str, torch.Tensor]]
Staged = list[Any]  # names and tensors, or what an engine makes of them


class _Transfer(threading.Thread):
    """A thread that joins a group or receives a version."""

    def __init__(self, timeout_seconds: float, work: Callable[[_Transfer], None]) -> None:
        super().__init__(name="weights", daemon=True)
        self._deadline = time.monotonic() + timeout_seconds
        self._work = work
        self.progress = TransferProgress(done=False, seconds=0.0, digests=[], error=None)
        self._unfinished: _Transfer | None = None

    def wait_for(self, earlier: _Transfer | None) -> None:
        """Waits until an earlier transfer, and those that it had waited for in vain, have ended. Raises
        WeightTransferError at the deadline.
        """
        while earlier is not None:
            earlier.join(self.seconds_left)
            if earlier.is_alive():
                self._unfinished = earlier
                raise WeightTransferError("the transfer before this one has not ended")
            earlier = earlier._unfinished

    @property
    def seconds_left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def run(self) -> None:
        started = time.perf_counter()
        try:
            self._work(self)
        except TandemError as error:
            self.progress["error"] = (type(error).__name__, str(error))
        except Exception as error:  # a bug: report it to the waiting caller instead of losing it with this thread
            self.progress["error"] = ("WeightTransferError", f"{type(error).__name__}: {error}")
        finally:
            del self._work  # it refers to the previous transfer
            self.progress["seconds"] = time.perf_counter() - started
            self.progress["done"] = True


class _Held(NamedTuple):
    """The buckets of the version to which the next differences apply, in host memory."""

    version: tuple[int, int]
    """Incarnation and policy version."""
    buckets: list[torch.Tensor]


class StagedReceiver:
    """Joins one weight group at a time and stages one version at a time.

    If a bucket fails its digest or the sender is gone, the whole version is dropped. `expected` maps the names of the
    model's parameters to their shapes; a manifest with other tensors is refused before any bucket is received. None
    skips that check. `folder` may hold the base of adapters. `load` turns the tensors of a version, beside the running
    engine, into what `take` returns. It reads them while they arrive; memory that it keeps no tensor of is used again.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        expected: Mapping[str, tuple[int, ...]] | None,
        optional: frozenset[str],
        folder: Path | None = None,
        load: Callable[[Named], Staged] = list,
    ) -> None:
        self._device = device
        self._rank = rank
        self._expected = expected
        self._optional = optional
        self._group: WeightGroup | None = None
        self._transfer: _Transfer | None = None
        self._base = BaseWeights(folder)
        self._load = load
        self._staged: Staged = []
        self._held: _Held | None = None
        self._memory = BucketMemory()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Of all transfers: torch reuses memory only on the stream that it was freed on."""

    def start_join(
        self, address: Mapping[str, Any], first_rank: int, store: Sequence[Any], timeout_seconds: float
    ) -> None:
        """Starts to join a `WeightGroupAddress` as rank `first_rank` + this worker's; leaves the previous group.

        `store` is a `StoreSource`, or the sequence that it becomes on its way to an engine's process.
        """
        group, rank, source = WeightGroupAddress(**address), first_rank + self._rank, StoreSource(*store)
        left = self._group  # the transfer's thread may drop it
        if left is not None and self._transfer is not None and self._transfer.is_alive():
            left.interrupt()  # a member of it may hang
        self._start(timeout_seconds, lambda transfer: self._join(transfer, group, rank, source))

    def start_receive(self, manifest: bytes, group_name: str, timeout_seconds: float) -> None:
        """Starts to stage a version. A staged version that was not applied is dropped."""
        self._start(timeout_seconds, lambda transfer: self._receive(transfer, decode_manifest(manifest), group_name))

    def progress(self) -> TransferProgress:
        """A copy, because whoever acts on it must not see it change meanwhile."""
        assert self._transfer is not None, "progress is asked for after a start"
        return self._transfer.progress.copy()

    def take(self) -> Staged:
        """Returns what `load` made of the staged version, by default names and tensors, and drops it."""
        staged, self._staged = self._staged, []
        return staged

    def _start(self, timeout_seconds: float, work: Callable[[_Transfer], None]) -> None:
        previous = self._transfer

        def run(transfer: _Transfer) -> None:
            transfer.wait_for(previous)
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                work(transfer)

        self._transfer = _Transfer(timeout_seconds, run)
        self._transfer.start()

    def _join(self, transfer: _Transfer, address: WeightGroupAddress, rank: int, store: StoreSource) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        device = torch.device("cpu") if address.backend == "gloo" else self._device
        self._group = WeightGroup(address, rank, device, transfer.seconds_left, store)

    def _receive(self, transfer: _Transfer, manifest: WeightManifest, group_name: str) -> None:
        self._staged = []
        if not manifest.buckets:
            if self._held is not None:  # equal weights, under a new number
                self._held = _Held((manifest.incarnation, manifest.policy_version), self._held.buckets)
            return
        self._check_names(manifest)
        arrived = self._arriving(transfer, manifest, group_name)
        tensors: Named = arrived
        if manifest.adapters is not None:
            merged = self._base.merged(manifest, dict(arrived), self._device)[::-1]
            tensors = (merged.pop() for _ in range(len(merged)))  # each is freed once it is loaded
        try:
            loaded = self._load(tensors)
        finally:
            deque(arrived, maxlen=0)  # a member that stops reading breaks the group for all others
        if self._transfer is transfer:  # otherwise a newer transfer has replaced it
            self._staged = loaded

    def _arriving(self, transfer: _Transfer, manifest: WeightManifest, group_name: str) -> Named:
        """The tensors of each bucket whose digest is right. Raises WeightTransferError after the last bucket if the
        digest of one is wrong, and no tensor follows that bucket.
        """
        held, self._held = self._held, None  # differences change its bits before they are checked
        if manifest.base is None:
            held = None  # frees its memory for the buckets that arrive
        kept: list[torch.Tensor] = []
        sources = {"disk": self._from_disk, "ipc": self._from_ipc}
        arrivals = sources.get(manifest.backend, self._from_group)(transfer, manifest, group_name)
        fault: WeightTransferError | None = None
        for number, (spec, message, digest) in enumerate(arrivals):
            bucket = f"bucket {number + 1} of {len(manifest.buckets)} by {manifest.backend}"
            place = f"version {manifest.policy_version}, {bucket}"
            try:
                buffer = _whole(spec, number, message, manifest, held)
                digest = digest or begin_digest(buffer[: spec.num_bytes], manifest.digest_algorithm)
                transfer.progress["digests"].append(check_bucket(spec, buffer, digest, place=place))
            except WeightTransferError as error:
                fault = fault or error
                continue
            if fault is not None:
                continue
            is_kept = manifest.encoding == "delta"
            if is_kept:
                kept.append(buffer)
            # A model may write to the tensors that it loads, so it gets a copy of what is kept.
            yield from bucket_tensors(spec, buffer if manifest.adapters else buffer.to(self._device, copy=is_kept))
        if fault is not None:
            raise fault
        if kept:
            self._held = _Held((manifest.incarnation, manifest.policy_version), kept)

    def _check_names(self, manifest: WeightManifest) -> None:
        if manifest.adapters is not None:
            check_factors(manifest)
        if self._expected is None:
            return
        whole = manifest.adapters.base if manifest.adapters else manifest.buckets
        sent = {tensor.name: tensor.shape for bucket in whole for tensor in bucket.tensors}
        differences = {
            "lacks": self._expected.keys() - sent.keys() - self._optional,
            "adds": sent.keys() - self._expected.keys() - self._optional,
            "reshapes": {name for name, shape in sent.items() if self._expected.get(name, shape) != shape},
        }
        for why, names in differences.items():
            if names:
                told = f"version {manifest.policy_version} {why} parameter {min(names)}"
                raise WeightTransferError(f"{told}: it belongs to another model")

    def _from_group(self, transfer: _Transfer, manifest: WeightManifest, group_name: str) -> _Arrivals:
        group = self._group
        if group is None or group.address.group_name != group_name:
            raise WeightTransferError(f"this sampler is not in weight group {group_name}; it must join first")
        for spec in manifest.buckets:
            on_cpu = group.device.type == "cpu"
            buffer, digest = self._memory.lend(spec) if on_cpu else empty_bucket(spec, group.device), None
            try:
                size = len(buffer)
                if manifest.encoding == "delta":
                    size = group.broadcast_size(0, transfer.seconds_left)
                    if not DIGEST_BYTES <= size <= len(buffer):
                        raise WeightTransferError(f"{size} bytes are announced for a bucket of {spec.num_bytes}")
                if size == len(buffer):
                    digest = begin_digest(buffer[: spec.num_bytes], manifest.digest_algorithm)
                group.broadcast(buffer[:size], transfer.seconds_left, None if digest is None else digest.advance)
            except WeightTransferError:
                self._group = None
                group.close()
                raise
            yield spec, buffer[:size], digest

    def _from_disk(self, _: _Transfer, manifest: WeightManifest, _group: str) -> _Arrivals:
        for number, spec in enumerate(manifest.buckets):
            file = Path(manifest.location) / bucket_file(number)
            buffer = self._memory.lend(spec)
            try:
                with safe_open(file, framework="pt") as opened:
                    tensors = {tensor.name: opened.get_tensor(tensor.name) for tensor in spec.tensors}
                    fill_bucket(spec, tensors, buffer, manifest.digest_algorithm)
            except (OSError, SafetensorError) as error:
                raise WeightTransferError(f"cannot read weights {file}: {error}") from error
            yield spec, buffer, None

    def _from_ipc(self, _: _Transfer, manifest: WeightManifest, _group: str) -> _Arrivals:
        for spec, handle in zip(manifest.buckets, json.loads(manifest.location), strict=True):
            yield spec, import_cuda_bucket(handle, self._device), None


def _whole(
    spec: BucketSpec, number: int, message: torch.Tensor, manifest: WeightManifest, held: _Held | None
) -> torch.Tensor:
    """The whole bucket of a message, which is that bucket or a difference. Raises MissingVersionError."""
    size = spec.num_bytes
    if len(message) == size + DIGEST_BYTES:
        return message
    if held is None or held.version != manifest.base:
        has = "none" if held is None else f"version {held.version[1]} of incarnation {held.version[0]}"
        base = manifest.base or (-1, -1)
        raise MissingVersionError(
            f"version {manifest.policy_version} arrived as a difference to version {base[1]} of incarnation {base[0]}, "
            f"and this sampler holds {has}; it must get the whole weights"
        )
    bucket = held.buckets[number]
    apply_delta(spec, message[:-DIGEST_BYTES].numpy(), bucket[:size].numpy())
    bucket[size:] = message[-DIGEST_BYTES:]
    return bucket
