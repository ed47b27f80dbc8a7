"""Packing rows into micro-batches within a token budget, padded or end to end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.errors import DataError
from tandem.trainer.batch.balance import workload
from tandem.trainer.batch.packing import (
    MAX_PADDING,
    MAX_PADDING_OF_BUDGET,
    SMALL_BATCH,
    SharedRow,
    pack,
    pack_flat,
    pack_shared,
    shared_budget,
    shared_tokens,
    shared_work,
)
from tests.support.golden_cases import GoldenCase, golden_cases

Packer = Callable[..., list[list[int]]]
Size = Callable[[list[list[int]], list[int]], int]

lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def lognormal_lengths(
    random: np.random.Generator, *, num_rows: int, median: float, sigma: float, most: int
) -> list[int]:
    lengths = random.lognormal(np.log(median), sigma, num_rows).astype(int)
    return [int(length) for length in np.clip(lengths, 1, most)]


def padded_size(bins: list[list[int]], lengths: list[int]) -> int:
    return sum(len(rows) * max(lengths[row] for row in rows) for rows in bins)


def flat_size(bins: list[list[int]], lengths: list[int]) -> int:
    return sum(lengths[row] for rows in bins for row in rows)


both_packers = pytest.mark.parametrize(("packer", "size"), [(pack, padded_size), (pack_flat, flat_size)])


@both_packers
@given(lengths=lengths_lists, slack=st.integers(0, 200), multiple=st.integers(1, 4))
def test_every_row_is_packed_once_and_no_bin_exceeds_the_budget(
    packer: Packer, size: Size, lengths: list[int], slack: int, multiple: int
) -> None:
    budget = max(lengths) + slack
    bins = packer(lengths, budget, multiple_of=multiple)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(size([rows], lengths) <= budget for rows in bins)
    assert bins == packer(lengths, budget, multiple_of=multiple)
    assert len(bins) % multiple == 0 or len(bins) == len(lengths)


@given(lengths=lengths_lists, slack=st.integers(0, 200), multiple=st.integers(1, 4))
def test_a_multiple_of_ranks_adds_bins_only_by_rounding_up(lengths: list[int], slack: int, multiple: int) -> None:
    fewest, num_bins = (len(pack(lengths, max(lengths) + slack, multiple_of=one)) for one in (1, multiple))
    assert num_bins <= -(-fewest // multiple) * multiple


@given(lengths=lengths_lists, slack=st.integers(0, 400), multiple=st.integers(1, 4))
def test_padding_is_small_or_cheaper_than_another_micro_batch(lengths: list[int], slack: int, multiple: int) -> None:
    budget = max(lengths) + slack
    padding = padded_size(pack(lengths, budget, multiple_of=multiple), lengths) - sum(lengths)
    allowed = MAX_PADDING_OF_BUDGET * budget if sum(lengths) < SMALL_BATCH * budget else 0.0
    assert padding <= max(MAX_PADDING * sum(lengths), allowed)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_rows=st.integers(64, 512),
    median=st.integers(200, 2000),
    sigma=st.floats(0.2, 1.2),
    multiple=st.sampled_from([1, 2, 8]),
)
def test_a_batch_of_lognormal_lengths_is_at_most_5_percent_padding(
    seed: int, num_rows: int, median: int, sigma: float, multiple: int
) -> None:
    lengths = lognormal_lengths(np.random.default_rng(seed), num_rows=num_rows, median=median, sigma=sigma, most=8192)
    bins = pack(lengths, 8192, multiple_of=multiple)
    assert sum(lengths) / padded_size(bins, lengths) >= 0.95


def test_rows_are_sorted_by_length_to_reduce_padding() -> None:
    assert pack([10, 2, 10, 2, 10, 2], 30) == [[0, 2, 4], [1, 3, 5]]


def test_bins_have_equal_numbers_of_rows() -> None:
    assert [len(rows) for rows in pack([10] * 12, 110)] == [6, 6]  # 11 rows would fit into one bin and leave 1 alone
    assert [len(rows) for rows in pack([10] * 12, 110, multiple_of=3)] == [4, 4, 4]


def test_a_wide_bin_is_split_if_that_saves_more_than_5_percent() -> None:
    lengths = [100] * 10 + [10] * 50
    assert len(pack(lengths, 6000)) == 2  # one bin would hold them, but three quarters of it would be padding
    assert pack([9, 1], 1000) == [[0, 1]]  # eight tokens of padding are cheaper than a forward pass


def test_flat_bins_are_full() -> None:
    assert pack_flat([6, 4, 5, 5, 7, 3], 10) == [[0, 1], [2, 3], [4, 5]]


def test_flat_bins_are_added_until_rows_fit() -> None:
    lengths = [6, 6, 6, 6, 6]  # 30 tokens would fill three bins of 11
    assert [len(rows) for rows in pack_flat(lengths, 11)] == [1, 1, 1, 1, 1]


shared_rows = st.lists(
    st.builds(
        lambda size, number, rest: SharedRow(size + rest, (size, number)), *[st.integers(0, 9)] * 2, st.integers(1, 60)
    ),
    min_size=1,
    max_size=40,
)


@given(rows=shared_rows, slack=st.integers(0, 200), multiple=st.integers(1, 4))
def test_shared_bins_hold_every_row_once_within_the_budget(rows: list[SharedRow], slack: int, multiple: int) -> None:
    budget = max(row.length for row in rows) + slack
    bins = pack_shared(rows, budget, multiple_of=multiple)
    assert sorted(row for one in bins for row in one) == list(range(len(rows)))
    assert all(shared_budget([rows[row] for row in one]) <= budget for one in bins)
    assert bins == pack_shared(rows, budget, multiple_of=multiple)


@given(rows=shared_rows)
def test_shared_rows_never_take_more_of_the_budget_than_separate_ones(rows: list[SharedRow]) -> None:
    assert shared_tokens(rows) <= shared_budget(rows) <= sum(row.length for row in rows)


GROUP = [SharedRow(20, (16, 1))] * 4


def test_a_prompt_counts_once_and_an_eighth_for_each_answer_that_sees_it() -> None:
    assert shared_tokens(GROUP) == 16 + 4 * 4
    assert shared_budget(GROUP) == 16 + 4 * 4 + 4 * 16 // 8
    assert shared_work(GROUP) == 4 * workload(20) - 3 * workload(16)
    assert shared_tokens([SharedRow(4, (0, 0))] * 2) == 8


def test_rows_of_a_prompt_stay_in_one_bin_where_they_fit() -> None:
    groups = [row._replace(prompt=(16, number)) for number in range(4) for row in GROUP]
    bins = pack_shared(groups, 90)
    assert [sorted({row // 4 for row in one}) for one in bins] == [[0, 3], [1, 2]]
    assert [len(one) for one in bins] == [8, 8]
    assert pack_shared(groups, 50) == [[*range(first, first + 4)] for first in (0, 4, 8, 12)]


def test_rows_of_a_prompt_are_divided_evenly_if_they_do_not_fit_or_a_rank_would_idle() -> None:
    assert pack_shared(GROUP, 39) == [[0, 1], [2, 3]]
    assert pack_shared(GROUP, 1000) == [[0, 1, 2, 3]]
    assert pack_shared(GROUP, 1000, multiple_of=2) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("case", golden_cases("seqlen_balance/micro_batches"), ids=lambda case: case.name)
def test_golden_micro_batches(case: GoldenCase) -> None:
    lengths = case.inputs["seqlens"].tolist()
    budget = case.hyper["max_token_len"]
    bins = pack_flat(lengths, budget)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert max(sum(lengths[row] for row in rows) for rows in bins) <= budget
    assert len(bins) <= case.outputs["num_micro_batches"].item()
    largest = max(sum(workload(lengths[row]) for row in rows) for rows in bins)
    assert largest <= case.outputs["max_cost"].item() * (1 + case.tolerance["rel_slack"])


@pytest.mark.parametrize("packer", [pack, pack_flat])
def test_a_row_beyond_the_budget_is_refused_and_no_rows_need_no_bins(packer: Packer) -> None:
    with pytest.raises(DataError, match="tokens_per_micro_batch"):
        packer([5, 11], 10)
    assert packer([], 10) == []
