"""A batch with made-up columns, and the sum of its objective over micro-batches and ranks: learning without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tandem.protos.types import TrajectoryGroup
from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.batch.columns import BatchColumns
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.micro_batch import rank_micro_batches
from tandem.trainer.batch.rewards import Targets
from tandem.trainer.kl import first_coefficients
from tandem.trainer.models.token_logprobs import TokenStatistics
from tandem.trainer.objective import BatchObjective
from tandem.trainer.off_policy.correct import finite_tokens
from tests.support.training_groups import make_batch

CPU = torch.device("cpu")
VERSION = 3
MAX_TOKENS = 12


@dataclass(frozen=True)
class Outcome:
    """Σ of the loss over micro-batches, ranks and optimizer steps, and its gradients in the layout's order."""

    loss: float
    by_logprobs_N: Tensor
    by_entropy_N: Tensor
    num_tokens: int
    """Number of trained tokens."""


@dataclass(frozen=True)
class MadeUpBatch:
    """Columns in the layout's order, which is the order of the groups for any split."""

    groups: Sequence[TrajectoryGroup]
    num_steps: int
    layout: BatchLayout
    start: BatchColumns
    targets: Targets
    current_N: Tensor
    entropy_N: Tensor

    @classmethod
    def of(
        cls, groups: Sequence[TrajectoryGroup], *, seed: int = 0, num_steps: int = 1, distance: float = 0.4
    ) -> MadeUpBatch:
        """Proximal, current and reference log-probs are about `distance` from the sampler's; advantages are random."""
        batch, by_id = make_batch(
            groups, policy_version=VERSION, tokens_per_micro_batch=4000, optimizer_steps=num_steps
        )
        layout = BatchLayout.of(batch, rank=0)
        cells = {
            (step, number): cell
            for step, parts in enumerate(rank_micro_batches(batch, by_id, rank=0, device=CPU))
            for number, cell in enumerate(parts)
        }

        def column(parts: dict[tuple[int, int], Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
            return layout.gather(parts, dtype=dtype, device=CPU)

        behavior_N = column({place: cell.behavior_logprobs_N for place, cell in cells.items()})
        generator = torch.Generator().manual_seed(seed)
        around_N = behavior_N.nan_to_num(-1.0, -1.0, -1.0)

        def noise(scale: float = distance) -> Tensor:
            return scale * torch.randn(layout.num_tokens, generator=generator)

        def nearby() -> Tensor:
            return (around_N + noise()).clamp(max=-1e-3)

        finite = {place: finite_tokens(cell.behavior_logprobs_N, cell.lengths_B) for place, cell in cells.items()}
        start = BatchColumns(
            finite_N=column(finite, torch.uint8).bool(),
            behavior_N=behavior_N,
            versions_N=column({place: cell.versions_N for place, cell in cells.items()}, torch.int64),
            proximal_N=nearby(),
            reference_N=nearby(),
        )
        targets = Targets(noise(1.0), None, torch.ones(len(layout.trajectories), dtype=torch.float64), {}, 0.0)
        return cls(groups, num_steps, layout, start, targets, nearby(), noise().abs())

    def with_columns(self, *, current_N: Tensor | None = None, **targets: Any) -> MadeUpBatch:
        """The batch with other log-probs of the current policy, or other `Targets`."""
        current_N = self.current_N if current_N is None else current_N
        return replace(self, current_N=current_N, targets=replace(self.targets, **targets))

    def outcome(self, config: AlgorithmConfig, *, world_size: int = 1, budget: int = 4000) -> Outcome:
        """The summed outcome over this many ranks with micro-batches of at most `budget` tokens."""
        batch, by_id = make_batch(
            self.groups,
            policy_version=VERSION,
            world_size=world_size,
            tokens_per_micro_batch=budget,
            optimizer_steps=self.num_steps,
        )
        loss, num_tokens = 0.0, 0
        gradients = torch.zeros(2, self.layout.num_tokens, dtype=torch.float64)
        for rank in range(world_size):
            layout = BatchLayout.of(batch, rank=rank)
            objective = self.objective(config, layout, rank)
            for step, cells in enumerate(rank_micro_batches(batch, by_id, rank=rank, device=CPU)):
                plan = objective.begin_step(step, self.current_N)
                for number, cell in enumerate(cells):
                    place = layout.place_of(step, number)
                    outputs = [column_N[place].requires_grad_() for column_N in (self.current_N, self.entropy_N)]
                    part = objective.policy_loss(plan, number, cell, TokenStatistics(*outputs, None))
                    found = torch.autograd.grad(part, outputs, allow_unused=True, materialize_grads=True)
                    gradients[:, place] += torch.stack(found).double()
                    loss += float(part.detach())
                    num_tokens += int(plan.keep_N[place].sum())
        return Outcome(loss, gradients[0], gradients[1], num_tokens)

    def objective(self, config: AlgorithmConfig, layout: BatchLayout | None = None, rank: int = 0) -> BatchObjective:
        """The objective of a rank; without a layout, of the only one."""
        return BatchObjective(
            config,
            layout or self.layout,
            self.start,
            self.targets,
            policy_version=VERSION,
            num_steps=self.num_steps,
            num_epochs=1,
            coefficients=first_coefficients(config.kl),
            max_response_tokens=MAX_TOKENS,
            seed=0,
            device=CPU,
            counts_whole_batch=rank == 0,
        )
