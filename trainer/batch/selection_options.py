"""Options that select and weight training data. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Finite = Annotated[float, Field(allow_inf_nan=False)]


class OverlongPenalty(BaseModel):
    """DAPO's soft penalty on answers close to the length limit (arXiv:2503.14476, eq. 13)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    buffer_tokens: Annotated[int, Field(ge=1)]
    """Number of tokens before the limit over which the penalty rises."""
    factor: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    """The penalty at the limit."""
    beyond: Literal["flat", "ramp"] = "flat"
    """Past the limit the penalty stays at `factor` as in the paper (`flat`), or keeps rising (`ramp`)."""


class PolicyFiltration(BaseModel):
    """PF-PPO: weights trajectories by the rank of their reward, because reward models err most on middle ranks
    (arXiv:2409.06957).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["best_of_n", "best_random", "best_worst", "power"] = "best_worst"
    """Trains on the group's best; on its best and, with less weight, the others; on its best and worst; or in
    proportion to |reward|^power over the whole batch.
    """
    power: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 2.0
    """Exponent of `power`."""
    resample: bool = False
    """Draw as many trajectories as there are with these probabilities (as in the paper), instead of weighting by
    expected counts.
    """


class SelectionOptions(BaseModel):
    """Selection and weighting of groups, rows and tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal when they are claimed, and return their credits (DAPO's dynamic
    sampling).
    """
    overlong_filter: bool = False
    """Exclude answers cut off at the limit from the loss; their rewards still count in their group's baseline (DAPO).
    """
    overlong_penalty: OverlongPenalty | None = None
    """Penalty on answers close to the length limit."""
    reward_clip: tuple[Finite, Finite] | None = None
    """Bounds that rewards are clipped to, before any penalty."""
    advantage_clip: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Largest absolute advantage of a token."""
    filtration: PolicyFiltration | None = None
    """Weights trajectories by the rank of their reward (PF-PPO)."""

    @model_validator(mode="after")
    def _ordered_clip(self) -> SelectionOptions:
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            raise ValueError(f"reward_clip is [lowest, highest], not {list(self.reward_clip)}")
        return self
