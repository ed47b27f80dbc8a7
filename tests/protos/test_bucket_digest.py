"""The digest of a bucket: which changes it finds, and its value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.bucket_digest import DIGEST_BYTES
from tandem.protos.manifest import DIGEST_FORMATS, algorithm_of_digest
from tandem.protos.types import DigestAlgorithm
from tandem.protos.weight_group import begin_digest

ALGORITHMS: tuple[DigestAlgorithm, ...] = ("xxh3", "sums")


def digest_of(data: torch.Tensor, algorithm: DigestAlgorithm) -> bytes:
    return begin_digest(data, algorithm).finish()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=40, deadline=None)
@given(words=st.integers(0, 200_000), data=st.data())
def test_a_digest_changes_with_any_bit(algorithm: DigestAlgorithm, words: int, data: st.DataObject) -> None:
    bytes_ = torch.randint(
        0, 256, (8 * (words + 1),), dtype=torch.uint8, generator=torch.Generator().manual_seed(words)
    )
    before = digest_of(bytes_, algorithm)
    assert len(before) == DIGEST_BYTES and digest_of(bytes_.clone(), algorithm) == before
    place = data.draw(st.integers(0, len(bytes_) - 1))
    changed = bytes_.clone()
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    assert digest_of(changed, algorithm) != before
    assert digest_of(torch.cat([bytes_, torch.zeros(8, dtype=torch.uint8)]), algorithm) != before, "length counts"


@given(*[st.integers(0, 2)] * 2, *[st.integers(0, 1023)] * 2, st.integers(1, 2**63))
def test_sums_change_with_any_three_words(row: int, other_row: int, column: int, other: int, by: int) -> None:
    """Changes that cancel one another in a row and in a column."""
    words = np.arange(3 * 1024 + 1, dtype=np.uint64)
    changed = words.copy()
    changed[[1024 * row + other, 1024 * other_row + column]] -= np.uint64(by)
    changed[1024 * row + column] = words[1024 * row + column] + np.uint64(by)
    before, after = (digest_of(torch.from_numpy(each.view(np.uint8)), "sums") for each in (words, changed))
    assert before != after


@pytest.mark.parametrize(
    ("algorithm", "begin", "expected"),
    [
        ("xxh3", "3:", "d9affaab178209facac600ea5a03f91a00000000000000000000000000000000"),
        ("sums", "2:", "012c465b3a3885c349a781a350b0829bbd7f8693fb3f285e658fb9910f34c2ba"),
    ],
)
def test_a_digest_has_the_value_of_its_format(algorithm: DigestAlgorithm, begin: str, expected: str) -> None:
    numbers = torch.arange(37 * 4096 + 7)
    words = ((numbers * -7046029254386353131) ^ (numbers << 40)).view(torch.uint8)
    assert digest_of(words, algorithm).hex() == expected, "a replay compares digests that runs have written"
    assert DIGEST_FORMATS[algorithm] == begin, "another definition is another format"
    assert algorithm_of_digest(begin + expected) == algorithm


def test_the_digest_of_another_release_has_no_algorithm() -> None:
    assert [algorithm_of_digest(digest) for digest in ("1:00", "00ff", "")] == [None] * 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_digest_changes_with_flipped_signs_and_swapped_rows(algorithm: DigestAlgorithm) -> None:
    weights = torch.randn(8, 4096 * 2)
    flipped = weights.clone()
    flipped[1:3, 1] *= -1  # flips the top bits of two words of one column, which a plain weighted sum would miss
    swapped = weights[[0, 2, 1, 3, 4, 5, 6, 7]]
    beside = weights.clone()
    beside[1, 1:4:2] *= -1  # and of two words of one row
    versions = (weights, flipped, beside, swapped)
    assert len({digest_of(each.contiguous().view(-1).view(torch.uint8), algorithm) for each in versions}) == 4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=40, deadline=None)
@given(words=st.integers(1, 20_000), ends=st.lists(st.integers(0, 200_000), max_size=6))
def test_a_digest_does_not_depend_on_how_the_bytes_arrive(
    algorithm: DigestAlgorithm, words: int, ends: list[int]
) -> None:
    bytes_ = torch.arange(8 * words).to(torch.uint8)
    digest = begin_digest(bytes_, algorithm)
    for end in ends:
        digest.advance(end)
    assert digest.finish() == digest_of(bytes_, algorithm)
