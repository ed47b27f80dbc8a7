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
    behavior_weight_share_<k>          share of tokens with w in bin k of WEIGHT_EDGES, from 0
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.trainer.batch.ragged import keep_tokens, row_maxima, row_means, row_sums, spread
from tandem.trainer.off_policy.correct import Corrected, correct
from tandem.trainer.off_policy.options import WEIGHT_EDGES, CorrectionOptions
from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO

MAX_STALENESS = 8
"""Tokens and rows at least this stale share one bucket."""

_LIMIT = 100.0
"""Largest exponent used here. It exceeds the ±20 of weights, so that metrics show what the weights' clamp hides, and
stays finite when squared and summed.
"""


@dataclass(frozen=True, slots=True)
class CorrectionSums:
    """Sums and maxima by staleness: float64 (S, K) and (S, M).

    `tokens`, `rows` and `nonfinite_rows` are counts; `tokens/<metric>` and `rows/<metric>` are sums whose mean over
    tokens or rows is the metric. Maxima named `…min` are of the negated value.
    """

    sum_names: tuple[str, ...]
    maximum_names: tuple[str, ...]
    sums_SK: Tensor
    maxima_SM: Tensor

    @classmethod
    def zeros(cls, options: CorrectionOptions) -> CorrectionSums:
        """The sums of an empty batch, on the CPU."""
        none_N, none_B = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
        corrected = correct(none_N, none_N, none_B, options, advantages_N=none_N)
        return correction_sums(corrected, none_N, none_N, none_B, none_B, options)

    def to(self, device: torch.device) -> CorrectionSums:
        return replace(self, sums_SK=self.sums_SK.to(device), maxima_SM=self.maxima_SM.to(device))

    def __add__(self, other: CorrectionSums) -> CorrectionSums:
        assert self.sum_names == other.sum_names, (self.sum_names, other.sum_names)
        maxima_SM = torch.maximum(self.maxima_SM, other.maxima_SM)
        return replace(self, sums_SK=self.sums_SK + other.sums_SK, maxima_SM=maxima_SM)

    def figures(self) -> dict[str, float]:
        """Every metric of the batch, and `staleness_<s>/<metric>` for every staleness that occurs. Synchronises the
        device.

        Always finite. For a batch without (finite) tokens every metric is 0, except the effective sample size and the
        perplexities, which are 1.
        """
        everything = self._figures(self.sums_SK.sum(0).tolist(), self.maxima_SM.amax(0).tolist())
        del everything["num_loss_tokens"], everything["num_rows"]  # already among the batch's metrics
        for staleness, (sums, maxima) in enumerate(zip(self.sums_SK.tolist(), self.maxima_SM.tolist(), strict=True)):
            if any(sums):
                name = f"staleness_{staleness}" + ("_plus" if staleness == MAX_STALENESS else "")
                part = self._figures(sums, maxima)
                everything.update({f"{name}/{figure}": value for figure, value in part.items()})
        return everything

    def _figures(self, sums_K: Sequence[float], maxima_M: Sequence[float]) -> dict[str, float]:
        sums = dict(zip(self.sum_names, sums_K, strict=True))
        figures = {"num_loss_tokens": sums["tokens"], "num_rows": sums["rows"]}
        for path, total in sums.items():
            over, _, metric = path.partition("/")
            if metric:
                figures[metric] = total / max(1.0, sums[over])
        for name, value in zip(self.maximum_names, maxima_M, strict=True):
            value = value if math.isfinite(value) else 0.0
            figures[name] = 0.0 - value if name.endswith("min") else value
        neutral = 0.0 if sums["rows"] else 1.0  # neutral value of the ratios without rows
        for name in ("behavior_perplexity", "proximal_perplexity", "perplexity_ratio"):
            figures[name] += neutral
        mean, squared = figures["behavior_weight_mean"], figures.pop("behavior_weight_squared")
        nonfinite = sums["nonfinite_rows"]
        return figures | {
            "effective_sample_size": mean**2 / squared if squared else neutral,
            "behavior_weight_std": math.sqrt(max(0.0, squared - mean**2)),
            "truncated_fraction": figures["truncated_above_fraction"] + figures["truncated_below_fraction"],
            "nonfinite_row_fraction": nonfinite / max(1.0, sums["rows"] + nonfinite),
        }


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
    buckets = _Buckets(corrected.finite_N, lengths_B, staleness_N)
    log_ratio_N = corrected.log_ratio_N.double()
    difference_B = -row_means(log_ratio_N, lengths_B)
    buckets.add_tokens(_token_values(corrected, log_ratio_N))
    buckets.add_histogram("behavior_weight_share_", corrected.bounded_N, WEIGHT_EDGES)
    buckets.add_rows(_row_values(corrected, proximal_logprobs_N, behavior_logprobs_N, log_ratio_N, lengths_B))
    weights = options.weights
    for side, outside_N in (("above", corrected.ratio_N > weights.high), ("below", corrected.ratio_N < weights.low)):
        if weights.level in ("none", "token"):
            buckets.add_tokens({f"truncated_{side}_fraction": outside_N})
        else:  # all tokens of a row share the row's ratio
            buckets.add_rows({f"truncated_{side}_fraction": row_sums(outside_N.double(), lengths_B) > 0})
    buckets.add_extremes("behavior_weight_", corrected.bounded_N, corrected.bounded_N)
    buckets.add_extremes("log_perplexity_difference_", difference_B, difference_B, of_rows=True)
    for name, verdict in corrected.verdicts.items():
        rejected_N = ~verdict.keep_N
        greatest_N, least_N = (
            value if options.tests[name].level == "token" else spread(value, lengths_B)
            for value in (verdict.greatest, verdict.least)
        )
        test = f"rejection/{name}/"
        buckets.add_tokens({f"{test}mean": greatest_N, f"{test}rejected_fraction": rejected_N})
        buckets.add_rows({f"{test}touched_row_fraction": row_sums(rejected_N.double(), lengths_B) > 0})
        buckets.add_extremes(test, greatest_N, least_N)
    sums, maxima = buckets.sums, buckets.maxima
    return CorrectionSums(
        tuple(sums), tuple(maxima), torch.stack([*sums.values()], 1), torch.stack([*maxima.values()], 1)
    )


class _Buckets:
    """Sums and maxima by staleness, each (S,). Non-finite rows and rows without tokens go to an extra bucket that is
    discarded.
    """

    def __init__(self, finite_N: Tensor, lengths_B: Tensor, staleness_N: Tensor) -> None:
        capped_N = staleness_N.clamp(0, MAX_STALENESS)
        self._token_N = torch.where(finite_N, capped_N, MAX_STALENESS + 1).long()
        oldest_B = row_maxima(capped_N.double(), lengths_B)
        any_B = torch.where(lengths_B > 0, oldest_B, MAX_STALENESS + 1.0).long()
        nonfinite_B = row_sums((~finite_N).double(), lengths_B) > 0
        self._row_B = torch.where(nonfinite_B, MAX_STALENESS + 1, any_B)
        self.sums = {
            "tokens": _sums(self._token_N, torch.ones_like(self._token_N)),
            "rows": _sums(self._row_B, torch.ones_like(lengths_B)),
            "nonfinite_rows": _sums(any_B, nonfinite_B),
        }
        self.maxima: dict[str, Tensor] = {}

    def add_tokens(self, values: Mapping[str, Tensor]) -> None:
        self.sums |= {f"tokens/{name}": _sums(self._token_N, values_N) for name, values_N in values.items()}

    def add_histogram(self, prefix: str, values_N: Tensor, edges: Sequence[float]) -> None:
        num_bins = len(edges) + 1
        bin_N = torch.bucketize(values_N, torch.tensor(edges, device=values_N.device))
        counts = torch.zeros((MAX_STALENESS + 2) * num_bins, dtype=torch.float64, device=values_N.device)
        counts.index_add_(0, self._token_N * num_bins + bin_N, torch.ones_like(bin_N, dtype=torch.float64))
        for number, counts_S in enumerate(counts.view(-1, num_bins)[:-1].unbind(1)):
            self.sums[f"tokens/{prefix}{number}"] = counts_S

    def add_rows(self, values: Mapping[str, Tensor]) -> None:
        self.sums |= {f"rows/{name}": _sums(self._row_B, values_B) for name, values_B in values.items()}

    def add_extremes(self, prefix: str, greatest: Tensor, least: Tensor, *, of_rows: bool = False) -> None:
        bucket = self._row_B if of_rows else self._token_N
        for name, values in (("max", greatest), ("min", -least)):
            maxima = torch.full((MAX_STALENESS + 2,), -math.inf, dtype=torch.float64, device=values.device)
            self.maxima[prefix + name] = maxima.scatter_reduce_(0, bucket, values.double(), "amax")[:-1]


def _sums(bucket: Tensor, values: Tensor) -> Tensor:
    sums = torch.zeros(MAX_STALENESS + 2, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, bucket, values.double())[:-1]


def _token_values(corrected: Corrected, log_ratio_N: Tensor) -> dict[str, Tensor]:
    weights_N = corrected.bounded_N.double()
    limited_N = log_ratio_N.clamp(-_LIMIT, _LIMIT)
    return {
        "behavior_proximal_kl_k1": 0.0 - log_ratio_N,
        "behavior_proximal_kl": torch.expm1(limited_N).sub_(limited_N),
        "chi_squared_token": limited_N.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).mul_(2).expm1_(),
        "behavior_weight_mean": weights_N,
        "behavior_weight_squared": weights_N.square(),
        "rejected_fraction": ~corrected.keep_N,
    }


def _row_values(
    corrected: Corrected,
    proximal_logprobs_N: Tensor,
    behavior_logprobs_N: Tensor,
    log_ratio_N: Tensor,
    lengths_B: Tensor,
) -> dict[str, Tensor]:
    def log_perplexity(logprobs_N: Tensor) -> Tensor:
        return -row_means(torch.where(corrected.finite_N, logprobs_N.detach().double(), 0.0), lengths_B)

    behavior_B, proximal_B = log_perplexity(behavior_logprobs_N), log_perplexity(proximal_logprobs_N)
    difference_B = -row_means(log_ratio_N, lengths_B)
    sequence_B = row_sums(log_ratio_N, lengths_B).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept_B = keep_tokens(lengths_B, corrected.keep_N)
    return {
        "behavior_log_perplexity": behavior_B,
        "proximal_log_perplexity": proximal_B,
        "behavior_perplexity": _exp(behavior_B),
        "proximal_perplexity": _exp(proximal_B),
        "log_perplexity_difference": difference_B,
        "log_perplexity_difference_abs": difference_B.abs(),
        "perplexity_ratio": _exp(difference_B),
        "chi_squared_sequence": torch.expm1(2 * sequence_B),
        "rejected_row_fraction": kept_B == 0,
        "touched_row_fraction": kept_B < lengths_B,
    }


def _exp(values: Tensor) -> Tensor:
    return values.clamp(-_LIMIT, _LIMIT).exp()
