"""Balancing work over ranks: golden costs and counts, and properties of partitioning, grouping and dealing."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.trainer.batch.balance import assign_to_ranks, partition, workload
from tests.support.golden_cases import GoldenCase, golden_cases

costs_lists = st.lists(st.integers(1, 100), max_size=40)


def sums(parts: list[list[int]], costs: list[int]) -> list[int]:
    return [sum(costs[item] for item in part) for part in parts]


def costs_of(case: GoldenCase) -> list[int]:
    lengths = case.inputs["seqlens"].tolist()
    return lengths if case.hyper["cost"] == "length" else [workload(length) for length in lengths]


@pytest.mark.parametrize("case", golden_cases("seqlen_balance/partition"), ids=lambda case: case.name)
def test_golden_partition(case: GoldenCase) -> None:
    costs = costs_of(case)
    parts = partition(costs, case.hyper["k"], equal_size=case.hyper["equal_size"])
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    assert all(parts) and len(parts) == case.hyper["k"]
    if case.hyper["equal_size"]:
        assert len({len(part) for part in parts}) == 1
    assert max(sums(parts, costs)) <= case.outputs["max_cost"].item()


@pytest.mark.parametrize("case", golden_cases("seqlen_balance/group_partition"), ids=lambda case: case.name)
def test_golden_group_partition(case: GoldenCase) -> None:
    costs, groups = costs_of(case), case.inputs["uid"].tolist()
    of_group = [[item for item, group in enumerate(groups) if group == label] for label in dict.fromkeys(groups)]
    of_parts = partition([sum(costs[item] for item in one) for one in of_group], case.hyper["k"], equal_size=True)
    parts = [[item for number in numbers for item in of_group[number]] for numbers in of_parts]
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    assert len({len(numbers) for numbers in of_parts}) == 1
    assert max(sums(parts, costs)) <= case.outputs["max_cost"].item()


@pytest.mark.parametrize("case", golden_cases("seqlen_balance/workload"), ids=lambda case: case.name)
def test_golden_workload(case: GoldenCase) -> None:
    case.check("workload", torch.tensor([workload(length) for length in case.inputs["seqlens"].tolist()]))


@given(costs=costs_lists, num_parts=st.integers(1, 8), equal_size=st.booleans())
def test_every_item_is_in_one_part_and_parts_are_empty_only_if_items_run_out(
    costs: list[int], num_parts: int, equal_size: bool
) -> None:
    parts = partition(costs, num_parts, equal_size=equal_size)
    assert len(parts) == num_parts
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    assert sum(map(bool, parts)) == min(num_parts, len(costs))
    assert parts == partition(costs, num_parts, equal_size=equal_size)
    assert max(sums(parts, costs)) - min(sums(parts, costs)) <= max(costs, default=0)
    if equal_size:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def plain_differencing(costs: list[int], num_parts: int) -> int:
    """The largest sum of the Karmarkar–Karp method, written from its definition. Among equal spreads, the tuple with
    the heaviest part comes first.
    """
    tuples = [[(cost, 1, [item])] + [(0, 0, [])] * (num_parts - 1) for item, cost in enumerate(costs)]
    while len(tuples) > 1:
        tuples.sort(key=lambda parts: (parts[0][0] - parts[-1][0], parts[0]), reverse=True)
        one, other, *rest = tuples
        merged = [tuple(map(operator.add, *pair)) for pair in zip(one, reversed(other), strict=True)]
        tuples = [sorted(merged, reverse=True), *rest]
    return max(total for total, _, _ in tuples[0])


@pytest.mark.parametrize("seed", range(40))
def test_37_lengths_in_5_parts_are_never_worse_than_plain_differencing(seed: int) -> None:
    costs = np.random.default_rng(seed).integers(1, 60 if seed % 2 else 4000, 37).tolist()
    assert max(sums(partition(costs, 5), costs)) <= plain_differencing(costs, 5)


def test_differencing_beats_zigzag_dealing() -> None:
    assert max(sums(partition([8, 7, 6, 5, 4], 2), [8, 7, 6, 5, 4])) == 16
    assert sums(partition([1, 3, 5, 7, 11, 13, 17, 19], 2, equal_size=True), [1, 3, 5, 7, 11, 13, 17, 19]) == [38, 38]


def test_more_parts_than_items_leaves_some_empty() -> None:
    assert partition([3, 2], 4) == [[0], [1], [], []]
    assert partition([], 2) == [[], []]


@given(costs=costs_lists, num_ranks=st.integers(1, 5))
def test_dealing_is_fair(costs: list[int], num_ranks: int) -> None:
    parts = assign_to_ranks(costs, num_ranks)
    assert sorted(number for part in parts for number in part) == list(range(len(costs)))
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert max(sums(parts, costs)) - min(sums(parts, costs)) <= max(costs, default=0)
    assert all(
        [costs[number] for number in part] == sorted((costs[number] for number in part), reverse=True) for part in parts
    )
