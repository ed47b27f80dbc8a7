"""Differences between buckets: lossless for every dtype, and never applied wrongly without notice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.bucket_delta import apply_delta, encode_delta
from tandem.protos.bucket_digest import Xxh3Digest
from tandem.protos.errors import WeightTransferError
from tandem.protos.manifest import ITEM_BYTES, plan_buckets
from tandem.protos.types import BucketSpec

DTYPES = st.lists(st.sampled_from(sorted(ITEM_BYTES)), min_size=1, max_size=3)


def bucket(dtypes: list[str], size: int) -> BucketSpec:
    (spec,) = plan_buckets([(f"p{number}", dtype, (size,)) for number, dtype in enumerate(dtypes)], 1 << 20)
    return spec


def random_bytes(size: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@settings(max_examples=200, deadline=None)
@given(DTYPES, st.integers(0, 3000), st.floats(0, 1), st.integers(0, 255), st.integers(0, 99))
def test_any_two_bit_patterns_round_trip(dtypes: list[str], size: int, share: float, mask: int, seed: int) -> None:
    spec = bucket(dtypes, size)
    base = random_bytes(spec.num_bytes, seed)
    if seed % 3 == 0:
        base[:] = 0xFF  # NaN in every floating-point format
    chosen = np.random.default_rng(seed + 1).random(spec.num_bytes) < share
    new = np.where(chosen, base ^ mask, base).astype(np.uint8)
    delta = encode_delta(spec, base, new)
    if delta is None:
        return
    assert len(delta) < max(spec.num_bytes, 1)
    held = base.copy()
    apply_delta(spec, delta, held)
    assert np.array_equal(held, new)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("num_changed", [0, 1, 40, 4000])
def test_a_small_change_of_any_dtype_is_sent_as_a_small_difference(dtype: str, num_changed: int) -> None:
    spec = bucket([dtype], 4000)
    base = random_bytes(spec.num_bytes, 1)
    new = base.copy()
    new.view(f"u{ITEM_BYTES[dtype]}")[:: 4000 // num_changed if num_changed else 5000] ^= 1
    delta = encode_delta(spec, base, new)
    assert delta is not None and len(delta) < 0.1 * spec.num_bytes + 60
    held = base.copy()
    apply_delta(spec, delta, held)
    assert np.array_equal(held, new)


def test_a_bucket_that_changed_at_random_is_not_sent_as_a_difference() -> None:
    spec = bucket(["float32"], 5000)
    assert encode_delta(spec, random_bytes(20000, 1), random_bytes(20000, 2)) is None


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_difference_raises_or_the_digest_of_the_bucket_tells(data: st.DataObject) -> None:
    spec = bucket(["bfloat16"], 4000)
    base = random_bytes(8000, 3)
    new = base.copy()
    new.view(np.uint16)[random_bytes(4000, 4) < 20] ^= 3
    delta = encode_delta(spec, base, new)
    assert delta is not None
    damaged = delta.copy()
    damaged[data.draw(st.integers(0, len(delta) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged = damaged[: data.draw(st.sampled_from([len(delta), len(delta) - 1, len(delta) // 2, 9]))]
    held = base.copy()
    try:
        apply_delta(spec, damaged, held)
    except WeightTransferError:
        return
    # Some bits of a compressed frame carry nothing.
    found, expected = (Xxh3Digest(each).finish() for each in (held, new))
    same_digest = found == expected
    assert same_digest == np.array_equal(held, new)
