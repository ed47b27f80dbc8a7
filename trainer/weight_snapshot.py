"""What is sent of one version: its buckets in host memory, and perhaps their differences to an older version."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tandem.protos.bucket_delta import encode_delta
from tandem.protos.bucket_digest import DIGEST_BYTES
from tandem.protos.types import BucketSpec
from tandem.protos.weight_group import empty_bucket
from tandem.trainer.kept_copy import WeightCopy


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """The buckets of one version in host memory, with digests, and perhaps what changed since an older version. Without
    buckets on ranks other than 0.
    """

    buckets: Sequence[tuple[BucketSpec, torch.Tensor]] = ()
    base: tuple[int, int] | None = None
    """Incarnation and version of the weights that the differences apply to."""
    differences: Sequence[torch.Tensor | None] = ()
    """Of each bucket, with its digest; None if the bucket is better sent whole. Empty without a base."""
    encode_seconds: float = 0.0


def one_bucket(buckets: Sequence[BucketSpec]) -> tuple[torch.Tensor, ...]:
    """Memory of the largest bucket, in which each one overwrites the one before it."""
    memory = empty_bucket(max(buckets, key=lambda spec: spec.num_bytes), torch.device("cpu"))
    return tuple(memory[: spec.num_bytes + DIGEST_BYTES] for spec in buckets)


def with_differences(
    filled: Iterable[tuple[BucketSpec, torch.Tensor]], base: WeightCopy, memory: Sequence[torch.Tensor]
) -> WeightSnapshot:
    """The snapshot of buckets with their differences to the base. With `memory`, each bucket is copied into the memory
    of the base's bucket, which is read before.
    """
    buckets: list[tuple[BucketSpec, torch.Tensor]] = []
    differences: list[torch.Tensor | None] = []
    seconds = 0.0
    for number, (spec, buffer) in enumerate(filled):
        started = time.perf_counter()
        held = base.buffers[number][: spec.num_bytes]
        delta = encode_delta(spec, held.numpy(), buffer[: spec.num_bytes].numpy())
        differences.append(None if delta is None else torch.cat([torch.from_numpy(delta), buffer[spec.num_bytes :]]))
        seconds += time.perf_counter() - started
        buckets.append((spec, memory[number].copy_(buffer) if memory else buffer))
    return WeightSnapshot(buckets, base.version, differences, seconds)
