"""What a policy loss can be told, by the loss's name. Defaults are those of the papers. Imports no torch."""

from __future__ import annotations

from functools import cache
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tandem.trainer.named_options import models_by_name


class LossOptions(BaseModel):
    """Base class of the options of a policy loss. A subclass gives `name` its value and names the loss's function."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    function: ClassVar[str]
    """`module:function` of the loss, which takes `LossTokens` and these options and returns `LossTerms`. A path, so
    that reading a recipe does not import torch.
    """
    select: ClassVar[str] = ""
    """`module:function` that first chooses tokens over the whole batch of an optimizer step:
    `select(tokens, options, *, seed)` returns a bool for every token, which the loss finds in `LossTokens.chosen_N`.
    Empty: the loss chooses none.
    """
    has_ratio: ClassVar[bool] = True
    """Whether the loss contains an importance ratio. A behavior weight that is already π_current/π_behavior would count
    it twice.
    """

    name: str
    """Selects the loss."""

    @property
    def counts_empty_rows(self) -> bool:
        """Whether trajectories of which no token is left are in the number that `seq-` aggregations divide by."""
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
    """Ratio beyond which a token with negative advantage no longer counts more, above 1; 0 switches that off."""

    @field_validator("dual_clip")
    @classmethod
    def _above_one(cls, value: float) -> float:
        if 0.0 < value <= 1.0:
            raise ValueError("must be above 1, or 0 to switch it off")
        return value


class CispoOptions(LossOptions):
    """CISPO's loss."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.cispo:cispo"

    name: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Lower clip of the importance ratio (1 − clip_low); 1 sets none, as the paper does."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.28
    """Upper clip of the importance ratio (1 + clip_high); the paper tunes it without giving the value."""


class GspoOptions(LossOptions):
    """GSPO's loss: the clips are of the ratio of a whole sequence, which moves far less than a token's."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.gspo:gspo"

    name: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 3e-4
    """Lower clip of the sequence's importance ratio (1 − clip_low)."""
    clip_high: Annotated[float, Field(ge=0.0)] = 4e-4
    """Upper clip of the sequence's importance ratio (1 + clip_high)."""


class GmpoOptions(LossOptions):
    """GMPO's loss: the clips are of the logarithm of a token's ratio."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.gmpo:gmpo"

    name: Literal["gmpo"] = "gmpo"
    clip_low: Annotated[float, Field(ge=0.0)] = 0.4
    """Lower clip of the importance ratio (e^−clip_low)."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.4
    """Upper clip of the importance ratio (e^clip_high)."""
    count_empty_rows: bool = False
    """Whether `seq-` aggregations also divide by the trajectories of which no token is left: with `seq-mean-token-mean`
    other trainers'
    `geo_mean`. The rest then counts less, the more is rejected.
    """

    @property
    def counts_empty_rows(self) -> bool:
        """As `count_empty_rows` says."""
        return self.count_empty_rows


class SapoOptions(LossOptions):
    """SAPO's loss: how sharply its gate closes around a ratio of 1."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.sapo:sapo"

    name: Literal["sapo"] = "sapo"
    temperature_positive: Annotated[float, Field(gt=0.0)] = 1.0
    """τ of tokens with positive advantage."""
    temperature_negative: Annotated[float, Field(gt=0.0)] = 1.05
    """τ of the others; above the other, their gradient fades faster."""


class ReinforceOptions(LossOptions):
    """REINFORCE's loss; GPG's too."""

    has_ratio: ClassVar[bool] = False
    function: ClassVar[str] = "tandem.trainer.policy_losses.reinforce:reinforce"

    name: Literal["reinforce"] = "reinforce"


class DppoTvOptions(LossOptions):
    """DPPO's loss with total variation as the divergence."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.dppo:dppo_tv"

    name: Literal["dppo_tv"] = "dppo_tv"
    threshold_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.15
    """How far the probability of a token with negative advantage may fall."""
    threshold_high: Annotated[float, Field(ge=0.0, le=1.0)] = 0.15
    """How far the probability of a token with positive advantage may rise."""
    ratio_cap: Annotated[float, Field(gt=0.0)] = 20.0
    """Importance ratios above it are cut to it."""


class DppoKlOptions(LossOptions):
    """DPPO's loss with the Kullback–Leibler divergence."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.dppo:dppo_kl"

    name: Literal["dppo_kl"] = "dppo_kl"
    threshold_low: Annotated[float, Field(ge=0.0)] = 0.05
    """Largest divergence at which the probability of a token with negative advantage may still fall."""
    threshold_high: Annotated[float, Field(ge=0.0)] = 0.05
    """Largest divergence at which the probability of a token with positive advantage may still rise."""
    ratio_cap: Annotated[float, Field(gt=0.0)] = 20.0
    """Importance ratios above it are cut to it."""


class ClipCovOptions(LossOptions):
    """Clip-Cov (arXiv:2505.22617): PPO's clip, and no gradient from a few tokens of large covariance."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.covariance:clip_cov"
    select: ClassVar[str] = "tandem.trainer.policy_losses.covariance:select_clip_cov"

    name: Literal["clip_cov"] = "clip_cov"
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """Lower clip of the importance ratio (1 − clip_low)."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.2
    """Upper clip of the importance ratio (1 + clip_high)."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-4
    """Largest part of the batch's tokens that lose their gradient (one token at least)."""
    covariance_low: float = 1.0
    """Only tokens whose covariance lies above it are candidates."""
    covariance_high: float = 5.0
    """Only tokens whose covariance lies below it are candidates."""

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
    """Part of the batch's tokens that carry the penalty (one token at least)."""
    kl_coefficient: Annotated[float, Field(ge=0.0)] = 1.0
    """Weight of the penalty |log π_current − log π_proximal|."""


class DroOptions(LossOptions):
    """Direct reward optimisation with a given baseline (arXiv:2405.19107, Kimi k1.5 arXiv:2501.12599)."""

    has_ratio: ClassVar[bool] = False
    function: ClassVar[str] = "tandem.trainer.policy_losses.dro:dro"

    name: Literal["dro"] = "dro"
    beta: Annotated[float, Field(ge=0.0)] = 0.1
    """Weight of the squared log-ratio; 0 leaves REINFORCE."""


class ToprOptions(LossOptions):
    """Tapered off-policy REINFORCE (arXiv:2503.14286). Nothing to set."""

    has_ratio: ClassVar[bool] = False
    function: ClassVar[str] = "tandem.trainer.policy_losses.topr:topr"

    name: Literal["topr"] = "topr"


class TruncatedImportanceOptions(LossOptions):
    """REINFORCE weighted by the truncated ratio to the sampler, AIPO (LlamaRL arXiv:2505.24034)."""

    has_ratio: ClassVar[bool] = False
    function: ClassVar[str] = "tandem.trainer.policy_losses.truncated_importance:truncated_importance"

    name: Literal["truncated_importance"] = "truncated_importance"
    cap: Annotated[float, Field(gt=0.0)] = 4.0
    """Ratios π_current/π_behavior above it are cut to it."""


class M2poOptions(LossOptions):
    """Second-moment trust policy optimisation (arXiv:2510.01161)."""

    function: ClassVar[str] = "tandem.trainer.policy_losses.m2po:m2po"
    select: ClassVar[str] = "tandem.trainer.policy_losses.m2po:select_m2po"

    name: Literal["m2po"] = "m2po"
    threshold: Annotated[float, Field(gt=0.0)] = 0.04
    """Bound of the mean squared log-ratio of the tokens that keep their gradient."""


BUILT_IN: tuple[type[LossOptions], ...] = (
    ClippedSurrogateOptions,
    CispoOptions,
    GspoOptions,
    GmpoOptions,
    SapoOptions,
    ReinforceOptions,
    DppoTvOptions,
    DppoKlOptions,
    ClipCovOptions,
    KlCovOptions,
    DroOptions,
    ToprOptions,
    TruncatedImportanceOptions,
    M2poOptions,
)

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
"""What other trainers and the papers call these losses."""


@cache
def loss_models() -> dict[str, type[LossOptions]]:
    """name → options model of every loss: the built-in ones, then those of the entry points `tandem.losses`.

    Raises:
        PluginError: an entry point cannot be used.
    """
    return models_by_name(BUILT_IN, "tandem.losses", LossOptions)


def loss_elsewhere(name: str) -> str | None:
    """The loss that others call `name`, or None."""
    return NAMES_ELSEWHERE.get(name.lower())
