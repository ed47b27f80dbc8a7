"""From planned rows to tensors, and from tensors to log-probabilities.

Shapes: B rows, T columns (tokens, right-padded), K columns whose logits are computed, N loss tokens of all rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from protos.errors import DataError
from protos.nouns import Segment, Trajectory


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A segment with what its loss tokens have in common."""

    segment: Segment
    temperature: float
    advantage: float
    share: float
    """What each loss token counts in the loss of the optimizer step."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. The N loss tokens of all rows are kept flat; token i is column `target_column_N[i]` of row `row_N[i]`."""

    ids_BT: Tensor
    columns_K: Tensor
    """Columns whose logits any loss token needs: each is predicted from the column before it."""
    row_N: Tensor
    column_N: Tensor
    """Where a token's logits are in K."""
    target_N: Tensor
    temperature_N: Tensor
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    shares_N: Tensor


def check_trainable(trajectory: Trajectory, group_id: str) -> None:
    """Refuses what the trainer cannot recompute the log-probs of.

    Raises:
        DataError: drawn with temperature 0, top-p, top-k or penalties; or a loss token at the very start, which nothing predicts.
    """
    if not trajectory.sampling.trainable:
        raise DataError(
            f"group {group_id}, trajectory {trajectory.trajectory_id} was sampled with {trajectory.sampling}: only temperature > 0 without "
            "top-p, top-k and penalties can be trained"
        )
    if any(segment.loss_mask[0] for segment in trajectory.segments):
        raise DataError(f"group {group_id}, trajectory {trajectory.trajectory_id} has a loss token at its first place")


def stack(rows: Sequence[TrainingRow], device: torch.device) -> MicroBatch:
    """The rows as one right-padded micro-batch. No rows give the empty one: a single token, no loss token, so zero loss and gradient."""
    if not rows:
        rows = [TrainingRow(_EMPTY, temperature=1.0, advantage=0.0, share=0.0)]
    ids_BT = np.zeros((len(rows), max(len(row.segment.ids) for row in rows)), np.int64)
    for number, row in enumerate(rows):
        ids_BT[number, : len(row.segment.ids)] = row.segment.ids
    targets = [np.flatnonzero(row.segment.loss_mask) for row in rows]
    counts = [len(columns) for columns in targets]
    target_column_N = np.concatenate(targets)
    row_N = np.repeat(np.arange(len(rows)), counts)
    columns_K, column_N = np.unique(target_column_N - 1, return_inverse=True)
    if not len(columns_K):
        columns_K = np.zeros(1, np.int64)

    def per_token(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), counts)).to(device)

    return MicroBatch(
        ids_BT=torch.from_numpy(ids_BT).to(device),
        columns_K=torch.from_numpy(columns_K).to(device),
        row_N=torch.from_numpy(row_N).to(device),
        column_N=torch.from_numpy(column_N).to(device),
        target_N=torch.from_numpy(ids_BT[row_N, target_column_N]).to(device),
        temperature_N=per_token([row.temperature for row in rows]),
        behavior_logprobs_N=torch.from_numpy(
            np.concatenate([row.segment.behavior_logprobs[columns] for row, columns in zip(rows, targets, strict=True)])
        ).to(device),
        advantages_N=per_token([row.advantage for row in rows]),
        shares_N=per_token([row.share for row in rows]),
    )


_EMPTY = Segment(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.uint8), ())


def token_logprobs(model: nn.Module, batch: MicroBatch) -> Tensor:
    """log π(token | what comes before it) of the N loss tokens, float32, under each row's temperature.

    No attention mask is passed: padding is on the right and attention is causal, so no real token sees it. Logits are computed only
    for the columns that predict a loss token of some row, and everything from the logits on is float32.
    """
    logits_BKV = model(input_ids=batch.ids_BT, use_cache=False, logits_to_keep=batch.columns_K).logits
    logits_NV = logits_BKV[batch.row_N, batch.column_N].float() / batch.temperature_N[:, None]
    return -functional.cross_entropy(logits_NV, batch.target_N, reduction="none")
