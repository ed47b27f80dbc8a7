"""What one rank can do for a planned batch without a model, and so while the batch before it is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.protos.errors import DataError
from tandem.protos.types import TrainBatch, TrajectoryGroup
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.micro_batch import MicroBatch, rank_micro_batches
from tandem.trainer.batch.planning import packing_metrics


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A planned batch and this rank's part of it as tensors on its device."""

    batch: TrainBatch
    groups: Mapping[str, TrajectoryGroup]
    """All groups of the batch on rank 0, and on other ranks at least those whose rows they train."""
    layout: BatchLayout
    steps: Sequence[Sequence[MicroBatch]]
    """The micro-batches of each optimizer step."""
    packing: Mapping[str, float]
    """Metrics of how well the batch is packed."""
    failure: DataError | None
    """Why this rank's rows cannot be trained. All ranks then have to refuse the batch together."""

    @classmethod
    def of(
        cls, batch: TrainBatch, groups: Mapping[str, TrajectoryGroup], *, rank: int, device: torch.device
    ) -> PreparedBatch:
        """Any thread may call it."""
        steps: Sequence[Sequence[MicroBatch]] = ()
        failure = None
        try:
            steps = rank_micro_batches(batch, groups, rank=rank, device=device)
        except DataError as error:
            failure = error
        layout = BatchLayout.of(batch, rank=rank)
        return cls(batch, groups, layout, steps, packing_metrics(batch), failure)
