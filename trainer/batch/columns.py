"""Columns of the whole batch, computed at its start by forward passes without gradient.

N loss tokens of the batch, in the order of trainer/batch/layout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.batch.ragged import spread
from tandem.trainer.models.critic import Critic
from tandem.trainer.models.reference import ReferencePolicy
from tandem.trainer.models.token_model import loss_token_statistics
from tandem.trainer.off_policy.correct import finite_rows
from tandem.trainer.policy_losses.registry import find_loss

Cell = tuple[int, int]
"""(optimizer step, micro-batch)."""


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """Values of every loss token before the batch's first gradient, (N,) on the CPU; None if not required."""

    finite_N: Tensor | None = None
    """bool: False on every token of a segment with a non-finite sampler log-prob; None if all are finite."""
    behavior_N: Tensor | None = None
    versions_N: Tensor | None = None
    columns_N: Tensor | None = None
    token_rewards_N: Tensor | None = None
    proximal_N: Tensor | None = None
    squared_probs_N: Tensor | None = None
    reference_N: Tensor | None = None
    values_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RequiredColumns:
    """Which columns of the whole batch an algorithm reads, and hence which forward passes without gradient it needs."""

    proximal: bool
    squared_probs: bool
    reference: bool
    values: bool
    columns: bool
    """Each token's position in its response."""
    token_rewards: bool
    """Rewards of single tokens; not needed by an estimator that only reads a row's sum."""
    every_step: bool
    """The current policy's log-probs of all tokens of an optimizer step, before that step."""
    behavior: bool
    """The sampler's log-probs and versions, for computations over more than one micro-batch."""

    @classmethod
    def of(cls, config: AlgorithmConfig, num_steps: int) -> RequiredColumns:
        """The columns for a batch of `num_steps` optimizer steps. With one step the proximal log-probs are the current
        ones and cost nothing.
        """
        correction, needs = config.correction, config.advantage.needs
        selects = find_loss(config.loss.name).select is not None
        bypassed = correction.proximal == "bypassed"
        every_step = selects or (bypassed and correction.needs_whole_batch)
        return cls(
            proximal=(num_steps > 1 and correction.proximal == "recomputed")
            or (correction.needs_whole_batch and not bypassed)
            or bool({"logprobs", "squared_probs"} & needs)
            or config.kl.reward is not None,
            squared_probs="squared_probs" in needs,
            reference=config.needs_reference,
            values="values" in needs,
            columns="columns" in needs,
            token_rewards=config.advantage.reads_places,
            every_step=every_step,
            behavior=every_step or correction.needs_whole_batch or config.advantage.weighs_tokens,
        )


@torch.no_grad()
def compute_columns(
    layout: BatchLayout,
    steps: Sequence[Sequence[MicroBatch]],
    required: RequiredColumns,
    *,
    policy: TrainingEngine,
    reference: ReferencePolicy | None,
    critic: Critic | None,
    device: torch.device,
) -> BatchColumns:
    """Runs the forward passes that `required` names, the policy's first, and gathers the columns. Every rank must call
    it. `finite_N` is always computed, because denominators depend on it.
    """
    cells = {(step, number): one for step, parts in enumerate(steps) for number, one in enumerate(parts)}

    def column(of: Callable[[MicroBatch], Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        return gather_column(layout, cells, of, device, dtype)

    proximal_N = squared_probs_N = reference_N = values_N = None
    if required.proximal or required.squared_probs:
        outputs = {
            cell: loss_token_statistics(policy, one, squared_probs=required.squared_probs)
            for cell, one in cells.items()
        }
        proximal_N = layout.gather({cell: one.logprobs_N for cell, one in outputs.items()}, device=device)
        if required.squared_probs:
            found = {cell: one.squared_probs_N for cell, one in outputs.items() if one.squared_probs_N is not None}
            squared_probs_N = layout.gather(found, device=device)
    if required.reference:
        assert reference is not None, "the algorithm has a reference policy"
        logprobs = dict(zip(cells, reference.logprobs(list(cells.values())), strict=True))
        reference_N = layout.gather(logprobs, device=device)
    if required.values:
        assert critic is not None, "the algorithm has a critic"
        values_N = column(critic.values)
    positions_N = column(lambda one: one.response_column_N, torch.int64) if required.columns else None
    return BatchColumns(
        finite_N=column(finite_tokens, torch.uint8).bool(),
        behavior_N=column(lambda one: one.behavior_logprobs_N) if required.behavior else None,
        versions_N=column(lambda one: one.versions_N, torch.int64) if required.behavior else None,
        columns_N=None if positions_N is None else _whole_rows(layout, positions_N),
        token_rewards_N=column(lambda one: one.token_rewards_N) if required.token_rewards else None,
        proximal_N=proximal_N,
        squared_probs_N=squared_probs_N,
        reference_N=reference_N,
        values_N=values_N,
    )


def gather_column(
    layout: BatchLayout,
    cells: Mapping[Cell, MicroBatch],
    of: Callable[[MicroBatch], Tensor],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The column (N,) of `of(micro_batch)` over the micro-batches of all ranks. Every rank must call it."""
    return layout.gather({cell: of(one) for cell, one in cells.items()}, dtype=dtype, device=device)


def finite_tokens(batch: MicroBatch) -> Tensor:
    """bool (N,): False on every token of a row with a non-finite sampler log-prob."""
    return spread(finite_rows(batch.behavior_logprobs_N, batch.lengths_B), batch.lengths_B)


def _whole_rows(layout: BatchLayout, columns_N: Tensor) -> Tensor:
    """Positions in the response, numbered consecutively over a trajectory's segments, in place."""
    segments = iter(columns_N.split(layout.lengths_S.tolist()))
    for count in layout.segments_R.tolist():
        offset = 0
        for columns in islice(segments, count):
            columns += offset
            offset = int(columns[-1]) + 1 if len(columns) else offset
    return columns_N
