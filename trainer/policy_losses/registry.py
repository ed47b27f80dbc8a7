"""Every policy loss by its name. A new one is a function, an options model in the union, and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tandem.trainer.policy_losses.cispo import cispo
from tandem.trainer.policy_losses.clipped_surrogate import clipped_surrogate
from tandem.trainer.policy_losses.covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from tandem.trainer.policy_losses.dppo import dppo_kl, dppo_tv
from tandem.trainer.policy_losses.dro import dro
from tandem.trainer.policy_losses.gmpo import gmpo
from tandem.trainer.policy_losses.gspo import gspo
from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.m2po import m2po, select_m2po
from tandem.trainer.policy_losses.options import PolicyLossOptions
from tandem.trainer.policy_losses.reinforce import reinforce
from tandem.trainer.policy_losses.sapo import sapo
from tandem.trainer.policy_losses.topr import topr
from tandem.trainer.policy_losses.truncated_importance import truncated_importance


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss, and the choice it makes over the whole batch of an optimizer step before, if it makes one."""

    function: Callable[[LossTokens, Any], LossTerms]
    select: Callable[..., Tensor] | None = None
    """`select(tokens, options, seed=…)` → bool of every token: what `LossTokens.chosen_N` then says to the function."""


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clipped_surrogate": PolicyLoss(clipped_surrogate),
    "cispo": PolicyLoss(cispo),
    "gspo": PolicyLoss(gspo),
    "gmpo": PolicyLoss(gmpo),
    "sapo": PolicyLoss(sapo),
    "reinforce": PolicyLoss(reinforce),
    "dppo_tv": PolicyLoss(dppo_tv),
    "dppo_kl": PolicyLoss(dppo_kl),
    "clip_cov": PolicyLoss(clip_cov, select_clip_cov),
    "kl_cov": PolicyLoss(kl_cov, select_kl_cov),
    "dro": PolicyLoss(dro),
    "topr": PolicyLoss(topr),
    "truncated_importance": PolicyLoss(truncated_importance),
    "m2po": PolicyLoss(m2po, select_m2po),
}


def policy_loss(tokens: LossTokens, options: PolicyLossOptions) -> LossTerms:
    """The loss of every token, and the marks of the loss that `options` belong to.

    Beside these each loss has the mark `ppo_kl`, log π_proximal − log π_current: how far the steps since the batch's
    start have led. No tokens give no losses. Infinite log-ratios count as the largest finite ones do, where a loss
    clamps them. A NaN in what a loss reads makes its token's loss NaN, never a number: trainer/objective.py then breaks
    the gradient, and the step is skipped and counted.
    """
    loss = POLICY_LOSSES[options.name]
    assert (loss.select is None) == (tokens.chosen_N is None), (
        f"{options.name}: chosen tokens are missing, or not asked for"
    )
    assert int(tokens.lengths_B.sum()) == len(tokens.current_logprobs_N), "rows do not hold these tokens"
    terms = loss.function(tokens, options)
    ppo_kl_N = tokens.proximal_logprobs_N - tokens.current_logprobs_N.detach()
    return LossTerms(terms.losses_N, {"ppo_kl": ppo_kl_N, **terms.marks})
