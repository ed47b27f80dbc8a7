"""Tokens for policy losses, made up or from lists, and how a loss runs on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tandem.trainer.algorithm import Aggregation
from tandem.trainer.batch.ragged import spread
from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens, policy_loss_sum
from tandem.trainer.policy_losses.options import LossOptions, loss_models
from tandem.trainer.policy_losses.registry import find_loss, policy_loss

MODES: tuple[Aggregation, ...] = get_args(Aggregation)

# The defaults suit thousands of tokens and small steps. With these values, small random batches reach every branch.
SMALL: dict[str, dict[str, float]] = {
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "clip_cov": {"fraction": 0.4, "covariance_low": 0.0},
    "kl_cov": {"fraction": 0.4},
    "truncated_importance": {"cap": 1.2},
}

every_loss = pytest.mark.parametrize("name", list(loss_models()))


def options_of(name: str) -> LossOptions:
    return loss_models()[name](**SMALL.get(name, {}))


def float64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def listed_tokens(
    current: Any,
    *,
    behavior: Any = None,
    proximal: Any = None,
    advantages: Any,
    lengths: Any = None,
    weights: Any = None,
) -> LossTokens:
    """Tokens from lists, in one row unless `lengths` are given. Omitted log-probs equal the current ones, and omitted
    weights are 1.
    """
    current_N = float64(current)
    return LossTokens(
        current_logprobs_N=current_N,
        proximal_logprobs_N=current_N if proximal is None else float64(proximal),
        behavior_logprobs_N=current_N if behavior is None else float64(behavior),
        advantages_N=float64(advantages),
        behavior_weights_N=torch.ones_like(current_N) if weights is None else float64(weights),
        lengths_B=torch.tensor([len(current_N)] if lengths is None else lengths),
    )


def make_tokens(lengths: list[int], seed: int, *, dtype: torch.dtype = torch.float64) -> LossTokens:
    """Random tokens with log-probs about 0.3 apart; about a third of the rows have advantage 0."""
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
        current_logprobs_N=(behavior_N + 0.3 * normal(count)).clamp(max=-1e-3),
        proximal_logprobs_N=(behavior_N + 0.3 * normal(count)).clamp(max=-1e-3),
        behavior_logprobs_N=behavior_N,
        advantages_N=advantages_N,
        behavior_weights_N=0.2 + 1.8 * uniform(count),
        lengths_B=lengths_B,
    )


def select(tokens: LossTokens, options: LossOptions, seed: int = 3) -> LossTokens:
    """The tokens with those chosen by the loss's selection, which sees all of them."""
    choose = find_loss(options.name).select
    return tokens if choose is None else replace(tokens, chosen_N=choose(tokens, options, seed=seed))


def run(tokens: LossTokens, options: LossOptions, shares_N: Tensor) -> tuple[Tensor, Tensor, LossTerms]:
    """(loss, its gradient with respect to the current log-probs, terms)."""
    current_N = tokens.current_logprobs_N.detach().clone().requires_grad_()
    terms = policy_loss(replace(tokens, current_logprobs_N=current_N), options)
    loss = policy_loss_sum(terms, shares_N)
    loss.backward()
    assert current_N.grad is not None
    assert not any(mark.requires_grad for mark in terms.marks.values())
    return loss.detach(), current_N.grad, terms


def losses_and_gradients(tokens: LossTokens, options: LossOptions) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(losses of the tokens, gradient of their sum, marks), after the loss's selection."""
    tokens = select(tokens, options)
    _, gradient_N, terms = run(tokens, options, torch.ones_like(tokens.advantages_N))
    return terms.losses_N.detach(), gradient_N, terms.marks
