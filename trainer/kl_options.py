"""Options of the KL penalty towards the reference policy. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

KlEstimator = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+"
]  # fmt: skip
"""`kl` is `k1`, `mse` is `k2`, `low_var_kl` is `k3`; with `+` the value is the same and the gradient that of k2
(trainer/kl.py).
"""


class KlPenalty(BaseModel):
    """How much a nat of KL costs, and whether that adapts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    coefficient: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.001
    """β: what a nat costs; with a target, where β starts."""
    target: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """Nats a token that β is steered to (arXiv:1909.08593); not set: β stays as it is."""
    horizon: Annotated[int, Field(ge=1)] = 10_000
    """Trajectories over which β reacts to a KL off its target."""


class RewardKl(KlPenalty):
    """KL in the reward of every token: r − β·k."""

    estimator: KlEstimator = "k1"
    """Only its value counts; k1 is the one without bias."""


class LossKl(KlPenalty):
    """KL in the loss: + β·k of every token, under the loss's aggregation."""

    estimator: KlEstimator = "k3"
    """Its gradient counts: on-policy that of k2 and of every `+` is unbiased, that of k3 biased (GRPO's), that of k1
    noise around 0.
    """
    unbiased: bool = False
    """Multiplies k by π_current/π_behavior, gradient included: unbiased for stale samples, too (DeepSeek-V3.2); for k1
    and k3.
    """

    @model_validator(mode="after")
    def _unbiased_estimators(self) -> LossKl:
        if self.unbiased and self.estimator not in ("k1", "kl", "k3", "low_var_kl"):
            raise ValueError(
                f"unbiased needs the estimator k1 or k3, not {self.estimator}: the others' expectation is not the KL"
            )
        return self


class KlOptions(BaseModel):
    """The penalty for leaving the reference policy: in the reward, in the loss, in both or (neither set) none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: RewardKl | None = None
    """Subtracted from every token's reward before the advantages."""
    loss: LossKl | None = None
    """Added to the policy loss."""
