"""Options of off-policy correction, for samples drawn from another distribution than the trainer's. Imports no torch.

A ratio is π_proximal/π_behavior, the trainer's probability over the sampler's (π_current/π_behavior with `proximal =
"bypassed"`); z is its logarithm. Bounds always admit an on-policy token (ratio 1, z 0), so fresh tokens are never
truncated or rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tandem.protos.options import Options
from tandem.trainer.off_policy.presets import PRESETS, PresetName

WEIGHT_EDGES = 0.5, 0.8, 0.95, 1.05, 1.25, 2.0
"""Edges of the bins of behavior weights in the metrics, above which the next bin begins."""


class WeightOptions(Options):
    """The behavior weight of every token."""

    level: Literal["none", "token", "sequence", "geometric"] = "token"
    """Which ratio the weight is: the token's, its row's (the product over the row's tokens), or the geometric mean over
    the row; `none` gives every token weight 1.
    """
    low: Annotated[float, Field(ge=0.0)] = 0.0
    """Lower bound of the ratio, at most 1; 0 means none."""
    high: Annotated[float, Field(gt=0.0)] = 2.0
    """Upper bound of the ratio, at least 1 (C in the papers)."""
    outside: Literal["clamp", "zero", "stop"] = "clamp"
    """What happens to a ratio out of bounds. `clamp` moves it to the nearer bound (truncated importance sampling).
    `zero` sets the weight to 0 (IcePop, masked importance sampling). `stop` sets the weight to 0 only if the token has
    moved out of bounds in the direction its advantage pushes (above high with a positive one, below low with a negative
    one); any other ratio is cut to high. The token stays in the denominators in every case.
    """
    normalize: bool = False
    """Whether weights are divided by the batch's mean weight over kept tokens, or over rows with a kept token if the
    level is a row's.
    """

    @model_validator(mode="after")
    def _bounds(self) -> WeightOptions:
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got low = {self.low:g} and high = {self.high:g}")
        if not self.low <= 1.0 <= self.high:
            raise ValueError(
                f"1, the ratio of a fresh token, must lie within low = {self.low:g} and high = {self.high:g}"
            )
        return self


class RejectionOptions(Options):
    """A rejection test. A token that fails it leaves the loss and its denominators."""

    level: Literal["token", "sequence", "geometric", "max"] = "token"
    """What is tested: each token, or a whole row by the sum over its tokens (`sequence`), their mean (`geometric`) or
    its most extreme token (`max`). The row levels keep or reject whole rows.
    """
    measure: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """`ratio` of a row is the product of its tokens' ratios (`sequence`) or their geometric mean (`geometric`). The
    others estimate KL(behavior ‖ proximal) in nats: `k1` −z, `k2` z²/2, `k3` e^z − 1 − z.
    """
    low: float | None = None
    """Smallest value that passes; not available for `k2` and `k3`. At most 1 for `ratio`, at most 0 for `k1`."""
    high: float | None = None
    """Largest value that passes. At least 1 for `ratio`, otherwise at least 0."""
    negative_only: bool = False
    """Whether only tokens with negative advantage can be rejected."""

    @property
    def name(self) -> str:
        """Name of this test in metrics."""
        return f"{self.level}_{self.measure}" + ("_negative" if self.negative_only else "")

    @model_validator(mode="after")
    def _bounds(self) -> RejectionOptions:
        test = f"{self.level} {self.measure}"
        if self.low is None and self.high is None:
            raise ValueError(f"{test} rejects nothing: give low or high")
        if self.measure in ("k2", "k3") and self.low is not None:
            raise ValueError(f"{test} has no low: it is never negative, and 0 is a fresh token")
        if self.measure == "ratio" and self.low is not None and self.low <= 0:
            raise ValueError(f"{test}: low must be above 0, got {self.low:g}; leave it out to set none")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"{test}: low must be below high, got low = {self.low:g} and high = {self.high:g}")
        fresh = 1.0 if self.measure == "ratio" else 0.0
        if (self.low is not None and self.low > fresh) or (self.high is not None and self.high < fresh):
            raise ValueError(f"{test}: {fresh:g}, the value of a fresh token, must lie within the bounds")
        return self


class CorrectionOptions(Options):
    """Off-policy correction. The default is decoupled PPO (arXiv:2505.24298) with token weights that become 0 where
    PPO's clip would stop the gradient.
    """

    preset: PresetName = "token_clip"
    """A named combination of values; keys given explicitly override it."""
    proximal: Literal["recomputed", "loglinear", "bypassed"] = "recomputed"
    """Where proximal log-probs come from. `recomputed`: a forward pass at the batch's start. `loglinear`: interpolation
    by version between the sampler's and the current ones. `bypassed`: the sampler's own (the ratio is then
    π_current/π_behavior).
    """
    weights: WeightOptions = WeightOptions()
    """The behavior weight of every token."""
    rejections: tuple[RejectionOptions, ...] = ()
    """Tests that a token must all pass to be trained."""
    veto: Annotated[float, Field(ge=0.0)] = 0.0
    """A token with a ratio below this rejects its whole row. Less than 1; 0 disables the veto."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        preset = values.get("preset", "token_clip")
        if not isinstance(preset, str) or preset not in PRESETS:
            return values  # the field's own validation reports it
        return _merged(PRESETS[preset], values)

    @field_validator("veto")
    @classmethod
    def _below_one(cls, value: float) -> float:
        if value >= 1.0:
            raise ValueError("must be below 1, the ratio of a fresh token")
        return value

    @model_validator(mode="after")
    def _distinct(self) -> CorrectionOptions:
        names = [rejection.name for rejection in self.rejections]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rejections: {name} is there twice; give both bounds at once")
        return self

    @property
    def tests(self) -> dict[str, RejectionOptions]:
        """Every test by its name, including the veto."""
        tests = {rejection.name: rejection for rejection in self.rejections}
        if self.veto:
            tests["veto"] = RejectionOptions(level="max", measure="ratio", low=self.veto)
        return tests

    @property
    def needs_whole_batch(self) -> bool:
        """Whether weights or the loss's denominators depend on other rows of the batch. If not, each micro-batch can be
        corrected in the pass that trains it.
        """
        return self.weights.normalize or bool(self.tests)

    @property
    def without_advantages(self) -> CorrectionOptions:
        """The correction that can be computed before advantages are known: `stop` becomes a clamp to high, and tests
        limited to negative advantages are dropped.
        """
        weights = self.weights
        if weights.outside == "stop":
            weights = weights.model_copy(update={"outside": "clamp", "low": 0.0})
        rejections = tuple(test for test in self.rejections if not test.negative_only)
        return self.model_copy(update={"weights": weights, "rejections": rejections})

    @property
    def needs_ratio_free_loss(self) -> bool:
        """Whether the weight already is π_current/π_behavior, so a loss with its own ratio would apply it twice."""
        return self.proximal == "bypassed" and self.weights.level != "none"


def _merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Merges `over` into `base`, nested tables recursively."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
