"""What is sent of one version: its buckets in host memory, and perhaps their differences to an older version."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tandem.protos.bucket_delta import encode_delta
from tandem.protos.bucket_digest import DIGEST_BYTES
from tandem.protos.types import BucketSpec
from tandem.protos.weight_group import empty_bucket
from tandem.trainer.kept_copy import WeightCopy

_ENCODERS = 2
_MOST_BUCKETS = _ENCODERS + 1
"""One is filled while the others are encoded."""


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


def few_buckets(buckets: Sequence[BucketSpec]) -> tuple[torch.Tensor, ...]:
    """Memory for `_MOST_BUCKETS` buckets of the largest size, in which later buckets overwrite earlier ones."""
    largest = max(buckets, key=lambda spec: spec.num_bytes)
    memory = [empty_bucket(largest, torch.device("cpu")) for _ in range(min(_MOST_BUCKETS, len(buckets)))]
    return tuple(memory[number % len(memory)][: spec.num_bytes + DIGEST_BYTES] for number, spec in enumerate(buckets))


def begin_differences(
    filled: Iterable[tuple[BucketSpec, torch.Tensor]], base: WeightCopy, memory: Sequence[torch.Tensor]
) -> Callable[[], WeightSnapshot]:
    """Encodes the differences of buckets to the base in threads, while the next buckets are filled. Returns once all
    are filled; what it returns waits for the threads. With `memory`, the buckets are filled in that of `few_buckets`,
    and each is copied into the memory of the base's bucket, which is read before.
    """

    def encode(number: int, spec: BucketSpec, buffer: torch.Tensor) -> _Encoded:
        started = time.perf_counter()
        held = base.buffers[number][: spec.num_bytes]
        delta = encode_delta(spec, held.numpy(), buffer[: spec.num_bytes].numpy())
        difference = None if delta is None else torch.cat([torch.from_numpy(delta), buffer[spec.num_bytes :]])
        seconds = time.perf_counter() - started
        return _Encoded((spec, memory[number].copy_(buffer) if memory else buffer), difference, seconds)

    encoders = ThreadPoolExecutor(_ENCODERS, thread_name_prefix="encode")
    begun: list[Future[_Encoded]] = []
    try:
        for number, bucket in enumerate(filled):
            begun.append(encoders.submit(encode, number, *bucket))
            if memory and len(begun) >= _MOST_BUCKETS:  # the next bucket overwrites this one
                begun[-_MOST_BUCKETS].result()
    finally:
        encoders.shutdown(wait=False)

    def finish() -> WeightSnapshot:
        encoded = [one.result() for one in begun]
        return WeightSnapshot(
            [one.bucket for one in encoded],
            base.version,
            [one.difference for one in encoded],
            sum(one.seconds for one in encoded),
        )

    return finish


class _Encoded(NamedTuple):
    bucket: tuple[BucketSpec, torch.Tensor]
    difference: torch.Tensor | None
    seconds: float
