"""Finds and calls the policy loss that its options name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from tandem.protos.plugins import load_function
from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import LossOptions, loss_models


class PolicyLoss(NamedTuple):
    """The functions that a loss's options name."""

    function: Callable[[LossTokens, Any], LossTerms]
    select: Callable[..., Tensor] | None


@cache
def find_loss(name: str) -> PolicyLoss:
    """The loss of that name. Raises PluginError if another package's loss does not import."""
    model = loss_models()[name]
    select = load_function(model.select, f"loss {name}") if model.select else None
    return PolicyLoss(load_function(model.function, f"loss {name}"), select)


def policy_loss(tokens: LossTokens, options: LossOptions) -> LossTerms:
    """The loss of every token, with the marks of the loss that `options` selects.

    Every loss also has the mark `ppo_kl`, log π_proximal − log π_current: how far the policy has moved since the start
    of the batch. No tokens give no losses. Where a loss clamps log-ratios, infinite ones count as the clamp's bound. A
    NaN input makes its token's loss NaN; trainer/objective.py then skips the optimizer step and counts it.
    """
    loss = find_loss(options.name)
    assert (loss.select is None) == (tokens.chosen_N is None), f"{options.name}: chosen tokens missing or not asked for"
    assert int(tokens.lengths_B.sum()) == len(tokens.current_logprobs_N), "rows do not hold these tokens"
    terms = loss.function(tokens, options)
    ppo_kl_N = tokens.proximal_logprobs_N - tokens.current_logprobs_N.detach()
    return LossTerms(terms.losses_N, {"ppo_kl": ppo_kl_N, **terms.marks})
