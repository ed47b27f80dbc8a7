"""Policy losses against golden values and numbers worked out by hand, and their options."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from tandem.trainer.batch.ragged import spread
from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO, LossTokens, policy_loss_sum
from tandem.trainer.policy_losses.options import (
    ClippedSurrogateOptions,
    DroOptions,
    GmpoOptions,
    GspoOptions,
    LossOptions,
    ToprOptions,
    TruncatedImportanceOptions,
    loss_models,
)
from tandem.trainer.policy_losses.registry import policy_loss
from tests.support.golden_cases import GoldenCase, golden_cases
from tests.support.loss_tokens import float64, listed_tokens, losses_and_gradients, make_tokens, select
from tests.support.padded import flatten
from tests.trainer.test_aggregation import golden_shares

RAGGED = st.lists(st.integers(0, 6), min_size=1, max_size=6)
any_tokens = settings(max_examples=25, deadline=None)

CLIPS = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}
THRESHOLDS = {"threshold_low": "clip_ratio_low", "threshold_high": "clip_ratio_high", "ratio_cap": "clip_ratio_c"}


@dataclass(frozen=True)
class Family:
    """The loss of a golden family, the keys of its options in `hyper`, and conventions that differ from ours."""

    loss: str
    options: dict[str, str]
    clamped_kl: bool = True
    """Its `ppo_kl` is of the clamped log-ratio; our mark is of the log-ratio as it is."""
    same_clip_metrics: bool = True
    """False: it counts every token outside the clip range, also on the side where the loss does not cut; our marks,
    those cut.
    """
    marks: dict[str, str] = field(
        default_factory=lambda: {"clipped": "pg_clipfrac", "clipped_lower": "pg_clipfrac_lower"}
    )
    """Our marks whose mean is one of its metrics."""
    aggregation: str | None = None
    """It ignores the aggregation asked for and takes this one."""
    named: dict[str, Any] = field(default_factory=dict)
    """Options of ours that reproduce its conventions."""


FAMILIES = {
    "vanilla": Family("clipped_surrogate", {**CLIPS, "dual_clip": "clip_ratio_c"}),
    "cispo": Family("cispo", CLIPS),
    "gspo": Family("gspo", CLIPS, clamped_kl=False),
    "geo_mean": Family(
        "gmpo",
        CLIPS,
        clamped_kl=False,
        same_clip_metrics=False,
        aggregation="seq-mean-token-mean",
        named={"count_empty_rows": True},
    ),
    "sapo": Family(
        "sapo",
        {"temperature_positive": "tau_pos", "temperature_negative": "tau_neg"},
        aggregation="seq-mean-token-mean",
    ),
    "gpg": Family("reinforce", {}),
    "dppo_tv": Family("dppo_tv", THRESHOLDS),
    "dppo_kl": Family("dppo_kl", THRESHOLDS),
    "clip_cov": Family(
        "clip_cov",
        {**CLIPS, "fraction": "clip_cov_ratio", "covariance_low": "clip_cov_lb", "covariance_high": "clip_cov_ub"},
        clamped_kl=False,
        marks={"chosen": "pg_clipfrac"},
    ),
    "kl_cov": Family(
        "kl_cov", {"fraction": "kl_cov_ratio", "kl_coefficient": "ppo_kl_coef"}, marks={"abs_log_ratio": "ppo_kl"}
    ),
    "dro": Family("dro", {"beta": "dro_beta"}, clamped_kl=False, marks={}),
}


def shares_of(case: GoldenCase, family: Family, options: LossOptions, lengths_B: Tensor, columns: int) -> Tensor:
    totals = case.hyper["global"] or {}
    if options.counts_empty_rows:  # as trainer/objective.py counts them; golden ignores the global denominators here
        totals = {"global_batch_size": len(lengths_B)}
    return golden_shares(lengths_B, family.aggregation or case.hyper["loss_agg_mode"], totals, columns)


def tokens_of(case: GoldenCase, current_BT: Tensor) -> LossTokens:
    mask_BT = case.inputs["response_mask"]
    current_N, lengths_B = flatten(current_BT, mask_BT)
    proximal_N, advantages_N, weights_N = (
        flatten(values_BT, mask_BT)[0]
        for values_BT in (
            case.inputs["old_log_prob"],
            case.inputs["advantages"],
            case.inputs.get("rollout_is_weights", torch.ones_like(current_BT)),
        )
    )
    unread_N = torch.full_like(proximal_N, torch.nan)
    return LossTokens(current_N, proximal_N, unread_N, advantages_N, weights_N, lengths_B)


@pytest.mark.parametrize(
    "case", [case for family in FAMILIES for case in golden_cases(f"policy_loss/{family}/")], ids=lambda case: case.name
)
def test_policy_loss_agrees_with_golden_values(case: GoldenCase) -> None:
    family = FAMILIES[case.name.split("/")[1]]
    given = {ours: case.hyper[theirs] for ours, theirs in family.options.items()}
    options = loss_models()[family.loss](**given, **family.named)
    current_BT = case.inputs["log_prob"].clone().requires_grad_()
    tokens = select(tokens_of(case, current_BT), options, seed=5)
    terms = policy_loss(tokens, options)
    loss = policy_loss_sum(terms, shares_of(case, family, options, tokens.lengths_B, current_BT.shape[1]))
    loss.backward()
    case.check("loss", loss)
    assert current_BT.grad is not None
    case.check("grad_log_prob", current_BT.grad)
    if case.metrics:
        if "ppo_kl" not in family.marks.values():
            log_ratio_N = -terms.marks["ppo_kl"]
            if family.clamped_kl:
                log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            case.check_metric("ppo_kl", -float(log_ratio_N.mean()))
        for mark, metric in family.marks.items():
            mean = float(terms.marks[mark].double().mean()) if mark in terms.marks else 0.0
            if family.same_clip_metrics:
                case.check_metric(metric, mean)
            else:
                assert mean <= case.metrics[metric] + 1e-7


def test_plain_ppo_is_the_surrogate_without_the_lower_bound() -> None:
    """Compares with −min(ρA, clip(ρ)A)."""
    log_ratio_N = float64([-0.5, -0.1, 0.1, 0.5, 3.0] * 2)
    tokens = listed_tokens(log_ratio_N.tolist(), proximal=[0.0] * 10, advantages=[2.0] * 5 + [-2.0] * 5)
    losses_N, _, marks = losses_and_gradients(tokens, ClippedSurrogateOptions(dual_clip=0))
    ratio_N, advantages_N = log_ratio_N.exp(), tokens.advantages_N
    torch.testing.assert_close(losses_N, -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(0.8, 1.2) * advantages_N))
    assert set(marks) == {"ppo_kl", "clipped"}


def test_gmpo_marks_the_tokens_it_clips() -> None:
    """The loss of a clipped token's row does not depend on the token's log-prob."""
    tokens = listed_tokens(
        [-0.9, -1.5, -1.0, -0.3, -1.7, -1.0],
        proximal=[-1.0] * 6,
        advantages=[1.0, 1.0, 0.0, 1.0, -1.0, -1.0],
        lengths=[4, 2],
    )
    _, gradient_N, marks = losses_and_gradients(tokens, GmpoOptions())
    assert marks["clipped"].tolist() == [False, False, False, True, False, False]
    assert marks["clipped_lower"].tolist() == [False, False, False, False, True, False]
    assert (gradient_N == 0).tolist() == [False, False, True, True, True, False]  # the third token has advantage 0


def test_gspo_has_the_gradient_of_its_sequence_form() -> None:
    """With one advantage and one weight per row, the gradient is that of Σ share·max(−sA, −clip(s)A), s = exp(mean
    log-ratio).
    """
    lengths_B, advantages = torch.tensor([4, 1, 6]), (1.0, -2.0, 0.5)
    tokens = make_tokens([4, 1, 6], 5)
    tokens = replace(
        tokens, advantages_N=spread(float64(advantages), lengths_B), behavior_weights_N=torch.ones(11).double()
    )
    losses_N, token_form_N, _ = losses_and_gradients(tokens, GspoOptions(clip_low=0.5, clip_high=0.5))
    current_N = tokens.current_logprobs_N.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for log_ratio_T, advantage in zip(
        (current_N - tokens.proximal_logprobs_N).split([4, 1, 6]), advantages, strict=True
    ):
        ratio = log_ratio_T.mean().exp()
        total = total + len(log_ratio_T) * torch.maximum(-ratio * advantage, -ratio.clamp(0.5, 1.5) * advantage)
    total.backward()
    torch.testing.assert_close(losses_N.sum(), total.detach())
    torch.testing.assert_close(token_form_N, current_N.grad)


def test_dro_values() -> None:
    tokens = listed_tokens([-1.0, -2.0], proximal=[-1.5, -1.0], advantages=[2.0, -1.0], weights=[1.0, 3.0])
    losses_N, gradient_N, _ = losses_and_gradients(tokens, DroOptions(beta=0.4))
    torch.testing.assert_close(losses_N, float64([2.0 + 0.2 * 0.25, 3.0 * (-2.0 + 0.2)]))
    torch.testing.assert_close(gradient_N, float64([-2.0 + 0.4 * 0.5, 3.0 * (1.0 - 0.4)]))


@any_tokens
@given(lengths=RAGGED, seed=st.integers(0, 99), beta=st.floats(0.05, 3.0))
def test_dro_has_the_gradient_of_the_squared_error_of_the_advantage(lengths: list[int], seed: int, beta: float) -> None:
    tokens = make_tokens(lengths, seed)
    error_N = tokens.advantages_N - beta * tokens.log_ratio_N
    want_N = -error_N * tokens.behavior_weights_N
    torch.testing.assert_close(losses_and_gradients(tokens, DroOptions(beta=beta))[1], want_N)


def test_dro_without_its_penalty_is_reinforce() -> None:
    tokens = make_tokens([3, 4], 1)
    want_N = -tokens.advantages_N * tokens.current_logprobs_N * tokens.behavior_weights_N
    torch.testing.assert_close(losses_and_gradients(tokens, DroOptions(beta=0.0))[0], want_N)


def test_topr_values() -> None:
    half = math.log(2.0) / 2
    # Rows: A > 0 and more likely; A < 0 and half as likely as when sampled; A < 0 and more likely; empty.
    tokens = listed_tokens(
        [-1.0, -2.0, -1.0, -2.0, -1.0],
        behavior=[-3.0, -5.0, -1.0 + half, -2.0 + half, -1.5],
        advantages=[2.0, 2.0, -1.0, -1.0, -3.0],
        lengths=[2, 2, 0, 1],
        weights=[9.0] * 5,
    )
    losses_N, gradient_N, marks = losses_and_gradients(tokens, ToprOptions())
    torch.testing.assert_close(losses_N, float64([2.0, 4.0, -0.5, -1.0, -3.0]))
    torch.testing.assert_close(gradient_N, float64([-2.0, -2.0, 0.5, 0.5, 3.0]))
    assert marks["clipped"].tolist() == [False, False, False, False, True]


@any_tokens
@given(lengths=RAGGED, seed=st.integers(0, 99))
def test_topr_is_reinforce_for_positive_advantages_and_bounded_by_it_for_negative(
    lengths: list[int], seed: int
) -> None:
    tokens = make_tokens(lengths, seed)
    _, gradient_N, _ = losses_and_gradients(tokens, ToprOptions())
    good_N = tokens.advantages_N >= 0
    torch.testing.assert_close(gradient_N[good_N], -tokens.advantages_N[good_N])
    assert (gradient_N[~good_N] > 0).all()
    assert (gradient_N[~good_N] <= -tokens.advantages_N[~good_N]).all()


def test_topr_has_no_gradient_for_a_bad_answer_that_became_unlikely() -> None:
    tokens = listed_tokens([-900.0, -1.0], behavior=[-1.0, -1.0], advantages=[-1.0, -1.0])
    assert losses_and_gradients(tokens, ToprOptions())[1].tolist() == [0.0, 0.0]


def test_topr_propagates_a_nan_of_the_sampler_where_it_reads_it() -> None:
    behavior, advantages = [-1.0, math.nan] * 2, [-1.0, -1.0, 1.0, 1.0]
    tokens = listed_tokens([-1.0] * 4, behavior=behavior, advantages=advantages, lengths=[2, 2])
    assert losses_and_gradients(tokens, ToprOptions())[0].isnan().tolist() == [True, True, False, False]


def test_topr_sums_log_ratios_of_a_row_precisely() -> None:
    far = 2.0**24  # float32 cannot represent a fraction of ½ there
    current_N, zeros_N = torch.tensor([far, -0.5, -far]), torch.zeros(3)
    tokens = LossTokens(current_N, zeros_N, zeros_N, torch.full((3,), -1.0), zeros_N, torch.tensor([3]))
    losses_N, _, _ = losses_and_gradients(tokens, ToprOptions())
    assert losses_N.dtype == torch.float32
    assert losses_N[1].item() == pytest.approx(-0.5 * math.exp(-0.5))


def test_truncated_importance_values() -> None:
    tokens = listed_tokens(
        [-1.0, -1.0, -2.0],
        behavior=[-1.0 - math.log(8.0), -1.0 + math.log(2.0), -2.0 - math.log(3.0)],
        proximal=[0.0, 0.0, 0.0],
        advantages=[1.0, 1.0, -2.0],
        weights=[9.0] * 3,
    )
    losses_N, gradient_N, marks = losses_and_gradients(tokens, TruncatedImportanceOptions(cap=4.0))
    torch.testing.assert_close(losses_N, float64([4.0, 0.5, -12.0]))
    torch.testing.assert_close(gradient_N, float64([-4.0, -0.5, 6.0]))
    assert marks["clipped"].tolist() == [True, False, False]


@any_tokens
@given(lengths=RAGGED, seed=st.integers(0, 99))
def test_truncated_importance_without_a_cap_is_importance_sampling(lengths: list[int], seed: int) -> None:
    tokens = make_tokens(lengths, seed)
    want_N = -(tokens.current_logprobs_N - tokens.behavior_logprobs_N).exp() * tokens.advantages_N
    torch.testing.assert_close(losses_and_gradients(tokens, TruncatedImportanceOptions(cap=1e9))[1], want_N)


@pytest.mark.parametrize("name", list(loss_models()))
def test_default_options_are_valid_and_survive_json(name: str) -> None:
    model = loss_models()[name]
    options = model()
    assert options.name == name
    assert model.model_validate_json(options.model_dump_json()) == options
    with pytest.raises(ValueError, match="frozen"):
        options.name = name  # type: ignore[misc, assignment]
    for values, place in (({"name": "ppo"}, "name"), ({"unheard_of": 1}, "unheard_of")):
        with pytest.raises(ValidationError, match=rf"\n{place}\n"):
            model.model_validate(values)


NUMBERS = [
    (name, field)
    for name, model in loss_models().items()
    for field, info in model.model_fields.items()
    if info.annotation is float
]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "much"])
@pytest.mark.parametrize(("name", "field"), NUMBERS)
def test_options_that_are_not_finite_numbers_are_refused(name: str, field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=rf"\n{field}\n"):
        loss_models()[name].model_validate({field: value})


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("gspo", {"clip_hihg": 0.1}, "clip_hihg\n  Extra inputs"),
        ("reinforce", {"beta": 1}, "beta\n  Extra inputs"),
        ("cispo", {"clip_low": 1.5}, "clip_low\n  Input should be less than or equal to 1"),
        ("clipped_surrogate", {"dual_clip": 0.5}, "must be above 1, or 0 to switch it off"),
        ("sapo", {"temperature_positive": 0}, "temperature_positive\n  Input should be greater than 0"),
        ("clip_cov", {"covariance_low": 5.0}, "covariance_low .* must lie below covariance_high"),
    ],
)
def test_options_out_of_bounds_are_refused(name: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        loss_models()[name].model_validate(values)
