"""Builds the micro-batches of one rank from a planned batch and its groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tandem.protos.errors import DataError
from tandem.protos.types import PlannedRow, ScoredTrajectory, TrainBatch, TrajectoryGroup
from tandem.trainer.batch.micro_batch import MicroBatch, TrainingRow, check_trainable, stack


def rank_micro_batches(
    batch: TrainBatch, groups: Mapping[str, TrajectoryGroup], *, rank: int, device: torch.device
) -> list[list[MicroBatch]]:
    """One list of micro-batches per optimizer step, of the same length on every rank. A rank without rows gets an empty
    micro-batch.

    Raises:
        DataError: a planned row is not in `groups`, differs from its header, or cannot be trained.
    """
    headers = {(h.group_id, h.trajectory_id, h.segment): h for h in batch.headers}
    cells: dict[tuple[int, int], list[TrainingRow]] = {}
    for planned in batch.plan:
        if planned.rank != rank:
            continue
        row = _find(planned, groups)
        segment = row.trajectory.segments[planned.segment]
        header = headers[planned.group_id, planned.trajectory_id, planned.segment]
        if (len(segment.ids), segment.num_loss_tokens) != (header.num_tokens, header.num_loss_tokens):
            raise DataError(
                f"group {planned.group_id}, trajectory {planned.trajectory_id}: payload and header differ in length"
            )
        token_rewards = None if row.token_rewards is None else row.token_rewards[planned.segment]
        cells.setdefault((planned.optimizer_step, planned.micro_batch), []).append(
            TrainingRow(segment, row.trajectory.sampling.temperature, token_rewards)
        )
    return [
        [stack(cells.get((step, number), ()), device, packing=batch.packing) for number in range(count)]
        for step, count in enumerate(batch.num_micro_batches)
    ]


def _find(planned: PlannedRow, groups: Mapping[str, TrajectoryGroup]) -> ScoredTrajectory:
    group = groups.get(planned.group_id)
    if group is None:
        raise DataError(f"group {planned.group_id} is planned for this rank, but its payload was not given")
    for row in group.scored_rows:
        if row.trajectory.trajectory_id == planned.trajectory_id:
            check_trainable(row.trajectory, planned.group_id)
            return row
    raise DataError(f"group {planned.group_id} has no scored trajectory {planned.trajectory_id}, which is planned")
