"""Options of the policy losses, with the papers' values as defaults. Imports no torch."""

from __future__ import annotations

from functools import cache
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from tandem.protos.options import Options
from tandem.trainer.named_options import models_by_name


class LossOptions(Options):
    """Base class of the options of a policy loss. A subclass gives `name` its value and names the loss's function."""

    function: ClassVar[str]
    """`module:function` of the loss, which takes `LossTokens` and these options and returns `LossTerms`. It is a string
    so that reading a recipe does not import torch.
    """
    select: ClassVar[str] = ""
    """`module:function` that first chooses tokens over the whole batch of an optimizer step. `select(tokens, options,
    *, seed)` returns a bool for every token, which the loss reads from `LossTokens.chosen_N`. Empty: no selection.
    """
    has_ratio: ClassVar[bool] = True
    """Whether the loss contains an importance ratio. If so, a behavior weight that already is π_current/π_behavior
    would apply it twice.
    """

    name: str
    """Selects the loss."""

    @property
    def counts_empty_rows(self) -> bool:
        """Whether `seq-` aggregations also divide by trajectories without a kept token."""
        return False


class ClippedSurrogateOptions(LossOptions):
    """PPO's loss. Plain PPO: clip_low = clip_high and dual_clip = 0. DAPO's clip-higher: clip_high 0.28."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.clipped_surrogate:clipped_surrogate"
    name: Literal["clipped_surrogate"] = "clipped_surrogate"
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """Lower clip of the importance ratio (1 − clip_low)."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.2
    """Upper clip of the importance ratio (1 + clip_high)."""
    dual_clip: Annotated[float, Field(ge=0.0)] = 3.0
    """Largest ratio that counts for a token with negative advantage, above 1; 0 disables the dual clip."""

    @field_validator("dual_clip")
    @classmethod
    def _above_one(cls, value: float) -> float:
        if 0.0 < value <= 1.0:
            raise ValueError("must be above 1, or 0 to switch it off")
        return value


class CispoOptions(LossOptions):
    """CISPO's loss."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.clipped_surrogate:cispo"
    name: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Lower clip of the importance ratio (1 − clip_low); 1 means none, as in the paper."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.28
    """Upper clip of the importance ratio (1 + clip_high); the paper does not give its value."""


class GspoOptions(LossOptions):
    """GSPO's loss. The clips apply to the ratio of a whole sequence, which varies far less than a token's."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.sequence_ratio:gspo"
    name: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 3e-4
    """Lower clip of the sequence's importance ratio (1 − clip_low)."""
    clip_high: Annotated[float, Field(ge=0.0)] = 4e-4
    """Upper clip of the sequence's importance ratio (1 + clip_high)."""


class GmpoOptions(LossOptions):
    """GMPO's loss. The clips apply to the logarithm of a token's ratio."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.sequence_ratio:gmpo"
    name: Literal["gmpo"] = "gmpo"
    clip_low: Annotated[float, Field(ge=0.0)] = 0.4
    """Lower clip of the importance ratio (e^−clip_low)."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.4
    """Upper clip of the importance ratio (e^clip_high)."""
    count_empty_rows: bool = False
    """Whether `seq-` aggregations also divide by trajectories without a kept token. With `seq-mean-token-mean` this is
    other trainers' `geo_mean`. The kept trajectories then count less when more are rejected.
    """

    @property
    def counts_empty_rows(self) -> bool:
        return self.count_empty_rows


class SapoOptions(LossOptions):
    """SAPO's loss, a soft gate around a ratio of 1."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.clipped_surrogate:sapo"
    name: Literal["sapo"] = "sapo"
    temperature_positive: Annotated[float, Field(gt=0.0)] = 1.0
    """τ of tokens with positive advantage."""
    temperature_negative: Annotated[float, Field(gt=0.0)] = 1.05
    """τ of the other tokens. If it is larger than `temperature_positive`, their gradient fades faster."""


class ReinforceOptions(LossOptions):
    """The loss of REINFORCE and of GPG."""

    has_ratio: ClassVar[bool] = False
    function: ClassVar[str] = "tandem.trainer.policy_losses.reinforce:reinforce"
    name: Literal["reinforce"] = "reinforce"


class DppoTvOptions(LossOptions):
    """DPPO's loss with total variation as the divergence."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.dppo:dppo_tv"
    name: Literal["dppo_tv"] = "dppo_tv"
    threshold_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.15
    """Largest decrease in probability of a token with negative advantage."""
    threshold_high: Annotated[float, Field(ge=0.0, le=1.0)] = 0.15
    """Largest increase in probability of a token with positive advantage."""
    ratio_cap: Annotated[float, Field(gt=0.0)] = 20.0
    """Larger importance ratios are cut to this value."""


class DppoKlOptions(LossOptions):
    """DPPO's loss with the Kullback–Leibler divergence."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.dppo:dppo_kl"
    name: Literal["dppo_kl"] = "dppo_kl"
    threshold_low: Annotated[float, Field(ge=0.0)] = 0.05
    """Largest divergence up to which the probability of a token with negative advantage may decrease."""
    threshold_high: Annotated[float, Field(ge=0.0)] = 0.05
    """Largest divergence up to which the probability of a token with positive advantage may increase."""
    ratio_cap: Annotated[float, Field(gt=0.0)] = 20.0
    """Larger importance ratios are cut to this value."""


class ClipCovOptions(LossOptions):
    """Clip-Cov (arXiv:2505.22617): PPO's clip, and no gradient for a few tokens of large covariance."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.covariance:clip_cov"
    select: ClassVar[str] = "tandem.trainer.policy_losses.covariance:select_clip_cov"
    name: Literal["clip_cov"] = "clip_cov"
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """Lower clip of the importance ratio (1 − clip_low)."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.2
    """Upper clip of the importance ratio (1 + clip_high)."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-4
    """Largest fraction of the batch's tokens that lose their gradient (at least one token)."""
    covariance_low: float = 1.0
    """Lower bound of a candidate's covariance (exclusive)."""
    covariance_high: float = 5.0
    """Upper bound of a candidate's covariance (exclusive)."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.covariance_low >= self.covariance_high:
            raise ValueError(
                f"covariance_low ({self.covariance_low}) must lie below covariance_high ({self.covariance_high})"
            )
        return self


class KlCovOptions(LossOptions):
    """KL-Cov (arXiv:2505.22617): a KL penalty on the few tokens of largest covariance, no clipping."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.covariance:kl_cov"
    select: ClassVar[str] = "tandem.trainer.policy_losses.covariance:select_kl_cov"
    name: Literal["kl_cov"] = "kl_cov"
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-3
    """Fraction of the batch's tokens that carry the penalty (at least one token)."""
    kl_coefficient: Annotated[float, Field(ge=0.0)] = 1.0
    """Weight of the penalty |log π_current − log π_proximal|."""


class DroOptions(LossOptions):
    """Direct reward optimisation with a given baseline (arXiv:2405.19107, Kimi k1.5 arXiv:2501.12599)."""

    has_ratio: ClassVar[bool] = False
    function: ClassVar[str] = "tandem.trainer.policy_losses.reinforce:dro"
    name: Literal["dro"] = "dro"
    beta: Annotated[float, Field(ge=0.0)] = 0.1
    """Weight of the squared log-ratio; 0 gives REINFORCE."""


class ToprOptions(LossOptions):
    """Tapered off-policy REINFORCE (arXiv:2503.14286). Nothing to set."""

    has_ratio: ClassVar[bool] = False
    function: ClassVar[str] = "tandem.trainer.policy_losses.reinforce:topr"
    name: Literal["topr"] = "topr"


class TruncatedImportanceOptions(LossOptions):
    """REINFORCE weighted by the truncated ratio to the sampler, AIPO (LlamaRL arXiv:2505.24034)."""

    has_ratio: ClassVar[bool] = False
    function: ClassVar[str] = "tandem.trainer.policy_losses.reinforce:truncated_importance"
    name: Literal["truncated_importance"] = "truncated_importance"
    cap: Annotated[float, Field(gt=0.0)] = 4.0
    """Larger ratios π_current/π_behavior are cut to this value."""


class M2poOptions(LossOptions):
    """Second-moment trust policy optimisation (arXiv:2510.01161)."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.m2po:m2po"
    select: ClassVar[str] = "tandem.trainer.policy_losses.m2po:select_m2po"
    name: Literal["m2po"] = "m2po"
    threshold: Annotated[float, Field(gt=0.0)] = 0.04
    """Bound on the mean squared log-ratio of the tokens that keep their gradient."""


BUILT_IN = LossOptions.__subclasses__()
"""The classes above; plug-ins that are loaded later are not among them."""

NAMES_ELSEWHERE = {
    "vanilla": "clipped_surrogate",
    "ppo": "clipped_surrogate",
    "ppo_clip": "clipped_surrogate",
    "grpo": "clipped_surrogate",
    "dapo": "clipped_surrogate",
    "geo_mean": "gmpo",
    "gpg": "reinforce",
    "reinforce_plus_plus": "reinforce",
    "dppo": "dppo_tv",
    "aipo": "truncated_importance",
    "kimi": "dro",
}
"""Names of these losses in other trainers and in the papers."""


@cache
def loss_models() -> dict[str, type[LossOptions]]:
    """name → options model of every loss. Raises PluginError if an entry point of `tandem.losses` cannot be used."""
    return models_by_name(BUILT_IN, "tandem.losses", LossOptions)
