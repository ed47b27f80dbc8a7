"""The plan of a batch, and the layout of its loss tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.errors import DataError
from tandem.protos.row_headers import group_headers
from tandem.protos.types import Packing, TrainBatch
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.micro_batch import rank_micro_batches
from tandem.trainer.batch.planning import (
    SHARED_TOKENS,
    computed_tokens,
    padding_fraction,
    plan_batch,
    shared_fraction,
)
from tests.support.training_groups import make_batch, make_group


def plan_of(num_groups: int, **options: Any) -> TrainBatch:
    return make_batch([make_group(index) for index in range(num_groups)], **options)[0]


@pytest.mark.parametrize("packing", ["padded", "flat", "shared"])
@settings(max_examples=40, deadline=None)
@given(num_groups=st.integers(1, 8), world_size=st.integers(1, 4), steps=st.integers(1, 4), budget=st.integers(20, 200))
def test_every_trainable_row_is_planned_once_within_the_budget(
    packing: str, num_groups: int, world_size: int, steps: int, budget: int
) -> None:
    options: dict[str, Any] = {"world_size": world_size, "optimizer_steps": steps, "tokens_per_micro_batch": budget}
    batch = plan_of(num_groups, **options, packing=packing)
    assert batch.packing == packing and batch == plan_of(num_groups, **options, packing=packing)
    lengths = {(h.group_id, h.trajectory_id, h.segment): h.num_tokens for h in batch.headers}
    planned = Counter((row.group_id, row.trajectory_id, row.segment) for row in batch.plan)
    assert planned == Counter(list(lengths))
    assert len(batch.num_micro_batches) == min(steps, num_groups)
    cells: dict[tuple[int, int, int], list[int]] = {}
    for row in batch.plan:
        assert row.rank < world_size
        assert row.micro_batch < batch.num_micro_batches[row.optimizer_step]
        key = row.optimizer_step, row.rank, row.micro_batch
        cells.setdefault(key, []).append(lengths[row.group_id, row.trajectory_id, row.segment])
    if packing == "shared":
        assert padding_fraction(batch) == 0 <= shared_fraction(batch) < 1
    elif packing == "flat":
        assert all(sum(cell) <= budget for cell in cells.values())
        assert padding_fraction(batch) == 0
    else:
        assert all(len(cell) * max(cell) <= budget for cell in cells.values())
        assert 0 <= padding_fraction(batch) < 1


def test_the_tokens_planned_with_shared_prompts_are_those_computed_and_the_last_of_each_row() -> None:
    batch, by_id = make_batch([make_group(index) for index in range(3)], packing="shared", tokens_per_micro_batch=64)
    ((*micro_batches,),) = rank_micro_batches(batch, by_id, rank=0, device=torch.device("cpu"))
    sizes = [micro_batch.ids_BT.numel() for micro_batch in micro_batches]
    planned = sum(sizes) + len(batch.plan)
    assert len(sizes) > 1 and max(sizes) <= 64 and planned == computed_tokens(batch)
    num_tokens = sum(header.num_tokens for header in batch.headers)
    assert shared_fraction(batch) == 1 - planned / num_tokens > 0


@pytest.mark.parametrize("first", ["padded", "flat"])
def test_prompts_are_shared_if_that_leaves_much_less_to_compute(first: Packing) -> None:
    def packing_for(max_sampled: int) -> Packing:
        groups = [make_group(index, max_sampled=max_sampled) for index in range(4)]
        headers = [header for group in groups for header in group_headers(group)]
        given: dict[str, int] = {"policy_version": 1, "incarnation": 1, "world_size": 1}
        given |= {"tokens_per_micro_batch": 4096, "optimizer_steps": 1}
        ids = [group.group_id for group in groups]
        return plan_batch(headers, ids, **given, packings=(first, "shared")).packing

    assert packing_for(6) == "shared"
    assert packing_for(400) == first


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 60)), min_size=1, max_size=6),
    st.sampled_from(["padded", "flat"]),
)
@settings(max_examples=60, deadline=None)
def test_shared_prompts_are_planned_exactly_where_they_leave_few_enough_tokens(
    sizes: list[tuple[int, int]], first: Packing
) -> None:
    groups = [
        make_group(index, num_samples=num_samples, max_sampled=max_sampled)
        for index, (num_samples, max_sampled) in enumerate(sizes)
    ]
    headers = [header for group in groups for header in group_headers(group)]
    ids = [group.group_id for group in groups]

    def planned(*packings: Packing) -> TrainBatch:
        return plan_batch(
            headers,
            ids,
            policy_version=1,
            incarnation=1,
            world_size=1,
            tokens_per_micro_batch=4096,
            optimizer_steps=1,
            packings=packings,
        )

    shared, other = planned("shared"), planned(first)
    shares = computed_tokens(shared) <= SHARED_TOKENS * computed_tokens(other)
    assert planned(first, "shared") == (shared if shares else other)


def test_optimizer_steps_take_whole_groups_in_order() -> None:
    batch = plan_of(5, optimizer_steps=2)
    step_of = {row.group_id: row.optimizer_step for row in batch.plan}
    assert [step_of[group_id] for group_id in batch.group_ids] == [0, 0, 1, 1, 1]
    assert all(step_of[row.group_id] == row.optimizer_step for row in batch.plan)


def test_baselines_unscored_and_empty_rows_are_not_trained() -> None:
    batch, _ = make_batch([make_group(0, rewards=[1.0, None, 0.0, 0.5], baseline=True)])
    assert sorted(row.trajectory_id for row in batch.plan) == [0, 2, 3]
    assert len(batch.headers) == 5


def test_a_batch_without_a_trainable_row_still_has_a_micro_batch() -> None:
    batch, _ = make_batch([make_group(0, rewards=[None, None], num_samples=2)], world_size=2)
    assert batch.plan == ()
    assert batch.num_micro_batches == (1,)


def test_all_segments_of_a_trajectory_are_planned() -> None:
    batch, _ = make_batch([make_group(0, num_samples=2, num_segments=3)])
    assert sorted((row.trajectory_id, row.segment) for row in batch.plan) == [
        (t, s) for t in range(2) for s in range(3)
    ]


def test_a_row_beyond_the_budget_is_refused() -> None:
    with pytest.raises(DataError, match="tokens_per_micro_batch"):
        plan_of(1, tokens_per_micro_batch=3)


# ---- the layout of the loss tokens ----


CPU = torch.device("cpu")


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_token_has_one_place_for_any_split_into_micro_batches(world_size: int) -> None:
    groups = [make_group(i, num_segments=1 + i % 2, baseline=True, rewards=[1.0, None, 0.0, 0.5]) for i in range(5)]
    batch, by_id = make_batch(groups, world_size=world_size, tokens_per_micro_batch=40, optimizer_steps=2)
    ids_N: list[np.ndarray] = []
    for group in groups:
        for row in group.scored_rows:
            if row.trajectory.role == "policy" and row.reward is not None:
                ids_N += [one.ids[one.loss_mask.astype(bool)] for one in row.trajectory.segments]
    wanted = np.concatenate(ids_N)
    found = np.full(len(wanted), -1)
    for rank in range(world_size):
        layout = BatchLayout.of(batch, rank=rank)
        assert layout.num_tokens == len(wanted) == int(layout.lengths_S.sum())
        for step, cells in enumerate(rank_micro_batches(batch, by_id, rank=rank, device=CPU)):
            for number, cell in enumerate(cells):
                places = layout.place_of(step, number)
                assert len(places) == int(cell.lengths_B.sum()) and (found[places] == -1).all()
                found[places] = cell.target_N
                assert set(places.tolist()) <= set(layout.tokens_of(step)[0].tolist())
    assert (found == wanted).all()


def test_columns_of_one_rank_survive_a_round_trip() -> None:
    batch, by_id = make_batch([make_group(i) for i in range(3)], tokens_per_micro_batch=40)
    layout = BatchLayout.of(batch, rank=0)
    (cells,) = rank_micro_batches(batch, by_id, rank=0, device=CPU)
    parts = {(0, number): cell.behavior_logprobs_N for number, cell in enumerate(cells)}
    column_N = layout.gather(parts, dtype=torch.float32, device=CPU)
    assert all(torch.equal(column_N[layout.place_of(*cell)], values_N) for cell, values_N in parts.items())
