"""Options of the KL penalty towards the reference policy. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

KlEstimator = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+"
]  # fmt: skip
"""`kl` is `k1`, `mse` is `k2`, `low_var_kl` is `k3`; `+` keeps the value and uses the gradient of k2 (trainer/kl.py).
"""


class KlPenalty(BaseModel):
    """Coefficient of the KL penalty and its adaptation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    coefficient: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.001
    """β, the penalty per nat; with a target, its initial value."""
    target: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    """KL per token, in nats, that β is adapted to reach (arXiv:1909.08593); not set: β is constant."""
    horizon: Annotated[int, Field(ge=1)] = 10_000
    """Number of trajectories over which β adapts to the target."""


class RewardKl(KlPenalty):
    """KL in the reward of every token: r − β·k."""

    estimator: KlEstimator = "k1"
    """Only its value is used; k1 is the unbiased one."""


class LossKl(KlPenalty):
    """KL in the loss: + β·k of every token, under the loss's aggregation."""

    estimator: KlEstimator = "k3"
    """Its gradient is used. On-policy, the gradient of k2 and of every `+` is unbiased, that of k3 is biased (GRPO uses
    it), and that of k1 is noise around 0.
    """
    unbiased: bool = False
    """Multiply k by π_current/π_behavior, including its gradient, which makes the gradient unbiased for stale samples
    too (DeepSeek-V3.2); for k1 and k3.
    """

    @model_validator(mode="after")
    def _unbiased_estimators(self) -> LossKl:
        if self.unbiased and self.estimator not in ("k1", "kl", "k3", "low_var_kl"):
            raise ValueError(
                f"unbiased needs the estimator k1 or k3, not {self.estimator}: the others' expectation is not the KL"
            )
        return self


class KlOptions(BaseModel):
    """The KL penalty towards the reference policy: in the reward, in the loss, in both, or nowhere (neither set)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: RewardKl | None = None
    """Subtracted from every token's reward before the advantages."""
    loss: LossKl | None = None
    """Added to the policy loss."""
