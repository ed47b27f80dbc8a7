"""Options of what is learned from at all. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Finite = Annotated[float, Field(allow_inf_nan=False)]


class OverlongPenalty(BaseModel):
    """DAPO's soft punishment of answers that come near the longest one allowed (arXiv:2503.14476, eq. 13)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    buffer_tokens: Annotated[int, Field(ge=1)]
    """The last tokens before the limit, over which the penalty rises."""
    factor: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    """The penalty at the limit."""
    beyond: Literal["flat", "ramp"] = "flat"
    """Past the limit it stays at `factor` as in the paper, or goes on rising."""


class PolicyFiltration(BaseModel):
    """PF-PPO: trajectories count by the rank of their reward, because reward models err most in the middle
    (arXiv:2409.06957).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["best_of_n", "best_random", "best_worst", "power"] = "best_worst"
    """The group's best; its best and the others alike; its best and worst; or |reward|^power over the whole batch."""
    power: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 2.0
    """Exponent of `power`."""
    resample: bool = False
    """Draws as many trajectories as there are with these probabilities (the paper's way) instead of weighting by
    expected counts.
    """


class SelectionOptions(BaseModel):
    """Which groups, rows and tokens teach, and how much."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drop_zero_variance: bool = False
    """Groups whose rewards are all equal are dropped as they are claimed, and their credits return (DAPO's dynamic
    sampling).
    """
    overlong_filter: bool = False
    """Answers cut off at the limit leave the loss; their rewards still count in their group's baseline (DAPO)."""
    overlong_penalty: OverlongPenalty | None = None
    """Punishes answers near the length limit."""
    reward_clip: tuple[Finite, Finite] | None = None
    """Rewards below the first are raised to it, above the second cut to it, before any penalty."""
    advantage_clip: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Largest absolute advantage of a token."""
    filtration: PolicyFiltration | None = None
    """Reweights trajectories by the rank of their reward (PF-PPO)."""

    @model_validator(mode="after")
    def _ordered_clip(self) -> SelectionOptions:
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            raise ValueError(f"reward_clip is [lowest, highest], not {list(self.reward_clip)}")
        return self
