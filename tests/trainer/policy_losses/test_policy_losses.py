"""Policy losses against golden values, and their options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from tandem.trainer.batch.ragged import flatten, spread
from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO, LossTokens, policy_loss_sum
from tandem.trainer.policy_losses.options import (
    ClippedSurrogateOptions,
    GmpoOptions,
    GspoOptions,
    LossOptions,
    loss_models,
)
from tandem.trainer.policy_losses.registry import policy_loss
from tests.support.golden_cases import GoldenCase, golden_cases
from tests.trainer.test_aggregation import golden_shares

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
    tokens = tokens_of(case, current_BT)
    terms = policy_loss(tokens, options)
    loss = policy_loss_sum(terms, shares_of(case, family, options, tokens.lengths_B, current_BT.shape[1]))
    loss.backward()
    case.check("loss", loss)
    assert current_BT.grad is not None
    case.check("grad_log_prob", current_BT.grad)
    if case.metrics:
        log_ratio_N = -terms.marks["ppo_kl"]
        if family.clamped_kl:
            log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        case.check_metric("ppo_kl", -float(log_ratio_N.mean()))
        for mark, metric in (("clipped", "pg_clipfrac"), ("clipped_lower", "pg_clipfrac_lower")):
            fraction = float(terms.marks[mark].double().mean()) if mark in terms.marks else 0.0
            if family.same_clip_metrics:
                case.check_metric(metric, fraction)
            else:
                assert fraction <= case.metrics[metric] + 1e-7


def test_plain_ppo_is_the_surrogate_without_the_lower_bound() -> None:
    """Compares with −min(ρA, clip(ρ)A)."""
    log_ratio_N = torch.tensor([-0.5, -0.1, 0.1, 0.5, 3.0, -0.5, -0.1, 0.1, 0.5, 3.0], dtype=torch.float64)
    advantages_N = torch.tensor([2.0] * 5 + [-2.0] * 5, dtype=torch.float64)
    tokens = LossTokens(
        log_ratio_N, 0 * log_ratio_N, 0 * log_ratio_N, advantages_N, torch.ones_like(log_ratio_N), torch.tensor([10])
    )
    terms = policy_loss(tokens, ClippedSurrogateOptions(dual_clip=0))
    ratio_N = log_ratio_N.exp()
    want_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(0.8, 1.2) * advantages_N)
    torch.testing.assert_close(terms.losses_N, want_N)
    assert set(terms.marks) == {"ppo_kl", "clipped"}


def test_gmpo_marks_the_tokens_it_clips() -> None:
    """The loss of a clipped token's row does not depend on the token's log-prob."""
    current_N = torch.tensor([-0.9, -1.5, -1.0, -0.3, -1.7, -1.0], dtype=torch.float64, requires_grad=True)
    proximal_N = torch.full((6,), -1.0, dtype=torch.float64)
    advantages_N = torch.tensor([1.0, 1.0, 0.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    ones_N, lengths_B = torch.ones(6, dtype=torch.float64), torch.tensor([4, 2])
    tokens = LossTokens(current_N, proximal_N, proximal_N, advantages_N, ones_N, lengths_B)
    terms = policy_loss(tokens, GmpoOptions())
    terms.losses_N.sum().backward()
    assert current_N.grad is not None
    assert terms.marks["clipped"].tolist() == [False, False, False, True, False, False]
    assert terms.marks["clipped_lower"].tolist() == [False, False, False, False, True, False]
    assert (current_N.grad == 0).tolist() == [False, False, True, True, True, False]  # the third row has advantage 0


def test_gspo_has_the_gradient_of_its_sequence_form() -> None:
    """With one advantage and one weight per row, the gradient is that of Σ share·max(−sA, −clip(s)A), s = exp(mean
    log-ratio).
    """
    generator = torch.Generator().manual_seed(5)
    lengths_B = torch.tensor([4, 1, 6])
    proximal_N = -torch.rand(11, dtype=torch.float64, generator=generator)
    current_N = (proximal_N + 0.1 * torch.randn(11, dtype=torch.float64, generator=generator)).requires_grad_()
    advantages_N = spread(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), lengths_B)
    ones_N = torch.ones_like(advantages_N)
    tokens = LossTokens(current_N, proximal_N, proximal_N, advantages_N, ones_N, lengths_B)
    terms = policy_loss(tokens, GspoOptions(clip_low=0.5, clip_high=0.5))
    terms.losses_N.sum().backward()
    token_form_N = current_N.grad
    twin_N = current_N.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row_N, old_N, advantage in zip(
        twin_N.split([4, 1, 6]), proximal_N.split([4, 1, 6]), (1.0, -2.0, 0.5), strict=True
    ):
        ratio = (row_N - old_N).mean().exp()
        total = total + len(row_N) * torch.maximum(-ratio * advantage, -ratio.clamp(0.5, 1.5) * advantage)
    total.backward()
    torch.testing.assert_close(terms.losses_N.sum(), total)
    torch.testing.assert_close(token_form_N, twin_N.grad)


@pytest.mark.parametrize("name", list(loss_models()))
def test_default_options_are_valid_and_survive_json(name: str) -> None:
    model = loss_models()[name]
    options = model()
    assert options.name == name
    assert model.model_validate_json(options.model_dump_json()) == options
    with pytest.raises(ValueError, match="frozen"):
        options.name = name  # type: ignore[misc, assignment]


def _number_fields() -> list[tuple[str, str]]:
    def fields(model: type[BaseModel]) -> list[str]:
        return [field for field, info in model.model_fields.items() if info.annotation is float]

    return [(name, field) for name, model in loss_models().items() for field in fields(model)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "much"])
@pytest.mark.parametrize(("name", "field"), _number_fields())
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
