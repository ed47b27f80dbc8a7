"""The order of a batch's loss tokens as one flat column: R trajectories, N tokens.

Trajectories are in the order of the batch's headers, and a trajectory's segments follow one another. `gather` merges
the ranks' micro-batch values into a column of the whole batch; `places` maps a column back to a micro-batch.
Advantages, rejection and denominators are thus computed once over the batch and are equal on every rank, however the
batch was split over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from tandem.protos.types import RowHeader, TrainBatch, scored_trajectories
from tandem.trainer.batch.planning import group_steps

TrajectoryKey = tuple[str, int]
"""(group id, trajectory id)."""


@dataclass(frozen=True)
class BatchLayout:
    """R trajectories that have a reward, S segments, N loss tokens. int64 tensors on the CPU."""

    trajectories: tuple[TrajectoryKey, ...]
    headers: tuple[RowHeader, ...]
    """The header of each trajectory's first segment."""
    lengths_R: Tensor
    groups_R: Tensor
    """Number of each trajectory's group."""
    steps_R: Tensor
    """The optimizer step each trajectory is trained in; for one without a loss token, the step of its group."""
    segments_R: Tensor
    """Number of segments of each trajectory."""
    lengths_S: Tensor
    places: Mapping[tuple[int, int], Tensor]
    """(optimizer step, micro-batch) of this rank → the index in N of each of its loss tokens, in the micro-batch's
    order.
    """

    @classmethod
    def of(cls, batch: TrainBatch, *, rank: int) -> BatchLayout:
        """The layout. Only `places` differs between ranks."""
        rows = scored_trajectories(batch.headers)
        numbers = {group_id: number for number, group_id in enumerate(batch.group_ids)}
        steps = {(row.group_id, row.trajectory_id): row.optimizer_step for row in batch.plan}
        step_of_group = group_steps(len(batch.group_ids), len(batch.num_micro_batches))
        first: dict[tuple[str, int, int], tuple[int, int]] = {}
        total = 0
        for header in (header for segments in rows.values() for header in segments):
            first[header.group_id, header.trajectory_id, header.segment] = total, total + header.num_loss_tokens
            total += header.num_loss_tokens
        cells: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
        for row in batch.plan:
            if row.rank == rank:
                places = np.arange(*first[row.group_id, row.trajectory_id, row.segment])
                cells.setdefault((row.optimizer_step, row.micro_batch), []).append(places)
        return cls(
            trajectories=tuple(rows),
            headers=tuple(segments[0] for segments in rows.values()),
            lengths_R=_integers(sum(header.num_loss_tokens for header in segments) for segments in rows.values()),
            groups_R=_integers(numbers[group_id] for group_id, _ in rows),
            steps_R=_integers(steps.get(key, step_of_group[numbers[key[0]]]) for key in rows),
            segments_R=_integers(len(segments) for segments in rows.values()),
            lengths_S=_integers(header.num_loss_tokens for segments in rows.values() for header in segments),
            places={cell: torch.from_numpy(np.concatenate(parts)) for cell, parts in cells.items()},
        )

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.lengths_R.sum())

    def place_of(self, step: int, micro_batch: int) -> Tensor:
        """`places`, empty if this rank has no rows there."""
        return self.places.get((step, micro_batch), _integers(()))

    def tokens_of(self, step: int) -> tuple[Tensor, Tensor]:
        """(indices in N, lengths of their segments) of all tokens trained in an optimizer step."""
        here_S = (self.steps_R == step).repeat_interleave(self.segments_R)
        return here_S.repeat_interleave(self.lengths_S).nonzero()[:, 0], self.lengths_S[here_S]

    def gather(
        self, parts: Mapping[tuple[int, int], Tensor], *, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The column (N,) of all ranks' `parts` (micro-batch → values of its tokens), on the CPU. Tokens without a
        value are 0. Every rank must call it.
        """
        column_N = torch.zeros(self.num_tokens, dtype=dtype, device=device)
        for cell, values_N in parts.items():
            column_N[self.place_of(*cell).to(device)] = values_N.detach().to(device, dtype)
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            distributed.all_reduce(column_N)  # each token is on one rank only, the others add 0
        return column_N.cpu()


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
