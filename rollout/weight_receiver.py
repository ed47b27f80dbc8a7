"""Receiver of weight updates. A thread receives and checks a version while the engine samples; then it is applied.

Staging takes memory for one copy of the weights on the worker's device. `ipc` needs none and reads the trainer's.
When only adapters are sent, the thread merges them into the base weights and stages the result.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tandem.protos.errors import TandemError, WeightTransferError
from tandem.protos.manifest import bucket_file, decode_manifest
from tandem.protos.types import BucketSpec, WeightGroupAddress, WeightManifest
from tandem.protos.weight_group import (
    WeightGroup,
    bucket_tensors,
    check_bucket,
    empty_bucket,
    fill_bucket,
    import_cuda_bucket,
)
from tandem.rollout.base_weights import BaseWeights, check_factors
from tandem.rollout.sampler import TransferProgress

_Arrivals = Iterator[tuple[BucketSpec, torch.Tensor]]


@dataclass
class _Transfer:
    """A thread that joins a group or receives a version."""

    deadline: float
    previous: threading.Thread | None
    started: float = field(default_factory=time.perf_counter)
    thread: threading.Thread | None = None
    progress: TransferProgress = field(
        default_factory=lambda: TransferProgress(done=False, seconds=0.0, digests=[], error=None)
    )

    @property
    def seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)


class StagedReceiver:
    """Joins one weight group at a time and stages one version at a time.

    If a bucket fails its digest or the sender is gone, the whole version is dropped. `expected` maps the names of the
    model's parameters to their shapes; a manifest with other tensors is refused before any bucket is received. None
    skips that check. `folder` may hold the base of adapters.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        expected: Mapping[str, tuple[int, ...]] | None,
        optional: frozenset[str],
        folder: Path | None = None,
    ) -> None:
        self._device = device
        self._rank = rank
        self._expected = expected
        self._optional = optional
        self._group: WeightGroup | None = None
        self._transfer: _Transfer | None = None
        self._base = BaseWeights(folder)
        self._staged: list[tuple[str, torch.Tensor]] = []

    def start_join(self, address: Mapping[str, Any], first_rank: int, timeout_seconds: float) -> None:
        """Starts to join a group as rank `first_rank` + this worker's rank, and leaves the previous group.

        `address` holds the fields of a `WeightGroupAddress`.
        """
        group, rank = WeightGroupAddress(**address), first_rank + self._rank
        self._start(timeout_seconds, lambda transfer: self._join(transfer, group, rank))

    def start_receive(self, manifest: bytes, group_name: str, timeout_seconds: float) -> None:
        """Starts to stage a version. A staged version that was not applied is dropped."""
        self._start(timeout_seconds, lambda transfer: self._receive(transfer, decode_manifest(manifest), group_name))

    def progress(self) -> TransferProgress:
        """Returns the progress of the newest transfer."""
        transfer = self._transfer
        assert transfer is not None, "progress is asked for after a start"
        return transfer.progress

    def take(self) -> list[tuple[str, torch.Tensor]]:
        """Returns names and tensors of the staged version and drops its references to them."""
        staged, self._staged = self._staged, []
        return staged

    def _start(self, timeout_seconds: float, work: Callable[[_Transfer], None]) -> None:
        transfer = _Transfer(time.monotonic() + timeout_seconds, self._transfer.thread if self._transfer else None)

        def run() -> None:
            stream = (
                torch.cuda.stream(torch.cuda.Stream(self._device)) if self._device.type == "cuda" else nullcontext()
            )
            try:
                if transfer.previous is not None:
                    transfer.previous.join(transfer.seconds_left)
                    if transfer.previous.is_alive():
                        raise WeightTransferError("the transfer before this one has not ended")
                with stream:
                    work(transfer)
            except TandemError as error:
                transfer.progress["error"] = (type(error).__name__, str(error))
            except Exception as error:  # a bug: report it to the waiting caller instead of losing it with this thread
                transfer.progress["error"] = ("WeightTransferError", f"{type(error).__name__}: {error}")
            finally:
                transfer.previous = None
                transfer.progress["seconds"] = time.perf_counter() - transfer.started
                transfer.progress["done"] = True

        transfer.thread = threading.Thread(target=run, name="weights", daemon=True)
        self._transfer = transfer
        transfer.thread.start()

    def _join(self, transfer: _Transfer, address: WeightGroupAddress, rank: int) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        device = torch.device("cpu") if address.backend == "gloo" else self._device
        self._group = WeightGroup(address, rank, device, transfer.seconds_left)

    def _receive(self, transfer: _Transfer, manifest: WeightManifest, group_name: str) -> None:
        self._staged = []
        if manifest.buckets:
            self._check_names(manifest)
        sources = {"disk": self._from_disk, "ipc": self._from_ipc}
        arrivals = sources.get(manifest.backend, self._from_group)(transfer, manifest, group_name)
        arrived: list[tuple[str, torch.Tensor]] = []
        fault: WeightTransferError | None = None
        for number, (spec, buffer) in enumerate(arrivals):
            place = (
                f"version {manifest.policy_version}, bucket {number + 1} of "
                f"{len(manifest.buckets)} by {manifest.backend}"
            )
            try:
                transfer.progress["digests"].append(check_bucket(spec, buffer, place=place))
            except WeightTransferError as error:
                fault = fault or error  # keep receiving: a member that stops reading breaks the group for all others
            arrived += bucket_tensors(spec, buffer if manifest.adapters else buffer.to(self._device))
        if fault is not None:
            raise fault
        if manifest.adapters is not None:
            arrived = self._base.merged(manifest.adapters, dict(arrived), self._device)
        if self._transfer is transfer:  # otherwise a newer transfer has replaced it
            self._staged = arrived

    def _check_names(self, manifest: WeightManifest) -> None:
        if manifest.adapters is not None:
            check_factors(manifest)
        if self._expected is None:
            return
        whole = manifest.adapters.base if manifest.adapters else manifest.buckets
        sent = {tensor.name: tensor.shape for bucket in whole for tensor in bucket.tensors}
        missing = sorted(self._expected.keys() - sent.keys() - self._optional)
        unknown = sorted(sent.keys() - self._expected.keys() - self._optional)
        other = sorted(name for name, shape in sent.items() if self._expected.get(name, shape) != shape)
        if missing or unknown or other:
            name, why = next(
                (names[0], why) for names, why in ((missing, "lacks"), (unknown, "adds"), (other, "reshapes")) if names
            )
            raise WeightTransferError(
                f"version {manifest.policy_version} {why} parameter {name}: it belongs to another model"
            )

    def _from_group(self, transfer: _Transfer, manifest: WeightManifest, group_name: str) -> _Arrivals:
        group = self._group
        if manifest.buckets and (group is None or group.address.group_name != group_name):
            raise WeightTransferError(f"this sampler is not in weight group {group_name}; it must join first")
        for spec in manifest.buckets:
            assert group is not None
            buffer = empty_bucket(spec, group.device)
            try:
                group.broadcast(buffer, transfer.seconds_left)
            except WeightTransferError:
                self._group = None
                group.close()
                raise
            yield spec, buffer

    def _from_disk(self, _: _Transfer, manifest: WeightManifest, _group: str) -> _Arrivals:
        for number, spec in enumerate(manifest.buckets):
            file = Path(manifest.location) / bucket_file(number)
            buffer = empty_bucket(spec, torch.device("cpu"))
            try:
                with safe_open(file, framework="pt") as opened:
                    fill_bucket(spec, {tensor.name: opened.get_tensor(tensor.name) for tensor in spec.tensors}, buffer)
            except (OSError, SafetensorError) as error:
                raise WeightTransferError(f"cannot read weights {file}: {error}") from error
            yield spec, buffer

    def _from_ipc(self, _: _Transfer, manifest: WeightManifest, _group: str) -> _Arrivals:
        for spec, handle in zip(manifest.buckets, json.loads(manifest.location), strict=True):
            yield spec, import_cuda_bucket(handle, self._device)
