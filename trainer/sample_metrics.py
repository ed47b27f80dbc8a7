"""Metrics of several samples a prompt, with confidence intervals over the prompts. Pure functions; loads no torch.

One value a prompt, then the mean over prompts. Every value of "k of n samples" is the exact mean over all choices of k
of the n samples of a prompt, so nothing here draws random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

_NORMAL_95 = 1.959963984540054
"""97.5th percentile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class PromptSamples:
    """The scored samples of one prompt: one entry a sample in each field."""

    rewards: Sequence[float]
    correct: Sequence[bool]
    answers: Sequence[str | None]
    """What each sample votes for in `maj@k`; None: nothing."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over prompts with its 95 % confidence interval, which is `(value, value)` for one prompt."""

    value: float
    low: float
    high: float
    num_prompts: int


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that k of the samples, drawn without replacement, hold a correct one: 1 − C(n − c, k)/C(n, k), the
    unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, equation 1). Needs 1 ≤ k ≤ n.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / _choices(num_samples, k)


def pass_hat_k(num_samples: int, num_correct: int, k: int) -> float:
    """pass^k, the probability that all of k samples are correct: C(c, k)/C(n, k) (tau-bench, arXiv:2406.12045). Needs
    1 ≤ k ≤ n.
    """
    return math.comb(num_correct, k) / _choices(num_samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Mean of the highest of k rewards over all choices of k. The i-th smallest of the n rewards is the highest of
    C(i − 1, k − 1) choices. With rewards of 0 and 1 this is `pass_at_k`. Needs 1 ≤ k ≤ n.
    """
    total = _choices(len(rewards), k)
    return math.fsum(math.comb(below, k - 1) / total * reward for below, reward in enumerate(sorted(rewards)))


def worst_at_k(rewards: Sequence[float], k: int) -> float:
    """Mean of the lowest of k rewards over all choices of k. With rewards of 0 and 1 this is `pass_hat_k`."""
    return -best_at_k([-reward for reward in rewards], k)


def majority_at_n(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Whether the answer with the most votes is correct (self-consistency, arXiv:2203.11171): the mean correctness of
    the samples that gave it. Of answers with equally many votes each counts the same. 0 if no sample votes.
    """
    votes: dict[str, list[bool]] = {}
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(is_correct)
    most = max(map(len, votes.values()), default=0)
    winners = [fmean(verdicts) for verdicts in votes.values() if len(verdicts) == most]
    return fmean(winners) if winners else 0.0


def mean_over_prompts(values: Sequence[float], bounds: tuple[float, float] = (-math.inf, math.inf)) -> Mean:
    """The mean of at least one value a prompt. Its interval is that of the central limit theorem, mean ± 1.96 · s/√P
    (Miller 2024, arXiv:2411.00640, section 2), cut to the bounds of the values. The samples of a prompt depend on one
    another, so prompts, not samples, are counted.
    """
    mean = fmean(values)
    margin = _NORMAL_95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Mean(mean, max(mean - margin, bounds[0]), min(mean + margin, bounds[1]), len(values))


def sizes_of_choices(num_samples: int) -> list[int]:
    """The k for which metrics are computed: the powers of two below n, and n."""
    return [*(1 << power for power in range((num_samples - 1).bit_length())), num_samples]


def sample_metrics(prompts: Sequence[PromptSamples], num_samples: int) -> dict[str, Mean]:
    """The metrics of prompts of which n = `num_samples` samples were asked for.

    `mean@n` (share of correct samples), `mean_reward`, `pass@k`, and for k > 1 `pass^k`, `maj@n`, and `best@k` and
    `worst@k` of the rewards. A prompt of which fewer than k samples are scored is left out of the metrics of k, and one
    without a scored sample out of all. A metric without any prompt is absent.
    """
    rate = (0.0, 1.0)
    metrics = {
        f"mean@{num_samples}": _averaged(prompts, 1, lambda one: fmean(one.correct), rate),
        "mean_reward": _averaged(prompts, 1, lambda one: fmean(one.rewards)),
    }
    for k in sizes_of_choices(num_samples):
        metrics |= _metrics_of(prompts, k, rate)
    if num_samples > 1:
        metrics[f"maj@{num_samples}"] = _averaged(
            prompts, num_samples, lambda one: majority_at_n(one.answers, one.correct), rate
        )
    return {name: mean for name, mean in metrics.items() if mean is not None}


def metric_names(num_samples: int) -> list[str]:
    """The names of all metrics of `num_samples` samples a prompt."""
    one = PromptSamples([0.0] * num_samples, [False] * num_samples, [None] * num_samples)
    return list(sample_metrics([one], num_samples))


def _metrics_of(prompts: Sequence[PromptSamples], k: int, rate: tuple[float, float]) -> Mapping[str, Mean | None]:
    metrics = {f"pass@{k}": _averaged(prompts, k, lambda one: pass_at_k(len(one.correct), sum(one.correct), k), rate)}
    if k > 1:
        metrics |= {
            f"pass^{k}": _averaged(prompts, k, lambda one: pass_hat_k(len(one.correct), sum(one.correct), k), rate),
            f"best@{k}": _averaged(prompts, k, lambda one: best_at_k(one.rewards, k)),
            f"worst@{k}": _averaged(prompts, k, lambda one: worst_at_k(one.rewards, k)),
        }
    return metrics


def _averaged(
    prompts: Sequence[PromptSamples],
    at_least: int,
    value: Callable[[PromptSamples], float],
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Mean | None:
    values = [value(one) for one in prompts if len(one.correct) >= at_least]
    return mean_over_prompts(values, bounds) if values else None


def _choices(num_samples: int, k: int) -> int:
    assert 1 <= k <= num_samples, f"{k} of {num_samples} samples cannot be chosen"
    return math.comb(num_samples, k)
