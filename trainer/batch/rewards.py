"""Computes estimator inputs from a batch's rewards, and from these the advantage of every loss token.

R trajectories, N loss tokens flat, in the order of trainer/batch/layout.py; C reward components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.protos.errors import DataError
from tandem.protos.types import RowHeader, TrajectoryGroup
from tandem.trainer.algorithm import AlgorithmConfig, SelectionOptions
from tandem.trainer.batch.columns import BatchColumns
from tandem.trainer.batch.layout import BatchLayout, TrajectoryKey
from tandem.trainer.batch.ragged import row_sums
from tandem.trainer.batch.selection import Floats, check_finite, filtration_weights, overlong_penalties
from tandem.trainer.estimators.inputs import EstimatorBatch
from tandem.trainer.estimators.registry import estimate
from tandem.trainer.kl import kl_in_reward
from tandem.trainer.off_policy.correct import correct


@dataclass(frozen=True, slots=True)
class Targets:
    """Advantages and returns of the batch. `counts_R` is how often each trajectory counts; 0 leaves it out."""

    advantages_N: Tensor
    returns_N: Tensor | None
    counts_R: Tensor
    figures: Mapping[str, float]
    reward_kl: float


def learning_targets(
    layout: BatchLayout,
    headers: Sequence[RowHeader],
    start: BatchColumns,
    config: AlgorithmConfig,
    *,
    components: Mapping[TrajectoryKey, Mapping[str, float]],
    reward_kl_coefficient: float,
    max_response_tokens: int,
    seed: int,
) -> Targets:
    """Advantages float32 (N,), and returns if the estimator has them. Raises DataError if a reward or another estimator
    input is missing or not finite, or if a group is too small.
    """
    selection = config.selection
    scores_R = np.array([header.reward for header in layout.headers], np.float64)
    rewards_R = _shaped(scores_R, layout.lengths_R.numpy(), selection, max_response_tokens)
    rewards_N = _on_tokens(torch.from_numpy(rewards_R), layout, start.token_rewards_N)
    reward_kl = 0.0
    if config.kl.reward is not None:
        assert start.proximal_N is not None and start.reference_N is not None, "KL needs the reference policy"
        logprobs = start.proximal_N, start.reference_N
        rewards_N, reward_kl = kl_in_reward(
            rewards_N, *logprobs, layout.lengths_R, config.kl.reward, coefficient=reward_kl_coefficient
        )
    inputs = EstimatorBatch(
        rewards_N=rewards_N,
        lengths_R=layout.lengths_R,
        groups_R=layout.groups_R,
        baselines_R=_baselines(layout, headers, selection, max_response_tokens) if config.needs_baselines else None,
        components_RC=_component_rows(layout, components) if config.needs_components else None,
        values_N=_double(start.values_N),
        logprobs_N=_double(start.proximal_N),
        squared_probs_N=_double(start.squared_probs_N),
        behavior_weights_N=_behavior_weights(layout, start, config) if config.advantage.weighs_tokens else None,
        columns_N=start.columns_N,
        turns_N=start.turns_N,
    )
    result = estimate(inputs, config.advantage)
    advantages_N = result.advantages_N
    if selection.advantage_clip is not None:
        advantages_N = advantages_N.clamp(-selection.advantage_clip, selection.advantage_clip)
    advantages_N = advantages_N.float()
    counts_R = _counts(layout, scores_R, config, seed)
    figures = _figures(layout, advantages_N, scores_R)
    if result.returns_N is not None and start.values_N is not None:
        figures["critic_explained_variance"] = explained_variance(start.values_N.double(), result.returns_N.double())
    return Targets(advantages_N, result.returns_N, counts_R, figures, reward_kl)


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """1 − Var(returns − values) / Var(returns): 1 for a perfect critic, 0 for a constant prediction, NaN if the returns
    are constant.
    """
    variance = returns_N.var(correction=0).item()
    return 1.0 - (returns_N - values_N).var(correction=0).item() / variance if variance > 0.0 else math.nan


def reward_components(groups: Mapping[str, TrajectoryGroup]) -> dict[TrajectoryKey, dict[str, float]]:
    """The reward breakdown of every scored policy trajectory of these groups."""
    return {
        (group.group_id, row.trajectory.trajectory_id): dict(row.breakdown)
        for group in groups.values()
        for row in group.scored_rows
        if row.trajectory.role == "policy" and row.reward is not None
    }


def _shaped(
    scores_R: Floats, lengths_R: NDArray[np.int64], selection: SelectionOptions, max_response_tokens: int
) -> Floats:
    """Scores after clipping and the penalty on overlong answers."""
    rewards_R = scores_R
    if selection.reward_clip is not None:
        rewards_R = np.clip(check_finite(scores_R, "rewards"), *selection.reward_clip)
    if selection.overlong_penalty is None:
        return rewards_R
    return rewards_R + overlong_penalties(lengths_R, selection.overlong_penalty, max_tokens=max_response_tokens)


def _double(column_N: Tensor | None) -> Tensor | None:
    return None if column_N is None else column_N.double()


def _on_tokens(rewards_R: Tensor, layout: BatchLayout, token_rewards_N: Tensor | None) -> Tensor:
    """The rewards of single tokens. A row's last token gets the part of its score that is on no other token."""
    rewards_N = torch.zeros(layout.num_tokens, dtype=torch.float64)
    if token_rewards_N is not None:
        rewards_N += token_rewards_N.double()
        rewards_R = rewards_R - row_sums(rewards_N, layout.lengths_R)
    filled_R = layout.lengths_R > 0
    rewards_N[layout.lengths_R.cumsum(0)[filled_R] - 1] += rewards_R[filled_R]
    return rewards_N


def _behavior_weights(layout: BatchLayout, start: BatchColumns, config: AlgorithmConfig) -> Tensor:
    """(N,) float64: the factor that the correction puts on each token's gradient, 0 for a rejected token, as far as it
    is known at the batch's start and without advantages.
    """
    assert start.proximal_N is not None and start.behavior_N is not None, "weights need both log-probs"
    known = config.correction.without_advantages
    corrected = correct(start.proximal_N, start.behavior_N, layout.lengths_S, known)
    return corrected.weights_N.double() * corrected.keep_N


def _baselines(
    layout: BatchLayout, headers: Sequence[RowHeader], selection: SelectionOptions, max_response_tokens: int
) -> Tensor:
    """(R,) float64: the reward of the greedy answer to each row's prompt, shaped like the rewards of the rows."""
    scores: dict[str, float] = {}
    lengths: dict[str, int] = {}
    for header in headers:
        if header.role == "baseline" and header.reward is not None:
            scores[header.group_id] = header.reward
            lengths[header.group_id] = lengths.get(header.group_id, 0) + header.num_loss_tokens
    group_ids = [group_id for group_id, _ in layout.trajectories]
    lacking = next((group_id for group_id in group_ids if group_id not in scores), None)
    if lacking is not None:
        raise DataError(f"group {lacking} has no scored greedy answer, which trainer.advantage remax compares with")
    scores_R = np.array([scores[group_id] for group_id in group_ids], np.float64)
    lengths_R = np.array([lengths[group_id] for group_id in group_ids], np.int64)
    return torch.from_numpy(_shaped(scores_R, lengths_R, selection, max_response_tokens))


def _component_rows(layout: BatchLayout, components: Mapping[TrajectoryKey, Mapping[str, float]]) -> Tensor:
    """(R, C) float64, components in the order of their names. `a/b` is part of `a` and is not a separate component.

    A component that no row of a group has belongs to other data; it is 0 there and does not affect the comparison.
    """
    names = sorted({name for parts in components.values() for name in parts if "/" not in name})
    if not names:
        raise DataError(
            "trainer.advantage gdpo needs rewards with their components: let the reward function return a dict of "
            "them, or name several scorers in reward.rubric"
        )
    known: dict[str, set[str]] = {}
    for (group_id, _), parts in components.items():
        known.setdefault(group_id, set()).update(parts)
    rows = []
    for group_id, trajectory_id in layout.trajectories:
        parts = components.get((group_id, trajectory_id), {})
        missing = [name for name in names if name not in parts and name in known.get(group_id, names)]
        if missing:
            raise DataError(
                f"group {group_id}, trajectory {trajectory_id}: its reward lacks the component {missing[0]}, which "
                "others have"
            )
        rows.append([parts.get(name, 0.0) for name in names])
    return torch.tensor(rows, dtype=torch.float64)


def _counts(layout: BatchLayout, scores_R: np.ndarray, config: AlgorithmConfig, seed: int) -> Tensor:
    counts_R = np.ones(len(scores_R))
    if config.selection.overlong_filter:
        counts_R *= np.array([header.finish_reason != "length" for header in layout.headers])
    if config.selection.filtration is not None:
        groups_R = layout.groups_R.numpy()
        counts_R *= filtration_weights(scores_R, groups_R, config.selection.filtration, seed=seed)
    return torch.from_numpy(counts_R)


def _figures(layout: BatchLayout, advantages_N: Tensor, scores_R: np.ndarray) -> dict[str, float]:
    groups_R = layout.groups_R.numpy()
    order_R = np.argsort(groups_R, kind="stable")
    _, starts_G, counts_G = np.unique(groups_R[order_R], return_index=True, return_counts=True)
    equal_G = np.zeros(0, bool)
    if len(starts_G):
        scores_R = scores_R[order_R]
        equal_G = np.maximum.reduceat(scores_R, starts_G) == np.minimum.reduceat(scores_R, starts_G)
    return {
        "advantage_abs_mean": float(advantages_N.abs().mean()) if len(advantages_N) else 0.0,
        "zero_variance_groups": int((equal_G & (counts_G > 1)).sum()),
    }
