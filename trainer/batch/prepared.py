"""What one rank can do for a planned batch without a model, and so while the batch before it is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.protos.errors import DataError
from tandem.protos.types import TrainBatch, TrajectoryGroup
from tandem.trainer.batch.layout import BatchLayout, TrajectoryKey
from tandem.trainer.batch.micro_batch import MicroBatch, rank_micro_batches
from tandem.trainer.batch.planning import packing_metrics
from tandem.trainer.objective import BatchObjective, StepColumns

MicroBatches = Sequence[Sequence[MicroBatch]]
"""The micro-batches of each optimizer step."""


@dataclass(frozen=True, slots=True)
class BatchStart:
    """What is known before a batch's first gradient."""

    objective: BatchObjective
    first_step: StepColumns | None
    """Of the first optimizer step; None if it needs the policy's log-probs."""
    mean_advantages: Mapping[TrajectoryKey, float]
    """Of each trajectory that has loss tokens."""
    forward_seconds: float
    """What the columns took."""


@dataclass(slots=True)
class PreparedBatch:
    """A planned batch with this rank's part of it as tensors."""

    batch: TrainBatch
    groups: Mapping[str, TrajectoryGroup]
    """All groups of the batch on rank 0, and on other ranks at least those whose rows they train."""
    layout: BatchLayout
    packing: Mapping[str, float]
    """Metrics of how well the batch is packed."""
    rank: int
    device: torch.device
    start: BatchStart | None = None
    """None if it needs a model, another rank or a GPU, or cannot be computed."""
    _steps: MicroBatches | DataError | None = None

    @classmethod
    def of(
        cls, batch: TrainBatch, groups: Mapping[str, TrajectoryGroup], *, rank: int, device: torch.device
    ) -> PreparedBatch:
        """Any thread may call it. Tensors on a GPU are left to `take_micro_batches`: a copy to it would wait for the
        kernels of the batch that trains.
        """
        prepared = cls(batch, groups, BatchLayout.of(batch, rank=rank), packing_metrics(batch), rank, device)
        if device.type == "cpu":
            try:
                prepared._steps = prepared._build()
            except DataError as error:  # all ranks have to refuse the batch together
                prepared._steps = error
        return prepared

    @property
    def steps(self) -> MicroBatches | None:
        """The micro-batches, if this object holds them."""
        return None if isinstance(self._steps, DataError) else self._steps

    def take_micro_batches(self) -> MicroBatches:
        """The micro-batches, which this object then no longer holds: their memory is for training only. Raises
        DataError if this rank's rows cannot be trained.
        """
        steps, self._steps = self._steps, None
        if isinstance(steps, DataError):
            raise steps
        return self._build() if steps is None else steps

    def _build(self) -> MicroBatches:
        return rank_micro_batches(self.batch, self.groups, rank=self.rank, device=self.device)
