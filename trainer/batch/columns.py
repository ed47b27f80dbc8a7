"""The forward passes without gradient at a batch's start: what the models say of it before anything is learned from it.

N loss tokens of the batch, in the order of trainer/batch/layout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.batch.ragged import spread
from tandem.trainer.batch.rewards import StartColumns
from tandem.trainer.models.critic import Critic
from tandem.trainer.models.reference import ReferencePolicy
from tandem.trainer.models.token_model import token_answers
from tandem.trainer.off_policy.correct import finite_rows

if TYPE_CHECKING:
    from tandem.trainer.objective import Needs

Cell = tuple[int, int]
"""(optimizer step, micro-batch)."""


@torch.no_grad()
def look(
    layout: BatchLayout,
    steps: Sequence[Sequence[MicroBatch]],
    needs: Needs,
    *,
    policy: TrainingEngine,
    reference: ReferencePolicy | None,
    critic: Critic | None,
    device: torch.device,
) -> StartColumns:
    """Runs what `needs` asks for, policy first, and makes columns of it. All ranks enter.

    Whether the sampler's are finite is always looked at: it decides denominators, which are fixed before a micro-batch
    is corrected.
    """
    cells = {(step, number): one for step, parts in enumerate(steps) for number, one in enumerate(parts)}

    def column(of: Callable[[MicroBatch], Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        return rank_columns(layout, cells, of, device, dtype)

    proximal_N = squared_probs_N = reference_N = values_N = None
    if needs.proximal or needs.squared_probs:
        outputs = {cell: token_answers(policy, one, squared_probs=needs.squared_probs) for cell, one in cells.items()}
        proximal_N = _gathered(layout, {cell: one.logprobs_N for cell, one in outputs.items()}, device)
        if needs.squared_probs:
            found = {cell: one.squared_probs_N for cell, one in outputs.items() if one.squared_probs_N is not None}
            squared_probs_N = _gathered(layout, found, device)
    if needs.reference:
        assert reference is not None, "the algorithm has a reference policy"
        logprobs = dict(zip(cells, reference.logprobs(list(cells.values())), strict=True))
        reference_N = _gathered(layout, logprobs, device)
    if needs.values:
        assert critic is not None, "the algorithm has a critic"
        values_N = column(critic.values)
    return StartColumns(
        finite_N=column(finite_tokens, torch.uint8).bool(),
        behavior_N=column(lambda one: one.behavior_logprobs_N) if needs.behavior else None,
        versions_N=column(lambda one: one.versions_N, torch.int64) if needs.behavior else None,
        columns_N=_whole_rows(layout, column(lambda one: one.response_column_N, torch.int64))
        if needs.columns
        else None,
        token_rewards_N=column(lambda one: one.token_rewards_N) if needs.token_rewards else None,
        proximal_N=proximal_N,
        squared_probs_N=squared_probs_N,
        reference_N=reference_N,
        values_N=values_N,
    )


def rank_columns(
    layout: BatchLayout,
    cells: Mapping[Cell, MicroBatch],
    of: Callable[[MicroBatch], Tensor],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The column of what `of` says of this rank's micro-batches and of the others'. All ranks enter."""
    return layout.gather({cell: of(one) for cell, one in cells.items()}, dtype=dtype, device=device)


def finite_tokens(batch: MicroBatch) -> Tensor:
    """bool (N,): False on every token of a row whose log-probs from the sampler are not all finite."""
    return spread(finite_rows(batch.behavior_logprobs_N, batch.lengths_B), batch.lengths_B)


def _gathered(layout: BatchLayout, parts: Mapping[Cell, Tensor], device: torch.device) -> Tensor:
    return layout.gather(parts, dtype=torch.float32, device=device)


def _whole_rows(layout: BatchLayout, columns_N: Tensor) -> Tensor:
    """Places in the response, of trajectories with several segments one segment after another."""
    columns_N = columns_N.clone()
    segments = columns_N.split(layout.lengths_S.tolist())
    number = 0
    for count in layout.segments_R.tolist():
        offset = 0
        for columns in segments[number : number + count]:
            columns += offset
            offset = int(columns[-1]) + 1 if len(columns) else offset
        number += count
    return columns_N
