"""Tokens that clip_cov, kl_cov and m2po choose over the whole batch, and their losses on numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.trainer.policy_losses.covariance import select_clip_cov, select_kl_cov
from tandem.trainer.policy_losses.m2po import select_m2po
from tandem.trainer.policy_losses.options import ClipCovOptions, KlCovOptions, M2poOptions
from tandem.trainer.policy_losses.registry import find_loss
from tests.support.loss_tokens import (
    float64,
    listed_tokens,
    losses_and_gradients,
    make_tokens,
    options_of,
    select,
)

RAGGED = st.lists(st.integers(0, 6), min_size=1, max_size=6)
with_selection = pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "m2po"])


@with_selection
def test_a_loss_with_a_selection_refuses_to_run_without_it(name: str) -> None:
    with pytest.raises(AssertionError, match=f"select_{name}"):
        find_loss(name).function(make_tokens([3], 0), options_of(name))


@with_selection
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_an_empty_batch_has_no_chosen_tokens(name: str, lengths: list[int]) -> None:
    chosen_N = select(make_tokens(lengths, 0), options_of(name)).chosen_N
    assert chosen_N is not None and chosen_N.shape == (0,) and chosen_N.dtype == torch.bool


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_only_kl_cov_chooses_the_token_of_a_batch_of_one(name: str) -> None:
    chosen_N = select(make_tokens([1], 0), options_of(name)).chosen_N
    assert chosen_N is not None and chosen_N.tolist() == [name == "kl_cov"]


def test_clip_cov_values() -> None:
    # ⟨A⟩ = 0 and ⟨ℓ⟩ = −2, so C = (1, −1, −1, 1).
    tokens = listed_tokens([-1.0, -3.0, -1.0, -3.0], advantages=[1.0, 1.0, -1.0, -1.0], weights=[1.0, 2.0, 3.0, 4.0])
    options = ClipCovOptions(fraction=1.0, covariance_low=0.5, covariance_high=2.0)
    losses_N, gradient_N, marks = losses_and_gradients(tokens, options)
    torch.testing.assert_close(losses_N, float64([0.0, -2.0, 3.0, 0.0]))
    torch.testing.assert_close(gradient_N, float64([0.0, -2.0, 3.0, 0.0]))
    assert marks["clipped"].tolist() == marks["chosen"].tolist() == [True, False, False, True]


def test_clip_cov_does_not_choose_tokens_that_ppo_clips() -> None:
    # Ratio 2 with A > 0 is clipped to 1.2, ratio ½ with A < 0 to 0.8; the other two are not.
    up, down = math.log(2.0), -math.log(2.0)
    tokens = listed_tokens(
        [-1.0, -1.0, -3.0, -3.0],
        proximal=[-1.0 - up, -1.0 - down, -3.0 - down, -3.0 - up],
        advantages=[1.0, 1.0, -1.0, -1.0],
    )
    options = ClipCovOptions(fraction=1.0, covariance_low=0.5, covariance_high=2.0)
    losses_N, gradient_N, marks = losses_and_gradients(tokens, options)
    assert marks["chosen"].tolist() == [False, True, False, True]
    torch.testing.assert_close(losses_N, float64([-1.2, 0.0, 0.8, 0.0]))
    assert gradient_N.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert marks["clipped"].all()


@settings(max_examples=40, deadline=None)
@given(lengths=RAGGED, seed=st.integers(0, 99), fraction=st.sampled_from([1e-4, 0.1, 0.5, 1.0]))
def test_clip_cov_draws_its_quota_of_candidates(lengths: list[int], seed: int, fraction: float) -> None:
    tokens = make_tokens(lengths, seed)
    options = ClipCovOptions(fraction=fraction, covariance_low=0.0, covariance_high=9.0)
    everyone = options.model_copy(update={"fraction": 1.0})
    candidates_N = select_clip_cov(tokens, everyone, seed=0)
    chosen_N = select_clip_cov(tokens, options, seed=seed)
    assert not (chosen_N & ~candidates_N).any()
    quota = max(1, int(fraction * sum(lengths)))
    assert int(chosen_N.sum()) == min(quota, int(candidates_N.sum()))
    assert torch.equal(chosen_N, select_clip_cov(tokens, options, seed=seed))


def test_clip_cov_draws_candidates_uniformly() -> None:
    tokens = make_tokens([8, 8, 8], 4)
    options = ClipCovOptions(fraction=1e-4, covariance_low=0.0, covariance_high=9.0)
    candidates_N = select_clip_cov(tokens, options.model_copy(update={"fraction": 1.0}), seed=0)
    counts_N = torch.stack([select_clip_cov(tokens, options, seed=seed) for seed in range(600)]).double().sum(0)
    expected = 600 / int(candidates_N.sum())
    assert int(candidates_N.sum()) >= 4
    assert (counts_N[candidates_N] - expected).abs().max() < 5 * math.sqrt(expected)
    assert counts_N[~candidates_N].sum() == 0


def test_kl_cov_values() -> None:
    # ⟨A⟩ = −½ and ⟨ℓ⟩ = −2¼, so C = 1½·(1¼, −¾, −1¼, 1¾). The last token, whose ratio is e^½, gets the penalty.
    tokens = listed_tokens(
        [-1.0, -3.0, -1.0, -4.0],
        proximal=[-1.0, -3.0, -1.0, -4.5],
        advantages=[1.0, 1.0, -2.0, -2.0],
        weights=[1.0, 2.0, 1.0, 4.0],
    )
    options = KlCovOptions(fraction=0.25, kl_coefficient=0.5)
    losses_N, gradient_N, marks = losses_and_gradients(tokens, options)
    assert marks["chosen"].tolist() == [False, False, False, True]
    last = 2.0 * math.exp(0.5)
    torch.testing.assert_close(losses_N, float64([-1.0, -2.0, 2.0, 4.0 * (last + 0.25)]))
    torch.testing.assert_close(gradient_N, float64([-1.0, -2.0, 2.0, 4.0 * (last + 0.5)]))
    torch.testing.assert_close(marks["abs_log_ratio"], float64([0.0, 0.0, 0.0, 0.5]))


@settings(max_examples=40, deadline=None)
@given(lengths=RAGGED, seed=st.integers(0, 99), fraction=st.sampled_from([1e-4, 0.1, 0.5, 1.0]))
def test_kl_cov_chooses_the_largest_covariances(lengths: list[int], seed: int, fraction: float) -> None:
    tokens = make_tokens(lengths, seed)
    chosen_N = select_kl_cov(tokens, KlCovOptions(fraction=fraction), seed=0)
    total = sum(lengths)
    assert int(chosen_N.sum()) == min(total, max(1, int(fraction * total)))
    pairs = list(zip(tokens.advantages_N.tolist(), tokens.current_logprobs_N.tolist(), strict=True))
    middle = [sum(column) / total for column in zip(*pairs, strict=True)]
    covariances = [(advantage - middle[0]) * (logprob - middle[1]) for advantage, logprob in pairs]
    order = sorted(range(total), key=lambda place: -covariances[place])
    assert sorted(order[: int(chosen_N.sum())]) == torch.nonzero(chosen_N)[:, 0].tolist()


def test_kl_cov_chooses_the_first_of_equal_covariances() -> None:
    tokens = listed_tokens([-1.0] * 6, advantages=[2.0] * 6)
    assert select_kl_cov(tokens, KlCovOptions(fraction=0.5), seed=0).tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize(("name", "choose"), [("clip_cov", select_clip_cov), ("kl_cov", select_kl_cov)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", ["current_logprobs_N", "advantages_N"])
def test_tokens_that_are_not_finite_are_neither_averaged_nor_chosen(
    name: str, choose: Callable[..., Tensor], bad: float, column: str
) -> None:
    options = options_of(name).model_copy(update={"fraction": 0.5})
    tokens = make_tokens([5, 5], 9)
    values_N = getattr(tokens, column).clone()
    values_N[4] = bad
    chosen_N = choose(replace(tokens, **{column: values_N}), options, seed=0)
    left_N = torch.arange(10) != 4
    assert not chosen_N[4]
    expected_N = choose(tokens.kept(left_N), options.model_copy(update={"fraction": 5 / 9}), seed=0)
    assert expected_N.any()
    assert torch.equal(chosen_N[left_N], expected_N)


@with_selection
def test_no_tokens_are_chosen_if_none_are_finite(name: str) -> None:
    tokens = select(listed_tokens([math.nan] * 3, advantages=[1.0, -1.0, 2.0]), options_of(name))
    assert tokens.chosen_N is not None and not tokens.chosen_N.any()


def test_m2po_values() -> None:
    # Log-ratios 0.1, 0.3, 0.5 and −0.4 are in the region. Their squares 0.01, 0.09, 0.25 and 0.16 average 0.1275;
    # without the largest 0.0867, without the two largest 0.05. A token with A > 0 and log-ratio −0.9, one with A < 0
    # and a ratio above 1, and one with A = 0 are outside the region.
    ratios = [0.1, 0.3, 0.5, -0.4, -0.9, 2.0, 3.0]
    advantages = [1.0, 2.0, 1.0, -1.0, 1.0, -1.0, 0.0]
    tokens = listed_tokens(
        [-4.0] * 7, behavior=[-4.0 - ratio for ratio in ratios], advantages=advantages, weights=[9.0] * 7
    )
    for threshold, masked in [(0.13, []), (0.1, [2]), (0.06, [2, 3]), (0.02, [1, 2, 3]), (0.001, [0, 1, 2, 3])]:
        options = M2poOptions(threshold=threshold)
        losses_N, gradient_N, marks = losses_and_gradients(tokens, options)
        assert torch.nonzero(marks["clipped"])[:, 0].tolist() == masked, threshold
        want = [
            0.0 if place in masked else -math.exp(ratio) * advantage
            for place, (ratio, advantage) in enumerate(zip(ratios, advantages, strict=True))
        ]
        torch.testing.assert_close(losses_N, float64(want))
        torch.testing.assert_close(gradient_N, float64(want))


@settings(max_examples=60, deadline=None)
@given(lengths=RAGGED, seed=st.integers(0, 99), threshold=st.sampled_from([1e-4, 0.01, 0.04, 0.2, 5.0]))
def test_m2po_masks_as_few_tokens_as_possible(lengths: list[int], seed: int, threshold: float) -> None:
    tokens = make_tokens(lengths, seed)
    chosen_N = select_m2po(tokens, M2poOptions(threshold=threshold), seed=0)
    log_ratios = (tokens.current_logprobs_N - tokens.behavior_logprobs_N).tolist()
    region = [
        place for place, advantage in enumerate(tokens.advantages_N.tolist()) if advantage * log_ratios[place] > 0
    ]
    kept = sorted(region, key=lambda place: abs(log_ratios[place]))
    while kept and sum(log_ratios[place] ** 2 for place in kept) / len(kept) > threshold:
        kept.pop()
    assert set(torch.nonzero(chosen_N)[:, 0].tolist()) == set(region) - set(kept)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99))
def test_m2po_does_not_depend_on_the_order_of_tokens(seed: int) -> None:
    tokens = make_tokens([6, 5, 9], seed)
    order_N = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
    shuffled = replace(
        tokens,
        current_logprobs_N=tokens.current_logprobs_N[order_N],
        behavior_logprobs_N=tokens.behavior_logprobs_N[order_N],
        advantages_N=tokens.advantages_N[order_N],
    )
    want_N = select_m2po(tokens, M2poOptions(), seed=0)
    assert torch.equal(select_m2po(shuffled, M2poOptions(), seed=0), want_N[order_N])


def test_m2po_treats_equal_log_ratios_alike() -> None:
    tokens = listed_tokens([-4.0] * 4, behavior=[-4.0, -4.125, -4.25, -4.25], advantages=[1.0] * 4)
    # The squares are 1/64, 1/16 and 1/16. Masking one of the last two would meet 0.04, but both are masked. The first
    # token's ratio is 1, which is outside the region.
    assert select_m2po(tokens, M2poOptions(threshold=0.04), seed=0).tolist() == [False, False, True, True]
    assert not select_m2po(tokens, M2poOptions(threshold=3 / 64), seed=0).any()


def test_m2po_masks_an_infinite_log_ratio_first() -> None:
    tokens = listed_tokens([-math.inf, -1.1, math.nan], behavior=[-1.0, -1.0, -1.0], advantages=[-1.0, -1.0, 1.0])
    assert select_m2po(tokens, M2poOptions(), seed=0).tolist() == [True, False, False]
