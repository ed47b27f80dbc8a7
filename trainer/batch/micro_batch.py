"""Builds micro-batches of tensors from planned rows.

Shapes: B lines, T columns (tokens), K columns whose logits are computed, N loss tokens of all rows, V vocabulary. With
packing "padded" every row has its own line, padded on the right; with "flat" all rows are concatenated in one line, and
with "shared" too, but a prompt of several rows only once (trainer/batch/shared_prompts.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.protos.errors import DataError
from tandem.protos.options import MAX_TOP_K
from tandem.protos.types import (
    Packing,
    PlannedRow,
    Segment,
    TrainBatch,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from tandem.trainer.batch.kept_tokens import KeptTokens, holds_its_tokens
from tandem.trainer.batch.shared_prompts import SharedPrompts


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A segment, its sampling temperature, and the rewards given on its tokens, (T,), if any."""

    segment: Segment
    temperature: float = 1.0
    token_rewards: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class FlatRows:
    """The positions of the rows in the single line of a flat micro-batch."""

    positions_BT: Tensor
    """Each token's position in its own row."""
    ends: Tensor
    """int32, one more than rows: 0, then the end of each row."""
    longest: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. The N loss tokens of all rows are flat; token i is predicted at column `columns_K[column_N[i]]`
    of line `row_N[i]`.
    """

    ids_BT: Tensor
    flat: FlatRows | None
    """None if every row has its own line, or prompts are shared."""
    shared: SharedPrompts | None
    """None if no prompts are shared."""
    columns_K: Tensor
    """Columns whose logits a loss token needs: that of the token before it in its row."""
    row_N: Tensor
    column_N: Tensor
    """Index in K of each token's logits."""
    target_N: Tensor
    temperature_N: Tensor
    behavior_logprobs_N: Tensor
    versions_N: Tensor
    """The version that sampled each token; 0 if unknown (supervised rows)."""
    response_column_N: Tensor
    """A token's position in its row's response, counting tool tokens."""
    token_rewards_N: Tensor
    lengths_B: Tensor
    """Number of loss tokens of each row (not line)."""
    kept: KeptTokens | None
    """None if every loss token was sampled from the whole vocabulary."""

    @property
    def inputs(self) -> dict[str, object]:
        """The model's arguments, by transformers' names.

        There is no attention mask: padding is on the right and attention is causal. Concatenated rows are separated by
        positions that restart at 0 (masks) and by their ends (variable-length attention). `shared_prompts` goes through
        the model to trainer/models/shared_attention.py.
        """
        if self.shared is not None:
            return {
                "input_ids": self.ids_BT,
                "position_ids": self.shared.positions_BT,
                "shared_prompts": self.shared,
            }
        if self.flat is None:
            return {"input_ids": self.ids_BT}
        ends, longest = self.flat.ends, self.flat.longest
        return {
            "input_ids": self.ids_BT,
            "position_ids": self.flat.positions_BT,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def check_trainable(trajectory: Trajectory, group_id: str) -> None:
    """Raises DataError if the trainer cannot recompute the trajectory's log-probs: it was sampled with temperature 0,
    penalties, or top-p or min-p without top-k; it lacks its sampling mask; or its first token is a loss token, which
    has no context to be predicted from.
    """
    if not trajectory.sampling.trainable:
        raise DataError(
            f"group {group_id}, trajectory {trajectory.trajectory_id} was sampled with {trajectory.sampling}: only "
            f"temperature > 0 without penalties can be trained, and top-p and min-p only with top-k up to {MAX_TOP_K}"
        )
    if trajectory.sampling.records_mask and not all(map(holds_its_tokens, trajectory.segments)):
        raise DataError(
            f"group {group_id}, trajectory {trajectory.trajectory_id} was sampled with top-k "
            f"{trajectory.sampling.top_k}, and its sampling mask lacks a sampled token"
        )
    if any(segment.loss_mask[0] for segment in trajectory.segments):
        raise DataError(f"group {group_id}, trajectory {trajectory.trajectory_id} has a loss token at its first place")


def rank_micro_batches(
    batch: TrainBatch, groups: Mapping[str, TrajectoryGroup], *, rank: int, device: torch.device
) -> list[list[MicroBatch]]:
    """One list of micro-batches per optimizer step, of the same length on every rank. A rank without rows gets an empty
    micro-batch. Raises DataError if a planned row is not in `groups`, differs from its header, or cannot be trained.
    """
    headers = {(h.group_id, h.trajectory_id, h.segment): h for h in batch.headers}
    rows = {
        (group_id, row.trajectory.trajectory_id): row for group_id, group in groups.items() for row in group.scored_rows
    }
    cells: dict[tuple[int, int], list[TrainingRow]] = {}
    for planned in batch.plan:
        if planned.rank != rank:
            continue
        row = rows.get((planned.group_id, planned.trajectory_id))
        if row is None:
            raise _missing(planned, groups)
        check_trainable(row.trajectory, planned.group_id)
        segment = row.trajectory.segments[planned.segment]
        header = headers[planned.group_id, planned.trajectory_id, planned.segment]
        if (len(segment.ids), segment.num_loss_tokens) != (header.num_tokens, header.num_loss_tokens):
            raise DataError(
                f"group {planned.group_id}, trajectory {planned.trajectory_id}: payload and header differ in length"
            )
        of_segments = row.trajectory.token_rewards
        token_rewards = None if of_segments is None else of_segments[planned.segment]
        cells.setdefault((planned.optimizer_step, planned.micro_batch), []).append(
            TrainingRow(segment, row.trajectory.sampling.temperature, token_rewards)
        )
    return [
        [stack(cells.get((step, number), ()), device, packing=batch.packing) for number in range(count)]
        for step, count in enumerate(batch.num_micro_batches)
    ]


def _missing(planned: PlannedRow, groups: Mapping[str, TrajectoryGroup]) -> DataError:
    if planned.group_id not in groups:
        return DataError(f"group {planned.group_id} is planned for this rank, but its payload was not given")
    return DataError(f"group {planned.group_id} has no scored trajectory {planned.trajectory_id}, which is planned")


def stack(rows: Sequence[TrainingRow], device: torch.device, *, packing: Packing = "padded") -> MicroBatch:
    """Stacks the rows into one micro-batch. Without rows it has a single token and no loss token, so zero loss and
    gradient.
    """
    if not rows:
        rows = [TrainingRow(_EMPTY)]
    segments = [row.segment for row in rows]
    starts_B = np.cumsum([0, *(len(one.ids) for one in segments)])[:-1]
    ids = np.concatenate([one.ids for one in segments]).astype(np.int64)
    places_N = np.flatnonzero(np.concatenate([one.loss_mask for one in segments]))
    owners_N = np.searchsorted(starts_B, places_N, side="right") - 1
    positions_N = places_N - starts_B[owners_N]
    counts_B = np.bincount(owners_N, minlength=len(rows))
    firsts_B = positions_N[(np.cumsum(counts_B) - counts_B)[counts_B > 0]]
    flat = shared = None
    row_N = np.zeros(len(places_N), np.int64)
    if packing == "shared":
        shared = SharedPrompts.of(segments, device)
        ids_BT = shared.ids_T[None]
        before_N = shared.columns(owners_N, positions_N - 1)
    elif packing == "flat":
        ids_BT = ids[None]
        flat = _flat_rows(np.append(starts_B, len(ids)), device)
        before_N = places_N - 1
    else:
        ids_BT = np.zeros((len(rows), max(len(one.ids) for one in segments)), np.int64)
        for number, one in enumerate(segments):
            ids_BT[number, : len(one.ids)] = one.ids
        row_N = owners_N
        before_N = positions_N - 1
    columns_K, column_N = np.unique(before_N, return_inverse=True)
    if not len(columns_K):
        columns_K = np.zeros(1, np.int64)

    def on_device(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        ids_BT=on_device(ids_BT),
        flat=flat,
        shared=shared,
        columns_K=on_device(columns_K),
        row_N=on_device(row_N),
        column_N=on_device(column_N),
        target_N=on_device(ids[places_N]),
        temperature_N=on_device(np.repeat(np.array([row.temperature for row in rows], np.float32), counts_B)),
        behavior_logprobs_N=on_device(np.concatenate([one.behavior_logprobs for one in segments])[places_N]),
        versions_N=on_device(_versions(segments, owners_N, positions_N)),
        response_column_N=on_device(positions_N - np.repeat(firsts_B, counts_B[counts_B > 0])),
        token_rewards_N=on_device(np.concatenate([_token_rewards(row) for row in rows])[places_N]),
        lengths_B=on_device(counts_B),
        kept=KeptTokens.of(segments, device),
    )


def _flat_rows(ends: NDArray[np.int64], device: torch.device) -> FlatRows:
    lengths = np.diff(ends)
    positions = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    return FlatRows(
        positions_BT=torch.from_numpy(positions[None]).to(device),
        ends=torch.from_numpy(ends.astype(np.int32)).to(device),
        longest=int(lengths.max()),
    )


def _versions(
    segments: Sequence[Segment], owners_N: NDArray[np.int64], positions_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The version of each token's span. Tokens before a row's first span belong to it."""
    spans = [
        (row, span.first_token if number else 0, span.policy_version)
        for row, one in enumerate(segments)
        for number, span in enumerate(one.spans or _UNKNOWN)
    ]
    rows, firsts, versions = np.array(spans, np.int64).T
    width = 1 + max(len(one.ids) for one in segments)
    starts = rows * width + firsts
    assert (np.diff(starts) >= 0).all(), "spans are in order, and begin within their row"
    places = np.searchsorted(starts, owners_N * width + positions_N, side="right") - 1
    found: NDArray[np.int64] = versions[places]
    return found


def _token_rewards(row: TrainingRow) -> NDArray[np.float32]:
    return np.zeros(len(row.segment.ids), np.float32) if row.token_rewards is None else row.token_rewards


_UNKNOWN = (VersionSpan(0, 0, 0),)
_EMPTY = Segment(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.uint8), ())
