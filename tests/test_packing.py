"""Micro-batches within a token budget, and how they are dealt to ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import DataError
from trainer.packing import deal, pack

lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@given(lengths=lengths_lists, slack=st.integers(0, 200), multiple=st.integers(1, 4))
def test_every_row_is_packed_once_and_no_bin_exceeds_the_budget(lengths: list[int], slack: int, multiple: int) -> None:
    budget = max(lengths) + slack
    bins = pack(lengths, budget, multiple_of=multiple)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(len(rows) * max(lengths[row] for row in rows) <= budget for rows in bins)
    assert bins == pack(lengths, budget, multiple_of=multiple)


@given(lengths=lengths_lists, slack=st.integers(0, 200), multiple=st.integers(1, 4))
def test_ranks_cost_at_most_the_rounding_up(lengths: list[int], slack: int, multiple: int) -> None:
    budget = max(lengths) + slack
    fewest = len(pack(lengths, budget))
    assert len(pack(lengths, budget, multiple_of=multiple)) <= -(-fewest // multiple) * multiple


def test_rows_are_sorted_so_that_little_is_padding() -> None:
    assert pack([10, 2, 10, 2, 10, 2], 30) == [[0, 2, 4], [1, 3, 5]]


def test_bins_are_evened_out() -> None:
    sizes = [len(rows) for rows in pack([10] * 12, 110)]  # eleven would fit, then one would be alone
    assert sizes == [6, 6]


def test_a_row_beyond_the_budget_is_refused() -> None:
    with pytest.raises(DataError, match="tokens_per_micro_batch"):
        pack([5, 11], 10)


def test_nothing_packs_into_nothing() -> None:
    assert pack([], 10) == []


@given(costs=st.lists(st.integers(1, 100), max_size=40), num_ranks=st.integers(1, 5))
def test_dealing_is_fair(costs: list[int], num_ranks: int) -> None:
    hands = deal(costs, num_ranks)
    assert sorted(number for hand in hands for number in hand) == list(range(len(costs)))
    counts = [len(hand) for hand in hands]
    assert max(counts) - min(counts) <= 1
    sums = [sum(costs[number] for number in hand) for hand in hands]
    assert max(sums) - min(sums) <= max(costs, default=0)
