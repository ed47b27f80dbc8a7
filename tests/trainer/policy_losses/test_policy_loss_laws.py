"""Properties of every policy loss: independence of micro-batches, row order, padding and ranks; correct gradients;
finite values.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.trainer.aggregation import Aggregation, token_shares
from tandem.trainer.batch.ragged import flatten, row_means, spread, unflatten
from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens, policy_loss_sum
from tandem.trainer.policy_losses.options import LossOptions, loss_models
from tandem.trainer.policy_losses.registry import find_loss, policy_loss

MODES: tuple[Aggregation, ...] = get_args(Aggregation)

# The defaults suit thousands of tokens and small steps. With these values, the small random batches here reach every
# branch.
SMALL: dict[str, dict[str, float]] = {
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "clip_cov": {"fraction": 0.4, "covariance_low": 0.0},
    "kl_cov": {"fraction": 0.4},
    "truncated_importance": {"cap": 1.2},
}

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

every_loss = pytest.mark.parametrize("name", list(loss_models()))
lengths = st.lists(st.integers(0, 5), min_size=1, max_size=6)
seeds = st.integers(0, 2**31)
modes = st.sampled_from(MODES)


def options_of(name: str) -> LossOptions:
    return loss_models()[name](**SMALL.get(name, {}))


def make_tokens(
    lengths: list[int], seed: int, *, distance: float = 0.3, dtype: torch.dtype = torch.float64
) -> LossTokens:
    """Log-probs about `distance` apart; about a third of the rows have advantage 0."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)

    def normal(size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, generator=generator)

    def uniform(size: int) -> Tensor:
        return torch.rand(size, dtype=dtype, generator=generator)

    behavior_N = -3 * uniform(count) - 1e-3
    advantages_N = normal(count) * spread((uniform(len(lengths)) < 0.7).to(dtype), lengths_B)
    return LossTokens(
        current_logprobs_N=(behavior_N + distance * normal(count)).clamp(max=-1e-3),
        proximal_logprobs_N=(behavior_N + distance * normal(count)).clamp(max=-1e-3),
        behavior_logprobs_N=behavior_N,
        advantages_N=advantages_N,
        behavior_weights_N=0.2 + 1.8 * uniform(count),
        lengths_B=lengths_B,
    )


def select(tokens: LossTokens, options: LossOptions) -> LossTokens:
    """The tokens with those chosen by the loss's selection, which sees all of them."""
    choose = find_loss(options.name).select
    return tokens if choose is None else replace(tokens, chosen_N=choose(tokens, options, seed=3))


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


def run(tokens: LossTokens, options: LossOptions, shares_N: Tensor) -> tuple[Tensor, Tensor, LossTerms]:
    """(loss, its gradient with respect to the current log-probs, terms)."""
    current_N = tokens.current_logprobs_N.detach().clone().requires_grad_()
    terms = policy_loss(replace(tokens, current_logprobs_N=current_N), options)
    loss = policy_loss_sum(terms, shares_N)
    loss.backward()
    assert current_N.grad is not None
    assert not any(mark.requires_grad for mark in terms.marks.values())
    return loss.detach(), current_N.grad, terms


@every_loss
@settings(max_examples=50, deadline=None)
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
@settings(max_examples=10, deadline=None)
@given(lengths=lengths, seed=seeds, mode=modes, columns=st.integers(5, 12))
def test_loss_and_gradient_do_not_depend_on_padding(
    name: str, lengths: list[int], seed: int, mode: Aggregation, columns: int
) -> None:
    """Puts tokens at random places of a wide matrix, with NaN around them."""
    options = options_of(name)
    tokens = make_tokens(lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.zeros(len(lengths), columns, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask_BT[row, torch.randperm(columns, generator=generator)[:length]] = True

    def padded(values_N: Tensor) -> Tensor:
        return torch.where(mask_BT, unflatten(values_N, mask_BT), torch.nan)

    current_BT = padded(tokens.current_logprobs_N).requires_grad_()
    columns_N = {"current_logprobs_N": flatten(current_BT, mask_BT)[0]} | {
        column: flatten(padded(getattr(tokens, column)), mask_BT)[0] for column in COLUMNS
    }
    flat = select(LossTokens(**columns_N, lengths_B=mask_BT.sum(1)), options)
    loss = policy_loss_sum(policy_loss(flat, options), shares_of(flat, mode))
    loss.backward()
    tokens = select(tokens, options)
    want, want_N, _ = run(tokens, options, shares_of(tokens, mode))
    torch.testing.assert_close(loss.detach(), want)
    assert current_BT.grad is not None
    torch.testing.assert_close(current_BT.grad, unflatten(want_N, mask_BT))


@every_loss
@settings(max_examples=15, deadline=None)
@given(lengths=lengths, seed=seeds, mode=modes)
def test_the_gradient_agrees_with_finite_differences(
    name: str, lengths: list[int], seed: int, mode: Aggregation
) -> None:
    """Skips tokens whose one-sided differences disagree, because the loss has a kink there."""
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
    loss, gradient_N, terms = run(tokens, options, shares_N)
    if name in FACTOR_TIMES_LOGPROB:
        torch.testing.assert_close(gradient_N, shares_N * terms.losses_N.detach() / tokens.current_logprobs_N)
        return
    step = 1e-5
    num_kinks = 0
    for place in range(len(gradient_N)):
        ahead, behind = (_loss_moved(tokens, options, shares_N, place, by) for by in (step, -step))
        slopes = float(ahead - loss) / step, float(loss - behind) / step
        if abs(slopes[0] - slopes[1]) > 1e-2 * (abs(slopes[0]) + abs(slopes[1]) + 1e-3):
            num_kinks += 1
            continue
        assert float(gradient_N[place]) == pytest.approx(sum(slopes) / 2, rel=1e-4, abs=1e-7)
    assert num_kinks <= 1


def _loss_moved(tokens: LossTokens, options: LossOptions, shares_N: Tensor, place: int, by: float) -> Tensor:
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
def test_a_nan_in_a_column_that_the_loss_reads_makes_the_loss_nan(name: str, column: str) -> None:
    """A NaN in any other column has no effect."""
    options = options_of(name)
    clean = make_tokens([3, 2, 4], 7, distance=1.0)
    # All advantages are below 0, because topr reads the sampler's log-probs only of such tokens.
    clean = replace(clean, advantages_N=-clean.advantages_N.abs() - 0.1)
    read = column in {"current_logprobs_N", "advantages_N"} | READS[name]
    for place in range(9):
        values_N = getattr(clean, column).clone()
        values_N[place] = torch.nan
        tokens = select(replace(clean, **{column: values_N}), options)
        loss, _, terms = run(tokens, options, shares_of(tokens, "token-mean"))
        assert bool(loss.isnan()) == read
        assert bool(terms.losses_N[place].isnan()) == read


@every_loss
def test_tensors_of_different_shapes_fail_an_assertion(name: str) -> None:
    tokens = select(make_tokens([3, 2], 0), options_of(name))
    with pytest.raises(AssertionError):
        replace(tokens, advantages_N=tokens.advantages_N[:4])
    with pytest.raises(AssertionError):
        policy_loss(replace(tokens, lengths_B=torch.tensor([3, 1])), options_of(name))
    other = None if tokens.chosen_N is not None else torch.ones(5, dtype=torch.bool)
    with pytest.raises(AssertionError):
        policy_loss(replace(tokens, chosen_N=other), options_of(name))
