"""Advantages of group-relative policy optimisation: how much better a trajectory did than the others of its prompt.

GRPO: arXiv:2402.03300, eq. 3. Dr.GRPO, which leaves the division by the standard deviation out: arXiv:2503.20783.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protos.nouns import RowHeader

EPSILON = 1e-6

TrajectoryKey = tuple[str, int]
"""(group id, trajectory id)."""


def group_advantages(rewards_G: NDArray[np.float64], *, divide_by_std: bool) -> NDArray[np.float64]:
    """(r − μ)/(σ + 1e-6) over the rewards of one group, σ with Bessel's correction; r − μ without `divide_by_std`.

    A group of one has nothing to be compared with: μ = 0 and σ = 1 by convention, so its advantage is its reward.
    """
    if len(rewards_G) == 1:
        mean, std = 0.0, 1.0
    else:
        mean, std = float(rewards_G.mean()), float(rewards_G.std(ddof=1))
    centred_G = rewards_G - mean
    return centred_G / (std + EPSILON) if divide_by_std else centred_G


def trajectory_rewards(headers: Iterable[RowHeader]) -> dict[str, dict[int, float]]:
    """group id → trajectory id → reward, of the policy's trajectories that have one. Baselines and unscored rows are left out."""
    rewards: dict[str, dict[int, float]] = {}
    for header in headers:
        if header.role == "policy" and header.reward is not None:
            rewards.setdefault(header.group_id, {})[header.trajectory_id] = header.reward
    return rewards


def batch_advantages(headers: Iterable[RowHeader], kind: Literal["grpo", "dr_grpo"]) -> dict[TrajectoryKey, float]:
    """The advantage of every trajectory that is trained. All segments of a trajectory share it, and so do their tokens."""
    advantages: dict[TrajectoryKey, float] = {}
    for group_id, rewards in trajectory_rewards(headers).items():
        values_G = group_advantages(np.array(list(rewards.values()), np.float64), divide_by_std=kind == "grpo")
        advantages.update(((group_id, key), float(value)) for key, value in zip(rewards, values_G, strict=True))
    return advantages


def num_zero_variance_groups(headers: Iterable[RowHeader]) -> int:
    """Groups of two and more trajectories whose rewards are all equal: they teach nothing (DAPO, arXiv:2503.14476)."""
    groups = trajectory_rewards(headers).values()
    return sum(1 for rewards in groups if len(rewards) > 1 and len(set(rewards.values())) == 1)
