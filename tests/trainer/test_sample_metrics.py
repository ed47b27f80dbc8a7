"""pass@k, pass^k, best@k, worst@k and maj@n against values computed by hand and against every choice of k samples."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.trainer.sample_metrics import (
    PromptSamples,
    best_at_k,
    majority_at_n,
    mean_over_prompts,
    pass_at_k,
    pass_hat_k,
    sample_metrics,
    sizes_of_choices,
    worst_at_k,
)

VERDICTS = st.lists(st.booleans(), min_size=1, max_size=8)
REWARDS = st.lists(st.floats(-4.0, 4.0), min_size=1, max_size=8)


def test_pass_at_k_and_pass_hat_k_have_the_values_of_their_formulas() -> None:
    # 10 samples, 3 correct: C(7, 5)/C(10, 5) = 21/252 and C(3, 2)/C(10, 2) = 3/45.
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert pass_hat_k(10, 3, 2) == pytest.approx(3 / 45)
    assert (pass_at_k(4, 0, 4), pass_at_k(4, 1, 4), pass_hat_k(4, 3, 4), pass_hat_k(4, 4, 4)) == (0.0, 1.0, 0.0, 1.0)
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5), "numbers of choices far beyond a float"


def test_best_and_worst_have_the_values_of_all_pairs() -> None:
    # Pairs of 1, 2, 4: the highest are 2, 4, 4, the lowest 1, 1, 2.
    assert best_at_k([4.0, 1.0, 2.0], 2) == pytest.approx(10 / 3)
    assert worst_at_k([4.0, 1.0, 2.0], 2) == pytest.approx(4 / 3)


@given(VERDICTS, st.data())
def test_the_estimators_are_the_means_over_all_choices_of_k_samples(verdicts: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(verdicts)))
    chosen = list(combinations(verdicts, k))
    n, c = len(verdicts), sum(verdicts)
    assert pass_at_k(n, c, k) == pytest.approx(fmean(map(any, chosen)))
    assert pass_hat_k(n, c, k) == pytest.approx(fmean(map(all, chosen)))
    assert best_at_k(verdicts, k) == pytest.approx(pass_at_k(n, c, k))
    assert worst_at_k(verdicts, k) == pytest.approx(pass_hat_k(n, c, k))


@given(REWARDS)
def test_best_grows_and_worst_falls_with_k_from_the_mean_to_the_extremes(rewards: list[float]) -> None:
    best = [best_at_k(rewards, k) for k in range(1, len(rewards) + 1)]
    worst = [worst_at_k(rewards, k) for k in range(1, len(rewards) + 1)]
    assert best[0] == pytest.approx(fmean(rewards), abs=1e-12) and worst[0] == pytest.approx(fmean(rewards), abs=1e-12)
    assert best[-1] == max(rewards) and worst[-1] == min(rewards)
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(best))
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(worst))
    for k in range(1, len(rewards) + 1):
        assert best[k - 1] == pytest.approx(fmean(map(max, combinations(rewards, k))), abs=1e-12)


def test_the_answer_with_the_most_votes_decides() -> None:
    assert majority_at_n(["7", "7", "8"], [True, True, False]) == 1.0
    assert majority_at_n(["7", "8", "8"], [True, False, False]) == 0.0
    assert majority_at_n(["7", "8", "8", "7", "9"], [True, False, False, True, True]) == 0.5, "a tie of two answers"
    assert majority_at_n([None, None, "7"], [False, False, True]) == 1.0, "a sample without an answer does not vote"
    assert majority_at_n([None, None], [False, False]) == 0.0
    assert majority_at_n(["7", "7"], [True, False]) == 0.5, "the scorer says both of one answer"


@given(st.lists(st.tuples(st.sampled_from(["1", "2", "3", None]), st.booleans()), min_size=1, max_size=8), st.randoms())
def test_the_order_of_the_votes_does_not_matter(votes: list[tuple[str | None, bool]], random: object) -> None:
    shuffled = list(votes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    one, other = (majority_at_n(*map(list, zip(*each, strict=True))) for each in (votes, shuffled))
    assert one == pytest.approx(other) and 0.0 <= one <= 1.0


def test_the_interval_is_that_of_the_normal_distribution_over_prompts() -> None:
    # Values 0, 0, 1, 1: s² = 1/3, so the margin is 1.96 · √(1/3)/2 = 0.5658.
    mean = mean_over_prompts([0.0, 0.0, 1.0, 1.0])
    margin = 1.959963984540054 * math.sqrt(1 / 3) / 2
    assert (mean.value, mean.low, mean.high) == pytest.approx((0.5, 0.5 - margin, 0.5 + margin))
    cut = mean_over_prompts([0.0, 0.0, 1.0, 1.0], (0.0, 1.0))
    assert (cut.low, cut.high) == (0.0, 1.0)
    one = mean_over_prompts([0.25])
    assert (one.value, one.low, one.high, one.num_prompts) == (0.25, 0.25, 0.25, 1)


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=20), st.integers(2, 5))
def test_more_prompts_of_the_same_kind_narrow_the_interval(values: list[float], times: int) -> None:
    few, many = mean_over_prompts(values), mean_over_prompts(values * times)
    assert few.low <= few.value <= few.high and few.value == pytest.approx(many.value)
    assert many.high - many.low <= few.high - few.low + 1e-12


def test_metrics_are_computed_for_powers_of_two_and_for_all_samples() -> None:
    assert [sizes_of_choices(n) for n in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


def test_metrics_of_two_prompts_by_hand() -> None:
    prompts = [
        PromptSamples([1.0, 0.0, 1.0, 0.5], [True, False, True, False], ["4", "5", "4", None]),
        PromptSamples([0.0, 0.0, 0.0, 1.0], [False, False, False, True], ["1", "1", "1", "2"]),
    ]
    found = {name: mean.value for name, mean in sample_metrics(prompts, 4).items()}
    assert found == pytest.approx(
        {
            "mean@4": 3 / 8,
            "mean_reward": 3.5 / 8,
            "pass@1": 3 / 8,
            "pass@2": (5 / 6 + 3 / 6) / 2,
            "pass^2": (1 / 6 + 0) / 2,
            "best@2": ((5 * 1.0 + 0.5) / 6 + 3 / 6) / 2,
            "worst@2": ((1.0 + 2 * 0.5) / 6 + 0) / 2,
            "pass@4": 1.0,
            "pass^4": 0.0,
            "best@4": 1.0,
            "worst@4": 0.0,
            "maj@4": 0.5,
        }
    )


def test_prompts_with_fewer_scored_samples_are_left_out_of_what_needs_more() -> None:
    whole = PromptSamples([1.0, 1.0], [True, True], ["1", "1"])
    half = PromptSamples([0.0], [False], ["2"])
    metrics = sample_metrics([whole, half, PromptSamples([], [], [])], 2)
    assert (metrics["mean@2"].value, metrics["mean@2"].num_prompts) == (0.5, 2)
    assert (metrics["pass@2"].value, metrics["pass@2"].num_prompts) == (1.0, 1)
    assert metrics["maj@2"].num_prompts == 1
    assert sample_metrics([], 1) == {}
    assert set(sample_metrics([whole], 1)) == {"mean@1", "mean_reward", "pass@1"}
