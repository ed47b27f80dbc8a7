"""The sender of weight updates: gathers the policy bucket by bucket, sends each bucket once, and keeps a copy for late
joiners.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tandem.protos.errors import EnvironmentLackError, WeightTransferError
from tandem.protos.manifest import bucket_file, plan_buckets, with_base, with_digests
from tandem.protos.types import AdapterSpec, BucketSpec, WeightGroupAddress, WeightManifest
from tandem.protos.weight_group import (
    WeightGroup,
    WeightGroupStore,
    bucket_tensors,
    empty_bucket,
    export_cuda_bucket,
    fill_bucket,
)

_CPU = torch.device("cpu")


class WeightSource(Protocol):
    """The learner's interface for the sender. `gather` is collective: every rank calls it with the same names."""

    rank: int

    def parameter_specs(self) -> Sequence[tuple[str, str | torch.dtype, Sequence[int]]]: ...

    def gather(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, torch.Tensor]]: ...


class AdapterSource(Protocol):
    """The interface of adapters that are sent without the base. Its gather methods are collective too."""

    adapter_rank: int
    scaling: float

    def factor_specs(self) -> Sequence[tuple[str, str | torch.dtype, Sequence[int]]]: ...

    def gather_factors(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, torch.Tensor]]: ...

    def gather_base(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, torch.Tensor]]: ...


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """All buckets of one version in host memory, with digests; immutable."""

    manifest: WeightManifest
    buffers: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class CopyTransfer:
    """A transfer to one late joiner. It joins `address` with ranks from 1, then updates with `manifest`; `finished`
    holds the outcome.
    """

    address: WeightGroupAddress
    manifest: WeightManifest
    finished: Future[None]


class WeightSender:
    """Sends weights from rank 0. Every trainer rank constructs one and calls `broadcast`.

    A version starts with `manifest`. For `gloo` and `nccl`, a group is opened first (see `prepare` and `connect`), and
    the samplers are told to update while all ranks call `broadcast`. For `disk` and `ipc`, `broadcast` comes first and
    the samplers fetch what its manifest names (`fetched_by_samplers`). `release` ends the version once every sampler
    has answered or was left out.

    With `adapters`, a version consists of the adapters only, and samplers merge them into the base in their model
    folder. A sampler with another base, or none, receives the base with the copy.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        bucket_bytes: int,
        device: torch.device = _CPU,
        adapters: AdapterSource | None = None,
    ) -> None:
        self._source = source
        self._device = device
        self._adapters = adapters
        self._gather = source.gather if adapters is None else adapters.gather_factors
        self._buckets = _plan(source.parameter_specs() if adapters is None else adapters.factor_specs(), bucket_bytes)
        self._base = () if adapters is None else _plan(source.parameter_specs(), bucket_bytes)
        self._base_buffers: tuple[torch.Tensor, ...] | None = None
        self._copy: WeightCopy | None = None
        self._group_store: WeightGroupStore | None = None
        self._group: WeightGroup | None = None
        self._exported: list[torch.Tensor] = []

    @staticmethod
    def fetched_by_samplers(backend: str) -> bool:
        """True if samplers read what `broadcast` wrote instead of taking part in it."""
        return backend in ("disk", "ipc")

    @property
    def copy(self) -> WeightCopy | None:
        """The newest version, for late joiners; only on rank 0."""
        return self._copy

    def manifest(
        self, incarnation: int, policy_version: int, backend: str, *, changed: bool = True, location: str = ""
    ) -> WeightManifest:
        """The manifest of a version before it is sent. Without `changed` it repeats the previous one and has no
        buckets. `location` is the folder of `disk`.

        All ranks must call it: with adapters, the first version with buckets gathers the base.
        """
        manifest = WeightManifest(incarnation, policy_version, backend, self._buckets if changed else (), location)
        if self._adapters is None or not changed:
            return manifest
        if self._base_buffers is None:
            self._gather_base(self._adapters)
        return replace(
            manifest, adapters=AdapterSpec(self._adapters.adapter_rank, self._adapters.scaling, base=self._base)
        )

    def prepare(self, host: str, world_size: int, backend: str, timeout_seconds: float) -> WeightGroupAddress:
        """Rank 0: closes the open group and listens for a new one of `world_size` ranks, including itself.

        It returns at once so that the samplers can be told where to join; `connect` waits for them.
        """
        self.close()
        self._group_store = WeightGroupStore(host, f"weights-{uuid4().hex[:12]}", world_size, backend, timeout_seconds)
        return self._group_store.address

    def connect(self, timeout_seconds: float) -> None:
        """Rank 0: waits for every rank of the prepared group. Raises WeightTransferError at the deadline."""
        assert self._group_store is not None, "prepare comes before connect"
        device = self._device if self._group_store.address.backend == "nccl" else _CPU
        self._group = self._group_store.connect(device, timeout_seconds)

    def broadcast(self, manifest: WeightManifest, timeout_seconds: float) -> WeightManifest:
        """All ranks: gathers every bucket. Rank 0 sends it over the open group, if there is one, and keeps it.

        Returns the manifest with digests (and location) on rank 0, and the unchanged manifest on other ranks.

        Raises:
            WeightTransferError: on rank 0, after every bucket was gathered, so that ranks stay in step and the copy is
                complete. The group is closed; samplers in it may have failed and can be updated from the copy.
        """
        buffers: list[torch.Tensor] = []
        digests: list[str] = []
        fault: WeightTransferError | None = None
        deadline = time.monotonic() + timeout_seconds
        exported = manifest.backend == "ipc"
        on_gpu = exported or (self._group is not None and self._group.address.backend == "nccl")
        for spec in manifest.buckets:
            with self._gather([tensor.name for tensor in spec.tensors]) as tensors:
                if self._source.rank != 0:
                    continue
                buffer = empty_bucket(spec, self._device if on_gpu else _CPU)
                digests.append(fill_bucket(spec, tensors, buffer))
            if fault is None:
                fault = self._send(manifest, buffer, max(deadline - time.monotonic(), 0.001))
            if exported:
                self._exported.append(buffer)
            buffers.append(buffer.to(_CPU))
        if self._source.rank != 0:
            return manifest
        sent = with_digests(manifest, digests)
        self._keep(sent, buffers)
        if manifest.backend == "disk" and manifest.buckets:
            sent = self.write_copy(Path(manifest.location))
        if exported:
            sent = replace(sent, location=json.dumps([export_cuda_bucket(buffer) for buffer in self._exported]))
        if fault is not None:
            raise fault
        return sent

    def release(self) -> None:
        """Rank 0: frees the GPU memory shared by `ipc`, once every sampler has answered or was left out."""
        if self._exported:
            self._exported.clear()
            torch.cuda.ipc_collect()

    def start_copy(
        self, host: str, tensor_parallel_size: int, timeout_seconds: float, *, brings_base: bool = False
    ) -> CopyTransfer:
        """Rank 0: sends the copy to one late joiner in a background thread, over a separate gloo group.

        It does not use the trainer's communicators. The caller sends the address and the manifest to the sampler, then
        checks `finished`.
        """
        copy = self._copy_to_send(brings_base)
        group_store = WeightGroupStore(
            host, f"copy-{uuid4().hex[:12]}", 1 + tensor_parallel_size, "gloo", timeout_seconds
        )
        finished: Future[None] = Future()

        def serve() -> None:
            try:
                group = group_store.connect(_CPU, timeout_seconds)
                try:
                    for buffer in copy.buffers:
                        group.broadcast(buffer, timeout_seconds)
                finally:
                    group.close()
            except WeightTransferError as error:
                finished.set_exception(error)
            else:
                finished.set_result(None)

        threading.Thread(target=serve, name="weight-copy", daemon=True).start()
        return CopyTransfer(group_store.address, replace(copy.manifest, backend="gloo", location=""), finished)

    def write_copy(self, folder: Path, *, brings_base: bool = False) -> WeightManifest:
        """Rank 0: writes the copy atomically as safetensors, one file per bucket, and returns its `disk` manifest.

        Raises:
            EnvironmentLackError: the disk is full or the folder cannot be written.
        """
        copy = self._copy_to_send(brings_base)
        folder = folder.absolute()
        unfinished = folder.with_name(f".{folder.name}.{uuid4().hex[:8]}")
        try:
            unfinished.mkdir(parents=True)
            for number, (spec, buffer) in enumerate(zip(copy.manifest.buckets, copy.buffers, strict=True)):
                file = unfinished / bucket_file(number)
                save_file(dict(bucket_tensors(spec, buffer)), file)
                _sync(file)
            _sync(unfinished)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
            _sync(folder.parent)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise EnvironmentLackError(
                f"weights cannot be written to {folder}: {error}; free space or choose another folder"
            ) from error
        return replace(copy.manifest, backend="disk", location=str(folder))

    def close(self) -> None:
        """Rank 0: closes the open group, if any; its samplers notice at once."""
        if self._group is not None:
            self._group.close()
        self._group = self._group_store = None

    def _send(
        self, manifest: WeightManifest, buffer: torch.Tensor, timeout_seconds: float
    ) -> WeightTransferError | None:
        if self._group is None or self.fetched_by_samplers(manifest.backend):
            return None
        try:
            self._group.broadcast(buffer, timeout_seconds)
        except WeightTransferError as error:
            self.close()
            return error
        return None

    def _gather_base(self, adapters: AdapterSource) -> None:
        """All ranks: gathers the base. Rank 0 keeps it with its digests for samplers that lack it."""
        held: list[BucketSpec] = []
        buffers: list[torch.Tensor] = []
        for spec in self._base:
            with adapters.gather_base([tensor.name for tensor in spec.tensors]) as tensors:
                if self._source.rank != 0:
                    continue
                buffer = empty_bucket(spec, self._device)
                held.append(replace(spec, digest=fill_bucket(spec, tensors, buffer)))
            buffers.append(buffer.to(_CPU))
        self._base = tuple(held) or self._base
        self._base_buffers = tuple(buffers)

    def _copy_to_send(self, brings_base: bool) -> WeightCopy:
        copy = self._copy
        assert copy is not None, "a copy exists once a version was broadcast"
        if not brings_base:
            return copy
        assert self._base_buffers is not None, "the base is held from the first version on"
        return WeightCopy(with_base(copy.manifest), self._base_buffers + copy.buffers)

    def _keep(self, sent: WeightManifest, buffers: Sequence[torch.Tensor]) -> None:
        if sent.buckets:
            self._copy = WeightCopy(sent, tuple(buffers))
        elif self._copy is not None:  # same weights as the previous version, with a new number
            renamed = replace(self._copy.manifest, incarnation=sent.incarnation, policy_version=sent.policy_version)
            self._copy = WeightCopy(renamed, self._copy.buffers)


def _plan(specs: Sequence[tuple[str, str | torch.dtype, Sequence[int]]], bucket_bytes: int) -> tuple[BucketSpec, ...]:
    return plan_buckets(
        [(name, str(dtype).removeprefix("torch."), shape) for name, dtype, shape in specs], bucket_bytes
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
