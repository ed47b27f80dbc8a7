"""The digest of a bucket: which changes it finds, and its value."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.manifest import DIGEST_FORMAT
from tandem.protos.weight_group import DIGEST_BYTES, BucketDigest


def bucket_digest(data: torch.Tensor) -> bytes:
    return BucketDigest(data).finish()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200_000), st.data())
def test_a_digest_changes_with_any_bit(words: int, data: st.DataObject) -> None:
    bytes_ = torch.randint(
        0, 256, (8 * (words + 1),), dtype=torch.uint8, generator=torch.Generator().manual_seed(words)
    )
    before = bucket_digest(bytes_)
    assert len(before) == DIGEST_BYTES and bucket_digest(bytes_.clone()) == before
    place = data.draw(st.integers(0, len(bytes_) - 1))
    changed = bytes_.clone()
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    assert bucket_digest(changed) != before
    assert bucket_digest(torch.cat([bytes_, torch.zeros(8, dtype=torch.uint8)])) != before, "length counts"


@given(*[st.integers(0, 2)] * 2, *[st.integers(0, 1023)] * 2, st.integers(1, 2**63))
def test_a_digest_changes_with_any_three_words(row: int, other_row: int, column: int, other: int, by: int) -> None:
    """Changes that cancel one another in a row and in a column."""
    words = np.arange(3 * 1024 + 1, dtype=np.uint64)
    changed = words.copy()
    changed[[1024 * row + other, 1024 * other_row + column]] -= np.uint64(by)
    changed[1024 * row + column] = words[1024 * row + column] + np.uint64(by)
    before, after = (bucket_digest(torch.from_numpy(each.view(np.uint8))) for each in (words, changed))
    assert before != after


def test_a_digest_has_the_value_of_its_format() -> None:
    numbers = torch.arange(37 * 4096 + 7)
    words = (numbers * -7046029254386353131) ^ (numbers << 40)
    expected = "012c465b3a3885c349a781a350b0829bbd7f8693fb3f285e658fb9910f34c2ba"
    assert bucket_digest(words.view(torch.uint8)).hex() == expected, "a replay compares digests that runs have written"
    assert DIGEST_FORMAT == "2:", "another definition is another format"


def test_a_digest_changes_with_flipped_signs_and_swapped_rows() -> None:
    weights = torch.randn(8, 4096 * 2)
    flipped = weights.clone()
    flipped[1:3, 1] *= -1  # flips the top bits of two words of one column, which a plain weighted sum would miss
    swapped = weights[[0, 2, 1, 3, 4, 5, 6, 7]]
    beside = weights.clone()
    beside[1, 1:4:2] *= -1  # and of two words of one row
    versions = (weights, flipped, beside, swapped)
    assert len({bucket_digest(each.contiguous().view(-1).view(torch.uint8)) for each in versions}) == 4


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20_000), st.lists(st.integers(0, 200_000), max_size=6))
def test_a_digest_does_not_depend_on_how_the_bytes_arrive(words: int, ends: list[int]) -> None:
    bytes_ = torch.arange(8 * words).to(torch.uint8)
    digest = BucketDigest(bytes_)
    for end in ends:
        digest.advance(end)
    assert digest.finish() == bucket_digest(bytes_)
