"""Columns of the whole batch, computed at its start by forward passes without gradient.

N loss tokens of the batch, in the order of trainer/batch/layout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.critic import Critic
from tandem.trainer.models.reference import ReferencePolicy
from tandem.trainer.models.token_model import loss_token_statistics
from tandem.trainer.off_policy.correct import finite_tokens
from tandem.trainer.policy_losses.registry import find_loss


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """Values of every loss token before the batch's first gradient, (N,) on the CPU; None if not required."""

    finite_N: Tensor | None = None
    """bool: False on every token of a segment with a non-finite sampler log-prob; None if all are finite."""
    behavior_N: Tensor | None = None
    versions_N: Tensor | None = None
    columns_N: Tensor | None = None
    turns_N: Tensor | None = None
    token_rewards_N: Tensor | None = None
    proximal_N: Tensor | None = None
    squared_probs_N: Tensor | None = None
    reference_N: Tensor | None = None
    values_N: Tensor | None = None


def needs_every_step(config: AlgorithmConfig) -> bool:
    """Whether the current policy's log-probs of all tokens of an optimizer step are required before that step."""
    correction = config.correction
    return find_loss(config.loss.name).select is not None or (
        correction.proximal == "bypassed" and correction.needs_whole_batch
    )


def needs_proximal(config: TrainerConfig, num_steps: int) -> bool:
    """Whether the policy's log-probs before the first of an epoch's optimizer steps are required. With one step in all
    they are the current ones and cost nothing.
    """
    correction = config.correction
    return (
        (num_steps * config.epochs_per_batch > 1 and correction.proximal == "recomputed")
        or (correction.needs_whole_batch and correction.proximal != "bypassed")
        or bool({"logprobs", "squared_probs"} & config.advantage.needs)
        or config.kl.reward is not None
    )


@torch.no_grad()
def compute_columns(
    layout: BatchLayout,
    steps: Sequence[Sequence[MicroBatch]],
    config: TrainerConfig,
    *,
    policy: TrainingEngine,
    reference: ReferencePolicy | None,
    critic: Critic | None,
    device: torch.device,
) -> BatchColumns:
    """Runs the forward passes that the algorithm needs, the policy's first, and gathers the columns. Every rank must
    call it. `finite_N` is always computed, because denominators depend on it.
    """
    correction, needs = config.correction, config.advantage.needs
    # For computations over more than one micro-batch.
    needs_behavior = needs_every_step(config) or correction.needs_whole_batch or config.advantage.weighs_tokens
    cells = {(step, number): one for step, parts in enumerate(steps) for number, one in enumerate(parts)}

    def column(of: Callable[[MicroBatch], Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        return layout.gather({cell: of(one) for cell, one in cells.items()}, dtype=dtype, device=device)

    proximal_N = squared_probs_N = reference_N = None
    if needs_proximal(config, len(steps)):
        asked = "squared_probs" in needs
        outputs = {cell: loss_token_statistics(policy, one, squared_probs=asked) for cell, one in cells.items()}
        proximal_N = layout.gather({cell: one.logprobs_N for cell, one in outputs.items()}, device=device)
        if asked:
            found = {cell: one.squared_probs_N for cell, one in outputs.items() if one.squared_probs_N is not None}
            squared_probs_N = layout.gather(found, device=device)
    if reference is not None:
        logprobs = dict(zip(cells, reference.logprobs(list(cells.values())), strict=True))
        reference_N = layout.gather(logprobs, device=device)
    needs_positions = bool({"columns", "turns"} & needs)
    positions_N = column(lambda one: one.response_column_N, torch.int64) if needs_positions else None
    return BatchColumns(
        finite_N=column(lambda one: finite_tokens(one.behavior_logprobs_N, one.lengths_B), torch.uint8).bool(),
        behavior_N=column(lambda one: one.behavior_logprobs_N) if needs_behavior else None,
        versions_N=column(lambda one: one.versions_N, torch.int64) if needs_behavior else None,
        # before `_whole_rows`, which changes the positions
        turns_N=None if positions_N is None else turn_numbers(layout, positions_N),
        columns_N=None if positions_N is None else _whole_rows(layout, positions_N),
        token_rewards_N=column(lambda one: one.token_rewards_N) if config.advantage.reads_places else None,
        proximal_N=proximal_N,
        squared_probs_N=squared_probs_N,
        reference_N=reference_N,
        values_N=None if critic is None else column(critic.values),
    )


def turn_numbers(layout: BatchLayout, positions_N: Tensor) -> Tensor:
    """The number of each loss token's turn in its trajectory, (N,) int64. A turn ends where given tokens follow, and
    with its segment, because `positions_N` counts from the segment's first loss token.
    """
    begins_N = torch.ones_like(positions_N, dtype=torch.bool)
    begins_N[1:] = positions_N.diff() != 1
    counts_N = begins_N.cumsum(0)
    filled_R = layout.lengths_R > 0
    firsts_R = (layout.lengths_R.cumsum(0) - layout.lengths_R)[filled_R]
    return counts_N - counts_N[firsts_R].repeat_interleave(layout.lengths_R[filled_R])


def _whole_rows(layout: BatchLayout, columns_N: Tensor) -> Tensor:
    """Positions in the response, numbered consecutively over a trajectory's segments, in place."""
    segments = iter(columns_N.split(layout.lengths_S.tolist()))
    for count in layout.segments_R.tolist():
        offset = 0
        for columns in islice(segments, count):
            columns += offset
            offset = int(columns[-1]) + 1 if len(columns) else offset
    return columns_N
