"""From a planned batch and its groups to the micro-batches of one rank: every row with its advantage and its share in the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

import torch

from protos.errors import DataError
from protos.nouns import PlannedRow, Segment, TrainBatch, Trajectory, TrajectoryGroup
from trainer.advantages import TrajectoryKey, batch_advantages
from trainer.config import TrainerConfig
from trainer.losses import token_shares
from trainer.micro_batch import MicroBatch, TrainingRow, check_trainable, stack


def rank_micro_batches(
    batch: TrainBatch, groups: Mapping[str, TrajectoryGroup], *, rank: int, config: TrainerConfig, device: torch.device
) -> list[list[MicroBatch]]:
    """One list of micro-batches an optimizer step, as many as every other rank has: where this one has no rows, an empty one.

    Raises:
        DataError: a planned row is not in `groups`, or it is not what its header says, or cannot be trained.
    """
    advantages = batch_advantages(batch.headers, config.advantage)
    shares = _trajectory_shares(batch, config.aggregation)
    num_tokens = {(h.group_id, h.trajectory_id, h.segment): h.num_tokens for h in batch.headers}
    cells: dict[tuple[int, int], list[TrainingRow]] = {}
    for planned in batch.plan:
        if planned.rank != rank:
            continue
        trajectory, segment = _find(planned, groups)
        if len(segment.ids) != num_tokens[planned.group_id, planned.trajectory_id, planned.segment]:
            raise DataError(
                f"group {planned.group_id}, trajectory {planned.trajectory_id}: payload and header differ in length"
            )
        key = planned.group_id, planned.trajectory_id
        row = TrainingRow(segment, trajectory.sampling.temperature, advantages[key], shares[key])
        cells.setdefault((planned.optimizer_step, planned.micro_batch), []).append(row)
    return [
        [stack(cells.get((step, number), ()), device) for number in range(count)]
        for step, count in enumerate(batch.num_micro_batches)
    ]


def _find(planned: PlannedRow, groups: Mapping[str, TrajectoryGroup]) -> tuple[Trajectory, Segment]:
    group = groups.get(planned.group_id)
    if group is None:
        raise DataError(f"group {planned.group_id} is planned for this rank, but its payload was not given")
    for row in group.scored_rows:
        if row.trajectory.trajectory_id == planned.trajectory_id:
            check_trainable(row.trajectory, planned.group_id)
            return row.trajectory, row.trajectory.segments[planned.segment]
    raise DataError(f"group {planned.group_id} has no scored trajectory {planned.trajectory_id}, which is planned")


def _trajectory_shares(
    batch: TrainBatch, aggregation: Literal["token-mean", "seq-mean-token-mean"]
) -> dict[TrajectoryKey, float]:
    # The denominators span all ranks and micro-batches of an optimizer step; the plan and the headers say them without a collective.
    num_loss_tokens = {(h.group_id, h.trajectory_id, h.segment): h.num_loss_tokens for h in batch.headers}
    counts: list[Counter[TrajectoryKey]] = [Counter() for _ in batch.num_micro_batches]
    for row in batch.plan:
        tokens = num_loss_tokens[row.group_id, row.trajectory_id, row.segment]
        counts[row.optimizer_step][row.group_id, row.trajectory_id] += tokens
    shares: dict[TrajectoryKey, float] = {}
    for count in counts:
        shares.update(zip(count, token_shares(list(count.values()), aggregation), strict=True))
    return shares
