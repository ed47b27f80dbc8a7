"""Properties of every policy loss: independence of micro-batches, row order and ranks; correct gradients; finite
values. Properties of the selections of clip_cov, kl_cov and m2po.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.trainer.aggregation import token_shares
from tandem.trainer.algorithm import Aggregation
from tandem.trainer.batch.ragged import row_means, spread
from tandem.trainer.policy_losses.covariance import select_clip_cov, select_kl_cov
from tandem.trainer.policy_losses.inputs import LossTokens
from tandem.trainer.policy_losses.m2po import select_m2po
from tandem.trainer.policy_losses.options import ClipCovOptions, KlCovOptions, M2poOptions, loss_models
from tests.support.loss_tokens import MODES, every_loss, losses_and_gradients, make_tokens, options_of, run, select

# The gradient of a loss that is a detached factor times log π is that factor, not the derivative of the value.
FACTOR_TIMES_LOGPROB = {"cispo", "dppo_tv", "dppo_kl", "topr", "truncated_importance"}

# On-policy, every loss has REINFORCE's gradient −A·share per token, except:
# - gmpo, which gives every token of a row the row's mean advantage (equal to its own if they are equal over the row);
# - clip_cov, which removes the gradient of the tokens it chooses.
ONLY_WITH_ONE_ADVANTAGE_A_ROW = {"gmpo"}

# The columns each loss reads besides log π_current and the advantages.
READS = {name: {"proximal_logprobs_N", "behavior_weights_N"} for name in loss_models()} | {
    "reinforce": {"behavior_weights_N"},
    "topr": {"behavior_logprobs_N"},
    "truncated_importance": {"behavior_logprobs_N"},
    "m2po": {"behavior_logprobs_N"},
}

COLUMNS = ("proximal_logprobs_N", "behavior_logprobs_N", "advantages_N", "behavior_weights_N")

BY_ROW = {"gspo", "gmpo", "topr"}
"""Losses in which the log-ratios of a row are part of the loss of each of its tokens."""

lengths = st.lists(st.integers(0, 5), min_size=1, max_size=6)
seeds = st.integers(0, 2**31)
modes = st.sampled_from(MODES)


def pick(tokens: LossTokens, rows: list[int]) -> LossTokens:
    """The given rows in the given order."""
    counts = tokens.lengths_B.tolist()

    def of_rows(values_N: Tensor) -> Tensor:
        parts = values_N.split(counts)
        return torch.cat([parts[row] for row in rows]) if rows else values_N[:0]

    picked: dict[str, Any] = {
        field.name: of_rows(value)
        for field in fields(tokens)
        if field.name != "lengths_B" and (value := getattr(tokens, field.name)) is not None
    }
    return LossTokens(**picked, lengths_B=tokens.lengths_B[torch.tensor(rows, dtype=torch.int64)])


def shares_of(tokens: LossTokens, mode: Aggregation, whole: LossTokens | None = None) -> Tensor:
    """Shares of tokens that are part of a `whole` optimizer step, or are the whole step; (N,)."""
    counts_B = (whole or tokens).lengths_B
    shares_B = token_shares(
        tokens.lengths_B,
        mode,
        length_constant=8.0,
        num_tokens=int(counts_B.sum()),
        num_sequences=int((counts_B > 0).sum()),
    )
    return spread(shares_B.to(tokens.advantages_N.dtype), tokens.lengths_B)


@every_loss
@settings(max_examples=30, deadline=None)
@given(
    lengths=lengths, seed=seeds, mode=modes, order=st.randoms(use_true_random=False), cuts=st.lists(st.integers(0, 6))
)
def test_loss_gradient_and_marks_do_not_depend_on_micro_batches_or_row_order(
    name: str, lengths: list[int], seed: int, mode: Aggregation, order: Any, cuts: list[int]
) -> None:
    """Shuffles the rows and splits them at random (also into empty parts). Each part gets only its own rows and the
    totals of the step.
    """
    options = options_of(name)
    tokens = select(make_tokens(lengths, seed), options)
    loss, gradient_N, terms = run(tokens, options, shares_of(tokens, mode))
    rows = list(range(len(lengths)))
    order.shuffle(rows)
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    parts = [pick(tokens, rows[start:end]) for start, end in pairwise(edges)]
    ran = [run(part, options, shares_of(part, mode, whole=tokens)) for part in parts]
    shuffled = pick(replace(tokens, advantages_N=gradient_N), rows).advantages_N
    torch.testing.assert_close(sum(loss for loss, _, _ in ran), loss)
    torch.testing.assert_close(torch.cat([gradient_N for _, gradient_N, _ in ran]), shuffled)
    for mark, values_N in terms.marks.items():
        shuffled = pick(replace(tokens, advantages_N=values_N), rows).advantages_N
        torch.testing.assert_close(torch.cat([terms.marks[mark] for _, _, terms in ran]), shuffled)


@every_loss
@settings(max_examples=15, deadline=None)
@given(lengths=lengths, seed=seeds, mode=modes)
@example(lengths=[0, 5, 5, 5], seed=5123, mode="token-mean")  # two of KL-Cov's tokens have ratio 1
def test_the_gradient_agrees_with_finite_differences(
    name: str, lengths: list[int], seed: int, mode: Aggregation
) -> None:
    """Skips tokens at a kink of the loss."""
    options = options_of(name)
    tokens = make_tokens(lengths, seed)
    # GSPO's gradient is the derivative of its value only where advantages and weights are equal over a row.
    tokens = replace(
        tokens,
        advantages_N=spread(row_means(tokens.advantages_N, tokens.lengths_B), tokens.lengths_B),
        behavior_weights_N=spread(row_means(tokens.behavior_weights_N, tokens.lengths_B), tokens.lengths_B),
    )
    tokens = select(tokens, options)
    shares_N = shares_of(tokens, mode)
    _, gradient_N, terms = run(tokens, options, shares_N)
    if name in FACTOR_TIMES_LOGPROB:
        torch.testing.assert_close(gradient_N, shares_N * terms.losses_N.detach() / tokens.current_logprobs_N)
        return
    step = 1e-5
    smooth_N = ~near_kinks(tokens, options, step)
    for place in smooth_N.nonzero()[:, 0].tolist():
        ahead, behind = (_loss_moved(tokens, options, shares_N, place, by) for by in (step, -step))
        assert float(gradient_N[place]) == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-4, abs=1e-7)


def near_kinks(tokens: LossTokens, options: Any, step: float) -> Tensor:
    """Whether each token's loss has a kink at most `step` away, by the papers' formulas: at the bounds of a clip (of a
    row's mean log-ratio in GSPO), and at ratio 1 in the penalty |log ρ| of a token that KL-Cov chose.
    """
    log_ratio_N, bounds = tokens.log_ratio_N, []
    match options.name:
        case "clipped_surrogate":
            bounds = [1 - options.clip_low, 1 + options.clip_high, options.dual_clip]
        case "clip_cov" | "gspo":
            bounds = [1 - options.clip_low, 1 + options.clip_high]
        case "gmpo":
            bounds = [math.exp(-options.clip_low), math.exp(options.clip_high)]
        case "kl_cov":
            bounds = [1.0]
            assert tokens.chosen_N is not None
            log_ratio_N = torch.where(tokens.chosen_N, log_ratio_N, torch.inf)
    if options.name == "gspo":
        log_ratio_N = spread(row_means(log_ratio_N, tokens.lengths_B), tokens.lengths_B)
    near_N = torch.zeros_like(log_ratio_N, dtype=torch.bool)
    for bound in bounds:
        near_N |= (log_ratio_N - math.log(bound)).abs() <= step
    return near_N


def _loss_moved(tokens: LossTokens, options: Any, shares_N: Tensor, place: int, by: float) -> Tensor:
    current_N = tokens.current_logprobs_N.clone()
    current_N[place] += by
    return run(replace(tokens, current_logprobs_N=current_N), options, shares_N)[0]


@every_loss
@settings(max_examples=15, deadline=None)
@given(lengths=lengths, seed=seeds, mode=modes)
def test_the_on_policy_gradient_is_that_of_reinforce(
    name: str, lengths: list[int], seed: int, mode: Aggregation
) -> None:
    """With behavior = proximal = current and weights of 1, the gradient is −A·share and nothing is clipped."""
    options = options_of(name)
    tokens = make_tokens(lengths, seed)
    advantages_N = tokens.advantages_N
    if name in ONLY_WITH_ONE_ADVANTAGE_A_ROW:
        advantages_N = spread(row_means(advantages_N, tokens.lengths_B), tokens.lengths_B)
    current_N = tokens.current_logprobs_N
    tokens = LossTokens(
        current_N, current_N, current_N, advantages_N, torch.ones_like(current_N), lengths_B=tokens.lengths_B
    )
    tokens = select(tokens, options)
    shares_N = shares_of(tokens, mode)
    _, gradient_N, terms = run(tokens, options, shares_N)
    want_N = -advantages_N * shares_N
    if name == "clip_cov":
        assert tokens.chosen_N is not None
        want_N = want_N * ~tokens.chosen_N
    else:
        for mark in ("clipped", "clipped_lower"):
            assert mark not in terms.marks or not terms.marks[mark].any()
    torch.testing.assert_close(gradient_N, want_N)
    assert (terms.marks["ppo_kl"] == 0).all()


@every_loss
@settings(max_examples=30, deadline=None)
@given(
    lengths=lengths,
    seed=seeds,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    sign=st.sampled_from([-1, 0, 1]),
    far=st.sampled_from([60, 1000]),
)
def test_extreme_log_ratios_give_finite_losses_and_gradients(
    name: str, lengths: list[int], seed: int, dtype: torch.dtype, sign: int, far: int
) -> None:
    """Log-ratios of ±60 and ±1,000 to proximal and behavior, for a whole row or single tokens; weights up to 20."""
    options = options_of(name)
    tokens = make_tokens(lengths, seed, dtype=dtype)
    signs_N = torch.where(torch.arange(sum(lengths)) % 2 == 0, 1, -1) if sign == 0 else torch.tensor(sign)
    anchor_N = tokens.current_logprobs_N - far * signs_N
    tokens = replace(
        tokens,
        proximal_logprobs_N=anchor_N,
        behavior_logprobs_N=anchor_N,
        behavior_weights_N=10 * tokens.behavior_weights_N,
    )
    tokens = select(tokens, options)
    loss, gradient_N, terms = run(tokens, options, shares_of(tokens, "token-mean"))
    assert torch.isfinite(loss)
    assert torch.isfinite(terms.losses_N).all()
    assert torch.isfinite(gradient_N).all()


@every_loss
@pytest.mark.parametrize("rows", [0, 3])
def test_no_tokens_give_a_loss_of_0_without_nan(name: str, rows: int) -> None:
    options = options_of(name)
    tokens = select(make_tokens([0] * rows, 0), options)
    for mode in MODES:
        loss, gradient_N, terms = run(tokens, options, shares_of(tokens, mode))
        assert loss == 0
        assert gradient_N.shape == (0,)
        assert all(mark.shape == (0,) for mark in terms.marks.values())


@every_loss
@pytest.mark.parametrize("column", ["current_logprobs_N", "advantages_N", *sorted(set().union(*READS.values()))])
def test_a_nan_makes_its_own_tokens_loss_nan_if_the_loss_reads_the_column(name: str, column: str) -> None:
    """A NaN in any other column has no effect."""
    options = options_of(name)
    clean = make_tokens([3, 2, 4], 7)
    # All advantages are below 0, because topr reads the sampler's log-probs only of such tokens.
    clean = replace(clean, advantages_N=-clean.advantages_N.abs() - 0.1)
    read = column in {"current_logprobs_N", "advantages_N"} | READS[name]
    of_row_N = spread(torch.arange(3), clean.lengths_B)
    for place in range(9):
        values_N = getattr(clean, column).detach().clone()
        values_N[place] = torch.nan
        tokens = select(replace(clean, **{column: values_N}), options)
        loss, _, terms = run(tokens, options, shares_of(tokens, "token-mean"))
        assert bool(loss.isnan()) == read
        assert bool(terms.losses_N[place].isnan()) == read
        others_N = of_row_N != of_row_N[place] if name in BY_ROW else torch.arange(9) != place
        assert terms.losses_N[others_N].isfinite().all(), place


@pytest.mark.parametrize("name", sorted(set(READS) - {"gmpo"}))
def test_behavior_weights_multiply_losses_that_read_them(name: str) -> None:
    tokens = make_tokens([4, 5, 3], 3)
    plain = replace(tokens, behavior_weights_N=torch.ones_like(tokens.behavior_weights_N))
    factor_N = tokens.behavior_weights_N if "behavior_weights_N" in READS[name] else 1.0
    got_N, want_N = (losses_and_gradients(one, options_of(name))[0] for one in (tokens, plain))
    torch.testing.assert_close(got_N, want_N * factor_N)


# ---- tokens chosen over the whole batch ----


@settings(max_examples=40, deadline=None)
@given(lengths=lengths, seed=seeds, fraction=st.sampled_from([1e-4, 0.1, 0.5, 1.0]))
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


@settings(max_examples=40, deadline=None)
@given(lengths=lengths, seed=seeds, fraction=st.sampled_from([1e-4, 0.1, 0.5, 1.0]))
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


@settings(max_examples=40, deadline=None)
@given(lengths=lengths, seed=seeds, threshold=st.sampled_from([1e-4, 0.01, 0.04, 0.2, 5.0]))
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
