"""Policy losses and their selections against golden values and numbers worked out by hand, and their options."""

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
from tandem.trainer.policy_losses.covariance import select_kl_cov
from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO, LossTokens, policy_loss_sum
from tandem.trainer.policy_losses.m2po import select_m2po
from tandem.trainer.policy_losses.options import (
    ClipCovOptions,
    DroOptions,
    GmpoOptions,
    GspoOptions,
    KlCovOptions,
    LossOptions,
    M2poOptions,
    ToprOptions,
    TruncatedImportanceOptions,
    loss_models,
)
from tandem.trainer.policy_losses.registry import find_loss, policy_loss
from tests.support.golden_cases import GoldenCase, flatten, golden_cases
from tests.support.loss_tokens import float64, listed_tokens, losses_and_gradients, make_tokens, options_of, select
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


@any_tokens
@given(lengths=RAGGED, seed=st.integers(0, 99), beta=st.floats(0.05, 3.0))
def test_dro_has_the_gradient_of_the_squared_error_of_the_advantage(lengths: list[int], seed: int, beta: float) -> None:
    tokens = make_tokens(lengths, seed)
    error_N = tokens.advantages_N - beta * tokens.log_ratio_N
    want_N = -error_N * tokens.behavior_weights_N
    torch.testing.assert_close(losses_and_gradients(tokens, DroOptions(beta=beta))[1], want_N)


@any_tokens
@given(lengths=RAGGED, seed=st.integers(0, 99))
def test_topr_multiplies_reinforce_by_the_ratio_of_a_bad_row_of_at_most_1(lengths: list[int], seed: int) -> None:
    tokens = make_tokens(lengths, seed)
    losses_N, gradient_N, marks = losses_and_gradients(tokens, ToprOptions())
    logprobs = (tokens.current_logprobs_N.split(lengths), tokens.behavior_logprobs_N.split(lengths))
    ratios = [float((current_T - behavior_T).sum().exp()) for current_T, behavior_T in zip(*logprobs, strict=True)]
    ratio_N, bad_N = spread(float64(ratios), tokens.lengths_B), tokens.advantages_N < 0
    want_N = -tokens.advantages_N * torch.where(bad_N, ratio_N.clamp(max=1.0), 1.0)
    torch.testing.assert_close(gradient_N, want_N)
    torch.testing.assert_close(losses_N, want_N * tokens.current_logprobs_N)
    assert torch.equal(marks["clipped"], bad_N & (ratio_N > 1))


@any_tokens
@given(lengths=RAGGED, seed=st.integers(0, 99), cap=st.sampled_from([0.9, 1.2, 1e9]))
def test_truncated_importance_multiplies_reinforce_by_the_ratio_of_at_most_the_cap(
    lengths: list[int], seed: int, cap: float
) -> None:
    tokens = make_tokens(lengths, seed)
    losses_N, gradient_N, marks = losses_and_gradients(tokens, TruncatedImportanceOptions(cap=cap))
    ratio_N = (tokens.current_logprobs_N - tokens.behavior_logprobs_N).exp()
    want_N = -ratio_N.clamp(max=cap) * tokens.advantages_N
    torch.testing.assert_close(gradient_N, want_N)
    torch.testing.assert_close(losses_N, want_N * tokens.current_logprobs_N)
    assert torch.equal(marks["clipped"], ratio_N > cap)


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


# ---- tokens chosen over the whole batch ----


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


def test_kl_cov_chooses_the_first_of_equal_covariances() -> None:
    tokens = listed_tokens([-1.0] * 6, advantages=[2.0] * 6)
    assert select_kl_cov(tokens, KlCovOptions(fraction=0.5), seed=0).tolist() == [True] * 3 + [False] * 3


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


def test_m2po_treats_equal_log_ratios_alike() -> None:
    tokens = listed_tokens([-4.0] * 4, behavior=[-4.0, -4.125, -4.25, -4.25], advantages=[1.0] * 4)
    # The squares are 1/64, 1/16 and 1/16. Masking one of the last two would meet 0.04, but both are masked. The first
    # token's ratio is 1, which is outside the region.
    assert select_m2po(tokens, M2poOptions(threshold=0.04), seed=0).tolist() == [False, False, True, True]
    assert not select_m2po(tokens, M2poOptions(threshold=3 / 64), seed=0).any()


def test_m2po_masks_an_infinite_log_ratio_first() -> None:
    tokens = listed_tokens([-math.inf, -1.1, math.nan], behavior=[-1.0, -1.0, -1.0], advantages=[-1.0, -1.0, 1.0])
    assert select_m2po(tokens, M2poOptions(), seed=0).tolist() == [True, False, False]


# ---- options ----


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("cispo", {"clip_low": 1.5}, "clip_low\n  Input should be less than or equal to 1"),
        ("sapo", {"temperature_positive": 0}, "temperature_positive\n  Input should be greater than 0"),
    ],
)
def test_options_out_of_bounds_are_refused(name: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        loss_models()[name].model_validate(values)
