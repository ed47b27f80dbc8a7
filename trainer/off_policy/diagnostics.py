"""Metrics of how far the sampler's policy was from the trainer's and what the correction did, by staleness.

Sums are accumulated over micro-batches and ranks (`CorrectionSums.__add__`, or an all-reduce of its two tensors) before
ratios are taken, so the metrics do not depend on how a batch was split. With z = log π_proximal − log π_behavior, w the
behavior weight, ⟨·⟩ the mean over tokens, and "rows" the mean over rows with a loss token (the golden convention also
counts rows without one, as zeros):

    behavior_proximal_kl               ⟨e^z − 1 − z⟩, k3: estimates KL(behavior ‖ proximal), never negative
    behavior_proximal_kl_k1            ⟨−z⟩, k1: estimates the same KL, unbiased but noisier
    behavior_/proximal_log_perplexity  rows: P = −mean log-prob of the row;  …_perplexity rows: e^P
    log_perplexity_difference          rows: D = P_proximal − P_behavior;  …_abs |D|;  …_max, …_min over rows
    perplexity_ratio                   rows: e^D
    chi_squared_token, …_sequence      ⟨e^2z⟩ − 1;  rows: e^(2·Σ_row z) − 1: the variance of unbounded weights
    effective_sample_size              ⟨w⟩²/⟨w²⟩: 1 if all weights are equal; 0 if all are 0
    behavior_weight_mean … _max        of w before normalisation
    truncated_fraction                 ratio outside the weight's bounds (…_above_, …_below_): of tokens, or of rows
                                       for a row-level weight
    rejected_fraction                  of tokens, by any test;  rejected_row_fraction: rows with no token left;
                                       touched_row_fraction: rows with a rejected token
    nonfinite_row_fraction             rows rejected for a non-finite log-prob; no other metric counts them
    rejection/<test>/…                 of one test: mean (⟨·⟩), max and min of its value, and the fractions it rejects
                                       by itself

With `proximal = "bypassed"`, π_proximal here is π_current. N loss tokens, flat, of B rows; S staleness buckets 0, 1, …
7, ≥ 8; K sums; M maxima.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.trainer.batch.ragged import keep_tokens, row_maxima, row_means, row_sums, spread
from tandem.trainer.off_policy.correct import Corrected
from tandem.trainer.off_policy.options import CorrectionOptions
from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO

MAX_STALENESS = 8
"""Tokens and rows at least this stale share one bucket."""

_LIMIT = 100.0
"""Largest exponent used here. It exceeds the ±20 of weights, so that metrics show what the weights' clamp hides, and
stays finite when squared and summed.
"""

_SUMS = (
    "tokens",
    "k1",
    "k3",
    "chi_squared_token",
    "weight",
    "weight_squared",
    "rejected",
    "rows",
    "behavior_log_perplexity",
    "proximal_log_perplexity",
    "behavior_perplexity",
    "proximal_perplexity",
    "difference",
    "difference_abs",
    "perplexity_ratio",
    "chi_squared_sequence",
    "rejected_rows",
    "touched_rows",
    "nonfinite_rows",
    "weighed",
    "above",
    "below",
)
_MAXIMA = ("weight", "minus_weight", "difference", "minus_difference")
_TEST_SUMS = ("value", "rejected", "touched_rows")
_TEST_MAXIMA = ("greatest", "minus_least")


@dataclass(frozen=True, slots=True)
class CorrectionSums:
    """Sums and maxima by staleness: float64 (S, K) and (S, M). `tests` are the names of the tests, in order."""

    tests: tuple[str, ...]
    sums_SK: Tensor
    maxima_SM: Tensor

    @classmethod
    def zeros(cls, options: CorrectionOptions, device: torch.device | str = "cpu") -> CorrectionSums:
        """The sums of an empty batch."""
        tests = tuple(options.tests)
        shape = MAX_STALENESS + 1
        return cls(
            tests,
            torch.zeros(shape, len(_sum_names(tests)), dtype=torch.float64, device=device),
            torch.full((shape, len(_maximum_names(tests))), -math.inf, dtype=torch.float64, device=device),
        )

    def __add__(self, other: CorrectionSums) -> CorrectionSums:
        assert self.tests == other.tests, (self.tests, other.tests)
        return CorrectionSums(self.tests, self.sums_SK + other.sums_SK, torch.maximum(self.maxima_SM, other.maxima_SM))

    def figures(self) -> dict[str, float]:
        """Every metric of the batch, and `staleness_<s>/<metric>` for every staleness that occurs. Synchronises the
        device.

        Always finite. For a batch without (finite) tokens every metric is 0, except the effective sample size and the
        perplexities, which are 1.
        """
        everything = _figures(self.tests, self.sums_SK.sum(0).tolist(), self.maxima_SM.amax(0).tolist())
        del everything["num_loss_tokens"], everything["num_rows"]  # already among the batch's metrics
        for staleness, (sums, maxima) in enumerate(zip(self.sums_SK.tolist(), self.maxima_SM.tolist(), strict=True)):
            if any(sums):
                name = f"staleness_{staleness}" + ("_plus" if staleness == MAX_STALENESS else "")
                part = _figures(self.tests, sums, maxima)
                everything.update({f"{name}/{figure}": value for figure, value in part.items()})
        return everything


def correction_sums(
    corrected: Corrected,
    proximal_logprobs_N: Tensor,
    behavior_logprobs_N: Tensor,
    lengths_B: Tensor,
    staleness_N: Tensor,
    options: CorrectionOptions,
) -> CorrectionSums:
    """The sums of a micro-batch or a batch, from the arguments and the result of `correct`.

    `staleness_N` (integers) is the version at the batch's start minus the version that sampled the token; negative
    values count as 0. A row's staleness is the largest of its tokens.
    """
    assert staleness_N.shape == corrected.keep_N.shape, (staleness_N.shape, corrected.keep_N.shape)
    log_ratio_N = corrected.log_ratio_N.double()
    buckets = _Buckets(corrected.finite_N, lengths_B, staleness_N)
    sums = {
        **_token_sums(buckets, corrected, log_ratio_N),
        **_row_sums(buckets, corrected, proximal_logprobs_N, behavior_logprobs_N, log_ratio_N, lengths_B),
        **_bound_sums(buckets, corrected, lengths_B, options),
    }
    difference_B = _row_difference(log_ratio_N, lengths_B)
    maxima = {
        "weight": buckets.token_maxima(corrected.bounded_N),
        "minus_weight": buckets.token_maxima(-corrected.bounded_N),
        "difference": buckets.row_maxima(difference_B),
        "minus_difference": buckets.row_maxima(-difference_B),
    }
    for name, verdict in corrected.verdicts.items():
        rejected_N = ~verdict.keep_N
        greatest_N, least_N = (
            value if options.tests[name].level == "token" else spread(value, lengths_B)
            for value in (verdict.greatest, verdict.least)
        )
        sums[f"{name}/value"] = buckets.tokens(greatest_N)
        sums[f"{name}/rejected"] = buckets.tokens(rejected_N)
        sums[f"{name}/touched_rows"] = buckets.rows(row_sums(rejected_N.double(), lengths_B) > 0)
        maxima[f"{name}/greatest"] = buckets.token_maxima(greatest_N)
        maxima[f"{name}/minus_least"] = buckets.token_maxima(-least_N)
    tests = tuple(corrected.verdicts)
    return CorrectionSums(
        tests,
        torch.stack([sums[name] for name in _sum_names(tests)], 1),
        torch.stack([maxima[name] for name in _maximum_names(tests)], 1),
    )


class _Buckets:
    """Adds up values by staleness. Non-finite rows and rows without tokens go to an extra bucket that is discarded."""

    def __init__(self, finite_N: Tensor, lengths_B: Tensor, staleness_N: Tensor) -> None:
        capped_N = staleness_N.clamp(0, MAX_STALENESS)
        self._count = MAX_STALENESS + 1
        self._token_N = torch.where(finite_N, capped_N, self._count).long()
        oldest_B = row_maxima(capped_N.double(), lengths_B)
        filled_B = lengths_B > 0
        self._any_B = torch.where(filled_B, oldest_B, float(self._count)).long()
        finite_B = row_sums((~finite_N).double(), lengths_B) == 0
        self._row_B = torch.where(finite_B, self._any_B, self._count)

    def tokens(self, values_N: Tensor) -> Tensor:
        return self._add(self._token_N, values_N)

    def rows(self, values_B: Tensor) -> Tensor:
        return self._add(self._row_B, values_B)

    def all_rows(self, values_B: Tensor) -> Tensor:
        """Includes non-finite rows."""
        return self._add(self._any_B, values_B)

    def token_maxima(self, values_N: Tensor) -> Tensor:
        return self._maximum(self._token_N, values_N)

    def row_maxima(self, values_B: Tensor) -> Tensor:
        return self._maximum(self._row_B, values_B)

    def _add(self, bucket: Tensor, values: Tensor) -> Tensor:
        total = torch.zeros(self._count + 1, dtype=torch.float64, device=values.device)
        return total.index_add_(0, bucket, values.double())[: self._count]

    def _maximum(self, bucket: Tensor, values: Tensor) -> Tensor:
        total = torch.full((self._count + 1,), -math.inf, dtype=torch.float64, device=values.device)
        return total.scatter_reduce_(0, bucket, values.double(), "amax")[: self._count]


def _token_sums(buckets: _Buckets, corrected: Corrected, log_ratio_N: Tensor) -> dict[str, Tensor]:
    weights_N = corrected.bounded_N.double()
    limited_N = log_ratio_N.clamp(-_LIMIT, _LIMIT)
    return {
        "tokens": buckets.tokens(torch.ones_like(log_ratio_N)),
        "k1": 0.0 - buckets.tokens(log_ratio_N),
        "k3": buckets.tokens(torch.expm1(limited_N).sub_(limited_N)),
        "chi_squared_token": buckets.tokens(limited_N.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).mul_(2).expm1_()),
        "weight": buckets.tokens(weights_N),
        "weight_squared": buckets.tokens(weights_N.square()),
        "rejected": buckets.tokens(~corrected.keep_N),
    }


def _row_sums(
    buckets: _Buckets,
    corrected: Corrected,
    proximal_logprobs_N: Tensor,
    behavior_logprobs_N: Tensor,
    log_ratio_N: Tensor,
    lengths_B: Tensor,
) -> dict[str, Tensor]:
    finite_N = corrected.finite_N

    def log_perplexity(logprobs_N: Tensor) -> Tensor:
        return -row_means(torch.where(finite_N, logprobs_N.detach().double(), 0.0), lengths_B)

    behavior_B, proximal_B = log_perplexity(behavior_logprobs_N), log_perplexity(proximal_logprobs_N)
    difference_B = _row_difference(log_ratio_N, lengths_B)
    sequence_B = row_sums(log_ratio_N, lengths_B).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept_B = keep_tokens(lengths_B, corrected.keep_N)
    nonfinite_B = row_sums((~finite_N).double(), lengths_B) > 0
    return {
        "rows": buckets.rows(torch.ones_like(behavior_B)),
        "behavior_log_perplexity": buckets.rows(behavior_B),
        "proximal_log_perplexity": buckets.rows(proximal_B),
        "behavior_perplexity": buckets.rows(_exp(behavior_B)),
        "proximal_perplexity": buckets.rows(_exp(proximal_B)),
        "difference": buckets.rows(difference_B),
        "difference_abs": buckets.rows(difference_B.abs()),
        "perplexity_ratio": buckets.rows(_exp(difference_B)),
        "chi_squared_sequence": buckets.rows(torch.expm1(2 * sequence_B)),
        "rejected_rows": buckets.rows(kept_B == 0),
        "touched_rows": buckets.rows(kept_B < lengths_B),
        "nonfinite_rows": buckets.all_rows(nonfinite_B),
    }


def _bound_sums(
    buckets: _Buckets, corrected: Corrected, lengths_B: Tensor, options: CorrectionOptions
) -> dict[str, Tensor]:
    weights = options.weights
    above_N, below_N = corrected.ratio_N > weights.high, corrected.ratio_N < weights.low
    if weights.level in ("none", "token"):
        one_N = torch.ones_like(corrected.ratio_N)
        marks = {"weighed": one_N, "above": above_N, "below": below_N}
        return {name: buckets.tokens(mark_N) for name, mark_N in marks.items()}
    # All tokens of a row share the row's ratio.
    above_B, below_B = (row_sums(mark_N.double(), lengths_B) > 0 for mark_N in (above_N, below_N))
    marks = {"weighed": torch.ones_like(lengths_B), "above": above_B, "below": below_B}
    return {name: buckets.rows(mark_B) for name, mark_B in marks.items()}


def _row_difference(log_ratio_N: Tensor, lengths_B: Tensor) -> Tensor:
    return -row_means(log_ratio_N, lengths_B)


def _exp(values: Tensor) -> Tensor:
    return values.clamp(-_LIMIT, _LIMIT).exp()


def _sum_names(tests: Iterable[str]) -> list[str]:
    return [*_SUMS, *(f"{test}/{name}" for test in tests for name in _TEST_SUMS)]


def _maximum_names(tests: Iterable[str]) -> list[str]:
    return [*_MAXIMA, *(f"{test}/{name}" for test in tests for name in _TEST_MAXIMA)]


def _figures(tests: tuple[str, ...], sum_values: list[float], maximum_values: list[float]) -> dict[str, float]:
    sums = dict(zip(_sum_names(tests), sum_values, strict=True))
    maxima = {
        name: value if math.isfinite(value) else 0.0
        for name, value in zip(_maximum_names(tests), maximum_values, strict=True)
    }
    tokens, rows = max(1.0, sums["tokens"]), max(1.0, sums["rows"])
    neutral = 0.0 if sums["rows"] else 1.0  # neutral value of the ratios without rows
    weighed = max(1.0, sums["weighed"])
    mean, squared = sums["weight"] / tokens, sums["weight_squared"] / tokens
    above, below = sums["above"] / weighed, sums["below"] / weighed
    return {
        "num_loss_tokens": sums["tokens"],
        "num_rows": sums["rows"],
        "behavior_proximal_kl": sums["k3"] / tokens,
        "behavior_proximal_kl_k1": sums["k1"] / tokens,
        "behavior_log_perplexity": sums["behavior_log_perplexity"] / rows,
        "proximal_log_perplexity": sums["proximal_log_perplexity"] / rows,
        "behavior_perplexity": sums["behavior_perplexity"] / rows + neutral,
        "proximal_perplexity": sums["proximal_perplexity"] / rows + neutral,
        "log_perplexity_difference": sums["difference"] / rows,
        "log_perplexity_difference_abs": sums["difference_abs"] / rows,
        "log_perplexity_difference_max": maxima["difference"],
        "log_perplexity_difference_min": 0.0 - maxima["minus_difference"],
        "perplexity_ratio": sums["perplexity_ratio"] / rows + neutral,
        "chi_squared_token": sums["chi_squared_token"] / tokens,
        "chi_squared_sequence": sums["chi_squared_sequence"] / rows,
        "effective_sample_size": mean**2 / squared if squared else neutral,
        "behavior_weight_mean": mean,
        "behavior_weight_std": math.sqrt(max(0.0, squared - mean**2)),
        "behavior_weight_min": 0.0 - maxima["minus_weight"],
        "behavior_weight_max": maxima["weight"],
        "truncated_fraction": above + below,
        "truncated_above_fraction": above,
        "truncated_below_fraction": below,
        "rejected_fraction": sums["rejected"] / tokens,
        "rejected_row_fraction": sums["rejected_rows"] / rows,
        "touched_row_fraction": sums["touched_rows"] / rows,
        "nonfinite_row_fraction": sums["nonfinite_rows"] / max(1.0, sums["rows"] + sums["nonfinite_rows"]),
        **dict(_test_figures(tests, sums, maxima, tokens, rows)),
    }


def _test_figures(
    tests: tuple[str, ...], sums: dict[str, float], maxima: dict[str, float], tokens: float, rows: float
) -> Iterator[tuple[str, float]]:
    for test in tests:
        yield f"rejection/{test}/mean", sums[f"{test}/value"] / tokens
        yield f"rejection/{test}/max", maxima[f"{test}/greatest"]
        yield f"rejection/{test}/min", 0.0 - maxima[f"{test}/minus_least"]
        yield f"rejection/{test}/rejected_fraction", sums[f"{test}/rejected"] / tokens
        yield f"rejection/{test}/touched_row_fraction", sums[f"{test}/touched_rows"] / rows
