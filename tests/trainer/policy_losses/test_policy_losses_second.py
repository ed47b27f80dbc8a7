"""Golden values and common properties of clip_cov, kl_cov, dro, topr, truncated_importance and m2po.
test_policy_loss_selections.py tests the selections over the batch, test_policy_loss_laws.py the properties of all
losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from tandem.trainer.aggregation import token_shares
from tandem.trainer.batch.ragged import flatten, spread
from tandem.trainer.policy_losses.covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from tandem.trainer.policy_losses.dro import dro
from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens, policy_loss_sum
from tandem.trainer.policy_losses.m2po import m2po, select_m2po
from tandem.trainer.policy_losses.options import (
    ClipCovOptions,
    DroOptions,
    KlCovOptions,
    M2poOptions,
    ToprOptions,
    TruncatedImportanceOptions,
)
from tandem.trainer.policy_losses.topr import topr
from tandem.trainer.policy_losses.truncated_importance import truncated_importance
from tests.support.golden_cases import GoldenCase, golden_cases

LOSSES: dict[str, tuple[Callable[..., LossTerms], Callable[..., Tensor] | None, Any]] = {
    "clip_cov": (clip_cov, select_clip_cov, ClipCovOptions(fraction=0.3, covariance_low=0.0, covariance_high=9.0)),
    "kl_cov": (kl_cov, select_kl_cov, KlCovOptions(fraction=0.3)),
    "dro": (dro, None, DroOptions()),
    "topr": (topr, None, ToprOptions()),
    "truncated_importance": (truncated_importance, None, TruncatedImportanceOptions(cap=2.0)),
    "m2po": (m2po, select_m2po, M2poOptions()),
}
SELF_CORRECTING = ("topr", "truncated_importance", "m2po")
"""Losses whose ratio goes to the sampler, and which do without behavior weights."""


def float64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def made(
    current: Any,
    *,
    behavior: Any = None,
    proximal: Any = None,
    advantages: Any,
    lengths: Any = None,
    weights: Any = None,
) -> LossTokens:
    """One row of tokens from lists. Omitted log-probs equal the current ones, and omitted weights are 1."""
    current_N = float64(current)
    return LossTokens(
        current_logprobs_N=current_N.clone().requires_grad_(),
        proximal_logprobs_N=current_N if proximal is None else float64(proximal),
        behavior_logprobs_N=current_N if behavior is None else float64(behavior),
        advantages_N=float64(advantages),
        behavior_weights_N=torch.ones_like(current_N) if weights is None else float64(weights),
        lengths_B=torch.tensor([len(current_N)] if lengths is None else lengths),
    )


def drawn(seed: int, lengths: list[int]) -> LossTokens:
    """Random tokens in rows of these lengths, with one advantage per row and different log-probs for each policy."""
    generator = torch.Generator().manual_seed(seed)
    total, dtype = sum(lengths), torch.float64
    current_N = -2.0 * torch.rand(total, generator=generator, dtype=dtype)
    proximal_N, behavior_N = (current_N + 0.3 * torch.randn(total, generator=generator, dtype=dtype) for _ in range(2))
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    return LossTokens(
        current_logprobs_N=current_N.requires_grad_(),
        proximal_logprobs_N=proximal_N,
        behavior_logprobs_N=behavior_N,
        advantages_N=spread(torch.randn(len(lengths), generator=generator, dtype=dtype), lengths_B),
        behavior_weights_N=0.5 + torch.rand(total, generator=generator, dtype=dtype),
        lengths_B=lengths_B,
    )


def selected(name: str, tokens: LossTokens, seed: int = 0) -> LossTokens:
    """The tokens with those chosen by the loss's selection, if it has one."""
    _, select, options = LOSSES[name]
    return tokens if select is None else replace(tokens, chosen_N=select(tokens, options, seed=seed))


def terms_of(name: str, tokens: LossTokens, seed: int = 0) -> LossTerms:
    loss, _, options = LOSSES[name]
    return loss(selected(name, tokens, seed), options)


def gradient(losses_N: Tensor, tokens: LossTokens) -> Tensor:
    (grad_N,) = torch.autograd.grad(losses_N.sum(), tokens.current_logprobs_N)
    return grad_N


def golden_tokens(case: GoldenCase) -> tuple[LossTokens, Tensor]:
    """Returns the tokens and the log-probs (B, T) that take the gradient."""
    mask_BT = case.inputs["response_mask"]
    current_BT = case.inputs["log_prob"].clone().requires_grad_()
    current_N, lengths_B = flatten(current_BT, mask_BT)
    proximal_N, _ = flatten(case.inputs["old_log_prob"], mask_BT)
    weights_BT = case.inputs.get("rollout_is_weights", torch.ones_like(case.inputs["log_prob"]))
    tokens = LossTokens(
        current_logprobs_N=current_N,
        proximal_logprobs_N=proximal_N,
        behavior_logprobs_N=proximal_N,
        advantages_N=flatten(case.inputs["advantages"], mask_BT)[0],
        behavior_weights_N=flatten(weights_BT, mask_BT)[0],
        lengths_B=lengths_B,
    )
    return tokens, current_BT


def check_golden(case: GoldenCase, terms: LossTerms, tokens: LossTokens, current_BT: Tensor) -> None:
    """Compares loss and gradient, aggregated as in the case."""
    world = case.hyper["global"] or {}
    shares_B = token_shares(
        tokens.lengths_B,
        case.hyper["loss_agg_mode"],
        length_constant=world.get("loss_scale_factor", current_BT.shape[1]),
        num_tokens=world.get("batch_num_tokens"),
        num_sequences=world.get("global_batch_size"),
    )
    loss = policy_loss_sum(terms, spread(shares_B, tokens.lengths_B)) * world.get("dp_size", 1)
    loss.backward()
    assert current_BT.grad is not None
    case.check("loss", loss)
    case.check("grad_log_prob", current_BT.grad)


def mean(values_N: Tensor) -> float:
    return float(values_N.detach().double().mean())


@pytest.mark.parametrize("case", golden_cases("policy_loss/clip_cov/"), ids=lambda case: case.name)
def test_clip_cov_agrees_with_golden_values(case: GoldenCase) -> None:
    options = ClipCovOptions(
        clip_low=case.hyper["clip_ratio_low"],
        clip_high=case.hyper["clip_ratio_high"],
        fraction=case.hyper["clip_cov_ratio"],
        covariance_low=case.hyper["clip_cov_lb"],
        covariance_high=case.hyper["clip_cov_ub"],
    )
    tokens, current_BT = golden_tokens(case)
    tokens = replace(tokens, chosen_N=select_clip_cov(tokens, options, seed=5))
    terms = clip_cov(tokens, options)
    check_golden(case, terms, tokens, current_BT)
    case.check_metric("pg_clipfrac", mean(terms.marks["chosen"]))
    case.check_metric("ppo_kl", -mean(tokens.log_ratio_N))


@pytest.mark.parametrize("case", golden_cases("policy_loss/kl_cov/"), ids=lambda case: case.name)
def test_kl_cov_agrees_with_golden_values(case: GoldenCase) -> None:
    options = KlCovOptions(fraction=case.hyper["kl_cov_ratio"], kl_coefficient=case.hyper["ppo_kl_coef"])
    tokens, current_BT = golden_tokens(case)
    tokens = replace(tokens, chosen_N=select_kl_cov(tokens, options, seed=5))
    terms = kl_cov(tokens, options)
    check_golden(case, terms, tokens, current_BT)
    case.check_metric("ppo_kl", mean(terms.marks["abs_log_ratio"]))


@pytest.mark.parametrize("case", golden_cases("policy_loss/dro/"), ids=lambda case: case.name)
def test_dro_agrees_with_golden_values(case: GoldenCase) -> None:
    tokens, current_BT = golden_tokens(case)
    check_golden(case, dro(tokens, DroOptions(beta=case.hyper["dro_beta"])), tokens, current_BT)
    case.check_metric("ppo_kl", -mean(tokens.log_ratio_N))


RAGGED = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@pytest.mark.parametrize("name", LOSSES)
def test_behavior_weights_multiply_losses_without_their_own_ratio_to_the_sampler(name: str) -> None:
    tokens = drawn(3, [4, 5, 3])
    plain = replace(tokens, behavior_weights_N=torch.ones_like(tokens.behavior_weights_N))
    factor_N = 1.0 if name in SELF_CORRECTING else tokens.behavior_weights_N
    got, want = terms_of(name, tokens), terms_of(name, plain)
    torch.testing.assert_close(got.losses_N, want.losses_N * factor_N)


READ = {
    **{name: ("current", "advantages", "proximal", "behavior_weights") for name in ("clip_cov", "kl_cov", "dro")},
    **{name: ("current", "advantages", "behavior") for name in ("truncated_importance", "m2po")},
    "topr": ("current", "advantages"),
}
"""What each loss reads of every token; TOPR reads the behavior log-probs where the advantage is negative."""


@pytest.mark.parametrize(("name", "column"), [(name, column) for name, columns in READ.items() for column in columns])
def test_a_nan_affects_only_its_own_token(name: str, column: str) -> None:
    tokens = drawn(7, [4, 3, 5])
    attribute = f"{column}_N" if column in ("advantages", "behavior_weights") else f"{column}_logprobs_N"
    for place in range(12):
        values_N = getattr(tokens, attribute).detach().clone()
        values_N[place] = math.nan
        losses_N = terms_of(name, replace(tokens, **{attribute: values_N})).losses_N
        assert losses_N[place].isnan(), place
        # In TOPR, the row's ratio is part of the loss of each of its tokens.
        row = next((first, end) for first, end in [(0, 4), (4, 7), (7, 12)] if first <= place < end)
        others_N = torch.ones(12, dtype=torch.bool)
        others_N[slice(*row) if name == "topr" else place] = False
        assert losses_N[others_N].isfinite().all(), place


def test_topr_propagates_a_nan_of_the_sampler_where_it_reads_it() -> None:
    tokens = made([-1.0] * 4, behavior=[-1.0, math.nan] * 2, advantages=[-1.0, -1.0, 1.0, 1.0], lengths=[2, 2])
    assert topr(tokens, ToprOptions()).losses_N.isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize("options", [entry[2] for entry in LOSSES.values()], ids=lambda options: options.name)
def test_options_refuse_unknown_keys_and_non_finite_values(options: Any) -> None:
    kind = type(options)
    assert kind.model_validate(options.model_dump()) == options
    with pytest.raises(ValidationError):
        kind(unheard_of=1)
    with pytest.raises(ValidationError):
        kind(name="ppo")
    for field in set(kind.model_fields) - {"name"}:
        for wrong in (math.nan, math.inf, "much"):
            with pytest.raises(ValidationError):
                kind(**{field: wrong})


def test_dro_values() -> None:
    tokens = made([-1.0, -2.0], proximal=[-1.5, -1.0], advantages=[2.0, -1.0], weights=[1.0, 3.0])
    terms = dro(tokens, DroOptions(beta=0.4))
    torch.testing.assert_close(terms.losses_N, float64([2.0 + 0.2 * 0.25, 3.0 * (-2.0 + 0.2)]))
    torch.testing.assert_close(gradient(terms.losses_N, tokens), float64([-2.0 + 0.4 * 0.5, 3.0 * (1.0 - 0.4)]))


@settings(max_examples=25, deadline=None)
@given(lengths=RAGGED, seed=st.integers(0, 99), beta=st.floats(0.05, 3.0))
def test_dro_has_the_gradient_of_the_squared_error_of_the_advantage(lengths: list[int], seed: int, beta: float) -> None:
    tokens = drawn(seed, lengths)
    error_N = 0.5 * (tokens.advantages_N - beta * tokens.log_ratio_N).square() * tokens.behavior_weights_N / beta
    want_N = gradient(error_N, tokens)
    torch.testing.assert_close(gradient(dro(tokens, DroOptions(beta=beta)).losses_N, tokens), want_N)


def test_dro_without_its_penalty_is_reinforce() -> None:
    tokens = drawn(1, [3, 4])
    want_N = -tokens.advantages_N * tokens.current_logprobs_N * tokens.behavior_weights_N
    torch.testing.assert_close(dro(tokens, DroOptions(beta=0.0)).losses_N, want_N)


def test_topr_values() -> None:
    half = math.log(2.0) / 2
    # Rows: A > 0 and more likely; A < 0 and half as likely as when sampled; A < 0 and more likely; empty.
    tokens = made(
        [-1.0, -2.0, -1.0, -2.0, -1.0],
        behavior=[-3.0, -5.0, -1.0 + half, -2.0 + half, -1.5],
        advantages=[2.0, 2.0, -1.0, -1.0, -3.0],
        lengths=[2, 2, 0, 1],
        weights=[9.0] * 5,
    )
    terms = topr(tokens, ToprOptions())
    torch.testing.assert_close(terms.losses_N, float64([2.0, 4.0, -0.5, -1.0, -3.0]))
    torch.testing.assert_close(gradient(terms.losses_N, tokens), float64([-2.0, -2.0, 0.5, 0.5, 3.0]))
    assert terms.marks["clipped"].tolist() == [False, False, False, False, True]


@settings(max_examples=25, deadline=None)
@given(lengths=RAGGED, seed=st.integers(0, 99))
def test_topr_is_reinforce_for_positive_advantages_and_bounded_by_it_for_negative(
    lengths: list[int], seed: int
) -> None:
    tokens = drawn(seed, lengths)
    grad_N = gradient(topr(tokens, ToprOptions()).losses_N, tokens)
    good_N = tokens.advantages_N >= 0
    torch.testing.assert_close(grad_N[good_N], -tokens.advantages_N[good_N])
    assert (grad_N[~good_N] > 0).all()
    assert (grad_N[~good_N] <= -tokens.advantages_N[~good_N]).all()


def test_topr_has_no_gradient_for_a_bad_answer_that_became_unlikely() -> None:
    tokens = made([-900.0, -1.0], behavior=[-1.0, -1.0], advantages=[-1.0, -1.0])
    assert gradient(topr(tokens, ToprOptions()).losses_N, tokens).tolist() == [0.0, 0.0]


def test_topr_sums_log_ratios_of_a_row_precisely() -> None:
    far = 2.0**24  # float32 cannot represent a fraction of ½ there
    current_N, zeros_N = torch.tensor([far, -0.5, -far]), torch.zeros(3)
    tokens = LossTokens(current_N, zeros_N, zeros_N, torch.full((3,), -1.0), zeros_N, torch.tensor([3]))
    losses_N = topr(tokens, ToprOptions()).losses_N
    assert losses_N.dtype == torch.float32
    assert losses_N[1].item() == pytest.approx(-0.5 * math.exp(-0.5))


def test_truncated_importance_values() -> None:
    tokens = made(
        [-1.0, -1.0, -2.0],
        behavior=[-1.0 - math.log(8.0), -1.0 + math.log(2.0), -2.0 - math.log(3.0)],
        proximal=[0.0, 0.0, 0.0],
        advantages=[1.0, 1.0, -2.0],
        weights=[9.0] * 3,
    )
    terms = truncated_importance(tokens, TruncatedImportanceOptions(cap=4.0))
    torch.testing.assert_close(terms.losses_N, float64([4.0, 0.5, -12.0]))
    torch.testing.assert_close(gradient(terms.losses_N, tokens), float64([-4.0, -0.5, 6.0]))
    assert terms.marks["clipped"].tolist() == [True, False, False]


@settings(max_examples=25, deadline=None)
@given(lengths=RAGGED, seed=st.integers(0, 99))
def test_truncated_importance_without_a_cap_is_importance_sampling(lengths: list[int], seed: int) -> None:
    tokens = drawn(seed, lengths)
    sampled_N = -(tokens.current_logprobs_N - tokens.behavior_logprobs_N).exp() * tokens.advantages_N
    want_N = gradient(sampled_N, tokens)
    terms = truncated_importance(tokens, TruncatedImportanceOptions(cap=1e9))
    torch.testing.assert_close(gradient(terms.losses_N, tokens), want_N)
