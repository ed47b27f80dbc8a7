"""Correction and loss together: the sampler's log-probs replace the proximal ones, and rejected tokens are removed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tandem.trainer.batch.ragged import flatten, keep_tokens
from tandem.trainer.off_policy.correct import correct
from tandem.trainer.off_policy.options import CorrectionOptions
from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO, LossTokens, policy_loss_sum
from tandem.trainer.policy_losses.options import loss_models
from tandem.trainer.policy_losses.registry import policy_loss
from tests.support.golden_cases import GoldenCase, golden_cases
from tests.trainer.test_aggregation import golden_shares


def correction_of(hyper: dict[str, Any]) -> CorrectionOptions:
    """A golden test is named `<level>_<k>`; bounds of k1 are given as ratios."""
    weights: dict[str, Any] = {"level": hyper["rollout_is"] or "none"}
    if hyper["rollout_is"]:
        weights["high"] = hyper["rollout_is_threshold"]
    rejections = []
    if hyper["rollout_rs"]:
        level, _, measure = hyper["rollout_rs"].rpartition("_")
        test: dict[str, Any] = {"level": {"token": "token", "seq_mean": "geometric"}[level], "measure": measure}
        if measure == "k1":
            low, _, high = hyper["rollout_rs_threshold"].partition("_")
            test |= {"low": math.log(float(low)), "high": math.log(float(high))}
        else:
            test["high"] = hyper["rollout_rs_threshold"]
        rejections.append(test)
    return CorrectionOptions.model_validate(
        {"preset": "token_tis", "proximal": "bypassed", "weights": weights, "rejections": rejections}
    )


@pytest.mark.parametrize("case", golden_cases("policy_loss/bypass_mode/"), ids=lambda case: case.name)
def test_bypass_agrees_with_golden_values(case: GoldenCase) -> None:
    hyper = case.hyper["rollout_correction"]
    mask_BT = case.inputs["response_mask"]
    current_BT = case.inputs["log_prob"].clone().requires_grad_()
    current_N, lengths_B = flatten(current_BT, mask_BT)
    behavior_N = flatten(case.inputs["old_log_prob"], mask_BT)[0]
    advantages_N = flatten(case.inputs["advantages"], mask_BT)[0]
    corrected = correct(current_N, behavior_N, lengths_B, correction_of(hyper))

    # A clipped surrogate bounds the ratio that the weights would correct, so the weights are not applied.
    clips = hyper["loss_type"] == "ppo_clip"
    names = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "dual_clip": "clip_ratio_c"} if clips else {}
    model = loss_models()["clipped_surrogate" if clips else "reinforce"]
    options = model(**{ours: case.hyper[theirs] for ours, theirs in names.items()})
    weights_N = torch.ones_like(corrected.weights_N) if clips else corrected.weights_N
    keep_N = corrected.keep_N
    tokens = LossTokens(
        current_N[keep_N],
        behavior_N[keep_N],
        behavior_N[keep_N],
        advantages_N[keep_N],
        weights_N[keep_N],
        keep_tokens(lengths_B, keep_N),
    )
    terms = policy_loss(tokens, options)
    shares_N = golden_shares(tokens.lengths_B, case.hyper["loss_agg_mode"], {}, mask_BT.shape[1])
    loss = policy_loss_sum(terms, shares_N)
    loss.backward()
    case.check("loss", loss)
    assert current_BT.grad is not None
    case.check("grad_log_prob", current_BT.grad)

    case.check_metric("ppo_kl", float(terms.marks["ppo_kl"].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).mean()))
    if clips:
        case.check_metric("pg_clipfrac", float(terms.marks["clipped"].double().mean()))
        case.check_metric("pg_clipfrac_lower", float(terms.marks["clipped_lower"].double().mean()))
    if hyper["rollout_is"]:
        case.check_metric("rollout_is_mean", float(corrected.bounded_N.mean()))
    if hyper["rollout_rs"]:
        case.check_metric("rollout_rs_masked_fraction", float((~keep_N).double().mean()))
