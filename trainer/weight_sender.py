"""The sender of weight updates: gathers the policy bucket by bucket, sends each bucket once, and updates late joiners
from a copy.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tandem.protos.errors import EnvironmentLackError, TandemError, WeightTransferError
from tandem.protos.manifest import (
    ParameterSpec,
    algorithm_of_backend,
    bucket_file,
    plan_buckets,
    weights_digest,
    with_base,
)
from tandem.protos.store_source import StoreSource
from tandem.protos.types import AdapterSpec, BucketSpec, DigestAlgorithm, WeightGroupAddress, WeightManifest
from tandem.protos.weight_group import (
    WeightGroup,
    bucket_tensors,
    empty_bucket,
    export_cuda_bucket,
    fill_bucket,
)
from tandem.trainer.checkpoints.durable import atomic_folder
from tandem.trainer.checkpoints.export import Gather
from tandem.trainer.kept_copy import KeptCopy, WeightCopy
from tandem.trainer.weight_snapshot import WeightSnapshot, begin_differences, few_buckets

if TYPE_CHECKING:
    from tandem.trainer.models.lora import Adapters

_CPU = torch.device("cpu")


class WeightSource(Protocol):
    """The learner's interface for the sender. `gather` is collective, unless the learner says that its threads may call
    it: every rank calls it with the same names.
    """

    rank: int

    def parameter_specs(self) -> Sequence[ParameterSpec]: ...

    def gather(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class CopyTransfer:
    """A transfer to one late joiner. It joins `address` with ranks from 1, then updates with `manifest`."""

    address: WeightGroupAddress
    manifest: WeightManifest


class WeightSender:
    """Sends weights from rank 0. Every trainer rank constructs one and calls `broadcast`.

    A version starts with `manifest`. For `gloo` and `nccl`, a group is opened first (see `prepare` and `connect`), and
    the samplers are told to update while all ranks call `broadcast`. For `disk` and `ipc`, `broadcast` comes first and
    the samplers fetch what its manifest names (`fetched_by_samplers`). `release` ends the version once every sampler
    has answered or was left out. For `gloo` and `disk`, all ranks may call `snapshot` or `begin_snapshot` first;
    rank 0 alone then broadcasts the snapshot, while the weights change.

    With `adapters`, a version consists of the adapters only, and samplers merge them into the base in their model
    folder. A sampler with another base, or none, receives the base with the copy.

    With `encoding` "delta", samplers keep every version, and a snapshot has the differences to the version before it.
    They are sent if the manifest names that version as its `base`. `sent_bytes` and `encode_seconds` are those of the
    last version.

    `store` is where its groups meet; None if it opens no group.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        bucket_bytes: int,
        device: torch.device = _CPU,
        adapters: Adapters | None = None,
        store: StoreSource | None = None,
        encoding: str = "full",
    ) -> None:
        assert encoding == "full" or adapters is None, "adapters are sent whole"
        self._source = source
        self._encoding = encoding
        self.sent_bytes = 0
        self.encode_seconds = 0.0
        self._store = store
        self._device = device
        self._adapters = adapters
        self._gather = source.gather if adapters is None else adapters.gather_factors
        specs = source.parameter_specs()
        self._buckets = plan_buckets(specs if adapters is None else adapters.factor_specs(), bucket_bytes)
        self._base = () if adapters is None else plan_buckets(specs, bucket_bytes)
        self._base_buffers: tuple[torch.Tensor, ...] | None = None
        self._base_algorithm: DigestAlgorithm | None = None
        self._kept = KeptCopy()
        self._prepared: WeightGroupAddress | None = None
        self._group: WeightGroup | None = None
        self._exported: list[torch.Tensor] = []

    @staticmethod
    def fetched_by_samplers(backend: str) -> bool:
        """True if samplers read what `broadcast` wrote instead of taking part in it."""
        return backend in ("disk", "ipc")

    @property
    def copy(self) -> WeightCopy:
        """The newest version, for late joiners and exports; only on rank 0."""
        assert self._kept.newest is not None, "a copy exists once a version was broadcast, until the next snapshot"
        return self._kept.newest

    @property
    def keeps_whole_weights(self) -> bool:
        """Whether the copy has all weights, not only adapters."""
        return self._adapters is None

    def kept_weights(self) -> dict[str, torch.Tensor]:
        """The weights of the copy by name, which the next version overwrites; none on ranks other than 0."""
        held = zip(self.copy.manifest.buckets, self.copy.buffers, strict=True) if self._source.rank == 0 else ()
        return {name: tensor for spec, buffer in held for name, tensor in bucket_tensors(spec, buffer)}

    def manifest(
        self, incarnation: int, policy_version: int, backend: str, *, changed: bool = True, location: str = ""
    ) -> WeightManifest:
        """The manifest of a version before it is sent. Without `changed` it repeats the previous one and has no
        buckets. `location` is the folder of `disk`. The digests are `sums` if the backend sends from a GPU's memory.

        All ranks must call it: with adapters, the first version with buckets gathers the base.
        """
        algorithm = algorithm_of_backend(backend)
        buckets = self._buckets if changed else ()
        manifest = WeightManifest(incarnation, policy_version, backend, buckets, location, encoding=self._encoding)
        return self._digested_by(algorithm, manifest)

    def _digested_by(self, algorithm: DigestAlgorithm, manifest: WeightManifest) -> WeightManifest:
        """The manifest for digests of this algorithm, with adapters and the digests of their base, if it has them."""
        manifest = replace(manifest, digest_algorithm=algorithm)
        if self._adapters is None or not manifest.buckets:
            return manifest
        if self._base_buffers is None:  # for samplers that lack the base
            filled = tuple(self._filled(self._base, self._adapters.gather_base, _CPU, algorithm))
            self._base_buffers = tuple(buffer for _, buffer in filled)
            self._base = tuple(spec for spec, _ in filled) or self._base
        elif self._base_algorithm != algorithm:
            held = tuple(zip(self._base, self._base_buffers, strict=False))  # none on ranks other than 0
            self._base = tuple(_with_digest(*filled, algorithm) for filled in held) or self._base
        self._base_algorithm = algorithm
        adapters = AdapterSpec(self._adapters.adapter_rank, self._adapters.scaling, base=self._base)
        return replace(manifest, adapters=adapters)

    def prepare(self, host: str, world_size: int, backend: str) -> WeightGroupAddress:
        """Rank 0: closes the open group and names a new one of `world_size` ranks, including itself.

        It returns at once so that the samplers can be told where to join; `connect` waits for them.
        """
        self.close()
        self._prepared = WeightGroupAddress(host, f"weights-{uuid4().hex[:12]}", world_size, backend)
        return self._prepared

    def connect(self, timeout_seconds: float) -> None:
        """Rank 0: waits for every rank of the prepared group. Raises WeightTransferError at the deadline."""
        assert self._prepared is not None, "prepare comes before connect"
        device = self._device if self._prepared.backend == "nccl" else _CPU
        self._group = self._connect(self._prepared, device, timeout_seconds)

    def snapshot(self, manifest: WeightManifest) -> WeightSnapshot:
        """As `begin_snapshot`, and waits for the differences."""
        return self.begin_snapshot(manifest)()

    def begin_snapshot(self, manifest: WeightManifest) -> Callable[[], WeightSnapshot]:
        """All ranks, or rank 0 alone if `gather` is not collective: copies every bucket into host memory of rank 0,
        whose threads encode the differences to the copy meanwhile. What this returns waits for them.

        It takes the memory of the copy, and there is no copy until `broadcast` ends, unless a late joiner reads it or
        asked in vain during the broadcast before.
        """
        if not manifest.buckets:
            return WeightSnapshot
        base = self._base_of_differences
        memory = self._kept.take_memory()
        into = few_buckets(manifest.buckets) if base is not None and memory else memory
        filled = self._filled(manifest.buckets, self._gather, _CPU, manifest.digest_algorithm, into)
        if base is not None:
            return begin_differences(filled, base, memory)
        snapshot = WeightSnapshot(tuple(filled))
        return lambda: snapshot

    @property
    def _base_of_differences(self) -> WeightCopy | None:
        return self._kept.newest if self._encoding == "delta" else None

    def digest(self, algorithm: DigestAlgorithm) -> str:
        """All ranks: gathers the current weights, without sending them. Their digest on rank 0, "" on other ranks."""
        manifest = self._digested_by(algorithm, WeightManifest(0, 0, "gloo", self._buckets))
        buckets = tuple(spec for spec, _ in self._filled(manifest.buckets, self._gather, _CPU, algorithm))
        return weights_digest(replace(manifest, buckets=buckets)) if self._source.rank == 0 else ""

    def broadcast(
        self, manifest: WeightManifest, timeout_seconds: float, snapshot: WeightSnapshot | None = None
    ) -> WeightManifest:
        """All ranks: gathers every bucket. Rank 0 sends it over the open group, if there is one, and keeps it. With a
        snapshot of the version, rank 0 alone sends and keeps that.

        Returns the manifest with digests (and location) on rank 0, and the unchanged manifest on other ranks. If
        the group breaks, rank 0 raises WeightTransferError after every bucket was gathered, so that ranks stay in step
        and the copy is complete. The group is closed; samplers that failed can be updated from the copy.
        """
        fault: WeightTransferError | None = None
        deadline = time.monotonic() + timeout_seconds
        differences: Sequence[torch.Tensor | None] = ()
        self.sent_bytes, self.encode_seconds = 0, 0.0
        if snapshot is not None:
            self.encode_seconds = snapshot.encode_seconds
        if manifest.base is not None:
            assert snapshot is not None and snapshot.base == manifest.base, "the differences are those to the base"
            differences = snapshot.differences
        exported = manifest.backend == "ipc"
        on_gpu = exported or (self._group is not None and self._group.address.backend == "nccl")
        specs: list[BucketSpec] = []
        buffers: list[torch.Tensor] = []
        memory = self._kept.take_memory() if snapshot is None and manifest.buckets else ()
        filled: Iterable[tuple[BucketSpec, torch.Tensor]] = () if snapshot is None else snapshot.buckets
        if snapshot is None:
            device, into = (self._device, ()) if on_gpu else (_CPU, memory)
            filled = self._filled(manifest.buckets, self._gather, device, manifest.digest_algorithm, into)
        for spec, buffer in filled:
            if self._group is not None and not self.fetched_by_samplers(manifest.backend):
                try:
                    difference = differences[len(buffers)] if differences else None
                    message = buffer if difference is None else difference
                    _send_message(self._group, message, manifest, deadline - time.monotonic())
                    self.sent_bytes += len(message)
                except WeightTransferError as error:
                    self.close()
                    fault = error
            if self.fetched_by_samplers(manifest.backend):
                self.sent_bytes += len(buffer)
            if exported:
                self._exported.append(buffer)
            specs.append(spec)
            buffers.append(_in_host_memory(buffer, memory[len(buffers)] if memory else None))
        if self._source.rank != 0:
            return manifest
        sent = replace(manifest, buckets=tuple(specs), base=None)
        if sent.buckets:
            self._kept.keep(WeightCopy(sent, tuple(buffers)))
        else:
            self._kept.rename(sent.incarnation, sent.policy_version)
        if sent.backend == "disk" and sent.buckets:
            sent = self.write_copy(Path(sent.location))
        if exported:
            sent = replace(sent, location=json.dumps([export_cuda_bucket(buffer) for buffer in self._exported]))
        if fault is not None:
            raise fault
        return sent

    def _filled(
        self,
        buckets: Sequence[BucketSpec],
        gather: Gather,
        device: torch.device,
        algorithm: DigestAlgorithm,
        memory: Sequence[torch.Tensor] = (),
    ) -> Iterator[tuple[BucketSpec, torch.Tensor]]:
        """All ranks: gathers the tensors of each bucket. Rank 0 yields every bucket with its digest, in new memory or
        in that of other weights in the same buckets.
        """
        for number, spec in enumerate(buckets):
            with gather([tensor.name for tensor in spec.tensors]) as tensors:
                if self._source.rank != 0:
                    continue
                buffer = memory[number] if memory else empty_bucket(spec, device)
                digest = fill_bucket(spec, tensors, buffer, algorithm)
            yield replace(spec, digest=digest), buffer

    def release(self) -> None:
        """Rank 0: frees the GPU memory shared by `ipc`, once every sampler has answered or was left out."""
        if self._exported:
            self._exported.clear()
            torch.cuda.ipc_collect()

    def start_copy(
        self, host: str, tensor_parallel_size: int, timeout_seconds: float, *, brings_base: bool = False
    ) -> CopyTransfer:
        """Rank 0: sends the copy to one late joiner in a background thread, over a separate gloo group.

        It does not use the trainer's communicators. The caller sends the address and the manifest to the sampler.
        Raises WeightTransferError while a new version replaces the copy.
        """
        lent = self._kept.lend()
        copy = self._with_base(lent) if brings_base else lent
        address = WeightGroupAddress(host, f"copy-{uuid4().hex[:12]}", 1 + tensor_parallel_size, "gloo")

        def serve() -> None:
            try:
                # The sampler's own reply tells of a failure.
                with suppress(TandemError), closing(self._connect(address, _CPU, timeout_seconds)) as group:
                    for buffer in copy.buffers:
                        _send_message(group, buffer, copy.manifest, timeout_seconds)
            finally:
                self._kept.give_back(lent)

        threading.Thread(target=serve, name="weight-copy", daemon=True).start()
        return CopyTransfer(address, replace(copy.manifest, backend="gloo", location=""))

    def write_copy(self, folder: Path, *, brings_base: bool = False) -> WeightManifest:
        """Rank 0: writes the copy atomically as safetensors, one file per bucket, and returns its `disk` manifest.
        Raises EnvironmentLackError if the disk is full or the folder cannot be written, and WeightTransferError while
        a new version replaces the copy.
        """
        lent = self._kept.lend()
        copy = self._with_base(lent) if brings_base else lent
        folder = folder.absolute()
        try:
            with atomic_folder(folder) as begun:
                for number, (spec, buffer) in enumerate(zip(copy.manifest.buckets, copy.buffers, strict=True)):
                    save_file(dict(bucket_tensors(spec, buffer)), begun / bucket_file(number))
        except (OSError, SafetensorError) as error:
            raise EnvironmentLackError(
                f"weights cannot be written to {folder}: {error}; free space or choose another folder"
            ) from error
        finally:
            self._kept.give_back(lent)
        return replace(copy.manifest, backend="disk", location=str(folder))

    def interrupt(self) -> None:
        """Rank 0, from another thread: ends a broadcast to the open group, which then raises WeightTransferError."""
        group = self._group
        if group is not None:
            group.interrupt()

    def close(self) -> None:
        """Rank 0: closes the open group, if any; its samplers notice at once."""
        if self._group is not None:
            self._group.close()
        self._group = self._prepared = None

    def _connect(self, address: WeightGroupAddress, device: torch.device, timeout_seconds: float) -> WeightGroup:
        assert self._store is not None, "a sender without a store opens no group"
        return WeightGroup(address, 0, device, timeout_seconds, self._store)

    def _with_base(self, copy: WeightCopy) -> WeightCopy:
        """The copy with the base of its adapters."""
        assert self._base_buffers is not None, "the base is held from the first version on"
        return WeightCopy(with_base(copy.manifest), self._base_buffers + copy.buffers)


def _send_message(group: WeightGroup, message: torch.Tensor, manifest: WeightManifest, timeout_seconds: float) -> None:
    seconds = max(timeout_seconds, 0.001)
    if manifest.encoding == "delta":
        group.broadcast_size(len(message), seconds)
    group.broadcast(message, seconds)


def _with_digest(spec: BucketSpec, buffer: torch.Tensor, algorithm: DigestAlgorithm) -> BucketSpec:
    """The spec of a filled bucket in host memory, whose digest is computed anew."""
    return replace(spec, digest=fill_bucket(spec, dict(bucket_tensors(spec, buffer)), buffer, algorithm))


def _in_host_memory(buffer: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
    """The buffer, or a copy of one on a GPU in this memory, or else in new, pinned memory."""
    if buffer.device == _CPU:
        return buffer
    if memory is None:
        memory = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
    return memory.copy_(buffer)
