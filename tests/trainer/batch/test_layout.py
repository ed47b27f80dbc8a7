"""The layout of a batch's loss tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.micro_batch import rank_micro_batches
from tests.support.training_groups import make_batch, make_group

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
