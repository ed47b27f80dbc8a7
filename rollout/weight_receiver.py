"""The receiving end of a weight update: everything arrives and is checked in a thread while the engine samples, then is
applied at once.

`StagedReceiver` knows nothing of vLLM. `WeightReceiver` is vLLM's worker extension: one a tensor-parallel worker.
Staging takes memory for one copy of the weights on the worker's device (none for `ipc`, which reads the trainer's). Of
adapters alone, the whole weights are made here, in that thread, and staged as if they had come.
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


@dataclass
class Job:
    """One piece of work in a thread. `error` holds the class name and message of what ended it early."""

    deadline: float
    previous: threading.Thread | None
    started: float = field(default_factory=time.perf_counter)
    done: bool = False
    seconds: float = 0.0
    digests: list[str] = field(default_factory=list)
    error: tuple[str, str] | None = None
    thread: threading.Thread | None = None

    @property
    def seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)


class StagedReceiver:
    """Joins one weight group at a time and stages one version at a time.

    A version whose bucket fails its digest, or whose sender is gone, is dropped whole. `expected` maps the names of the
    model's parameters to their shapes; a manifest with other ones is refused before anything is received. None skips
    that check.
    `folder` is where the base of adapters may lie.
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
        self._job: Job | None = None
        self._base = BaseWeights(folder)
        self._staged: list[tuple[str, torch.Tensor]] = []

    def start_join(self, address: Mapping[str, Any], first_rank: int, timeout_seconds: float) -> None:
        """Enters a group as rank `first_rank` + this worker's; the group before it is left."""
        self._start(
            timeout_seconds, lambda job: self._join(job, WeightGroupAddress(**address), first_rank + self._rank)
        )

    def start_receive(self, manifest: bytes, group_name: str, timeout_seconds: float) -> None:
        """Stages a version; the one staged before, if it was never applied, is dropped."""
        self._start(timeout_seconds, lambda job: self._receive(job, decode_manifest(manifest), group_name))

    def progress(self) -> dict[str, Any]:
        """`done`, `seconds`, `digests`, `error` (None, or class name and message) of the newest job."""
        job = self._job
        assert job is not None, "progress is asked for after a start"
        return {"done": job.done, "seconds": job.seconds, "digests": job.digests, "error": job.error}

    def take(self) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors of the staged version, which the receiver forgets."""
        staged, self._staged = self._staged, []
        return staged

    def _start(self, timeout_seconds: float, work: Callable[[Job], None]) -> None:
        job = Job(time.monotonic() + timeout_seconds, self._job.thread if self._job else None)

        def run() -> None:
            stream = (
                torch.cuda.stream(torch.cuda.Stream(self._device)) if self._device.type == "cuda" else nullcontext()
            )
            try:
                if job.previous is not None:
                    job.previous.join(job.seconds_left)
                    if job.previous.is_alive():
                        raise WeightTransferError("the transfer before this one has not ended")
                with stream:
                    work(job)
            except TandemError as error:
                job.error = (type(error).__name__, str(error))
            except Exception as error:  # a bug: it must reach the caller, who waits, and not die with this thread
                job.error = ("WeightTransferError", f"{type(error).__name__}: {error}")
            finally:
                job.previous = None
                job.seconds = time.perf_counter() - job.started
                job.done = True

        job.thread = threading.Thread(target=run, name="weights", daemon=True)
        self._job = job
        job.thread.start()

    def _join(self, job: Job, address: WeightGroupAddress, rank: int) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        device = torch.device("cpu") if address.backend == "gloo" else self._device
        self._group = WeightGroup(address, rank, device, job.seconds_left)

    def _receive(self, job: Job, manifest: WeightManifest, group_name: str) -> None:
        self._staged = []
        if manifest.buckets:
            self._check_names(manifest)
        sources = {"disk": self._from_disk, "ipc": self._from_ipc}
        arrivals = sources.get(manifest.backend, self._from_group)(job, manifest, group_name)
        arrived: list[tuple[str, torch.Tensor]] = []
        fault: WeightTransferError | None = None
        for number, (spec, buffer) in enumerate(arrivals):
            place = (
                f"version {manifest.policy_version}, bucket {number + 1} of "
                f"{len(manifest.buckets)} by {manifest.backend}"
            )
            try:
                job.digests.append(check_bucket(spec, buffer, place=place))
            except WeightTransferError as error:
                fault = (
                    fault or error
                )  # go on receiving: a group whose member stops reading fails for every other member
            arrived += bucket_tensors(spec, buffer if manifest.adapters else buffer.to(self._device))
        if fault is not None:
            raise fault
        if manifest.adapters is not None:
            arrived = self._base.merged(manifest.adapters, dict(arrived), self._device)
        if self._job is job:  # else a newer job took over meanwhile
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

    def _from_group(
        self, job: Job, manifest: WeightManifest, group_name: str
    ) -> Iterator[tuple[BucketSpec, torch.Tensor]]:
        group = self._group
        if manifest.buckets and (group is None or group.address.group_name != group_name):
            raise WeightTransferError(f"this sampler is not in weight group {group_name}; it must join first")
        for spec in manifest.buckets:
            assert group is not None
            buffer = empty_bucket(spec, group.device)
            try:
                group.broadcast(buffer, job.seconds_left)
            except WeightTransferError:
                self._group = None
                group.close()
                raise
            yield spec, buffer

    def _from_disk(self, _job: Job, manifest: WeightManifest, _group: str) -> Iterator[tuple[BucketSpec, torch.Tensor]]:
        for number, spec in enumerate(manifest.buckets):
            file = Path(manifest.location) / bucket_file(number)
            buffer = empty_bucket(spec, torch.device("cpu"))
            try:
                with safe_open(file, framework="pt") as opened:
                    fill_bucket(spec, {tensor.name: opened.get_tensor(tensor.name) for tensor in spec.tensors}, buffer)
            except (OSError, SafetensorError) as error:
                raise WeightTransferError(f"cannot read weights {file}: {error}") from error
            yield spec, buffer

    def _from_ipc(self, _job: Job, manifest: WeightManifest, _group: str) -> Iterator[tuple[BucketSpec, torch.Tensor]]:
        for spec, handle in zip(manifest.buckets, json.loads(manifest.location), strict=True):
            yield spec, import_cuda_bucket(handle, self._device)
