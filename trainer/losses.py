"""Policy losses and their aggregation. Pure functions of tensors; advantages arrive as one float a token.

A loss function returns the loss of every token; `token_shares` says how much of the batch's loss each token makes up. Both hold for any
shape, so a batch may be cut into micro-batches and spread over ranks in any way: the shares know the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.corrections import MAX_LOG_RATIO

DUAL_CLIP = 3.0
"""Where the loss of a token with negative advantage is cut off, however far its probability has risen (arXiv:1912.09729)."""


@dataclass(frozen=True, slots=True)
class ClipRange:
    """The importance ratio is clipped to [1 − low, 1 + high] (PPO arXiv:1707.06347; two bounds: DAPO arXiv:2503.14476)."""

    low: float
    high: float
    dual: float = DUAL_CLIP


TokenLoss = Callable[[Tensor, Tensor, Tensor, ClipRange], tuple[Tensor, Tensor]]
"""(current log-probs, proximal log-probs, advantages, clip range) → (loss of each token, whether it was clipped)."""


def clipped_surrogate(
    current_logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, clip: ClipRange
) -> tuple[Tensor, Tensor]:
    """−min(ρA, clip(ρ)A) with ρ = π_current/π_proximal, for A < 0 at most dual·|A|. Returns (losses, clipped), shaped as given."""
    ratio = (current_logprobs - proximal_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    losses = torch.maximum(unclipped, clipped)
    bounded = torch.where(advantages < 0, torch.minimum(losses, -advantages * clip.dual), losses)
    return bounded, (clipped > unclipped).detach()


POLICY_LOSSES: dict[str, TokenLoss] = {"clipped_surrogate": clipped_surrogate}


def policy_loss(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    behavior_weights: Tensor,
    shares: Tensor,
    *,
    clip: ClipRange,
    name: str = "clipped_surrogate",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ share · behavior_weight · token loss, and the sums {`clipped`: clipped tokens, `loss`: the same number, detached}.

    All arguments have one shape. Tokens with share 0 (prompt, tool, padding) enter neither; gradient flows through
    `current_logprobs` alone.
    """
    losses, clipped = POLICY_LOSSES[name](current_logprobs, proximal_logprobs, advantages, clip)
    loss = (losses * behavior_weights * shares).sum()
    return loss, {"loss": loss.detach().double(), "clipped": (clipped & (shares > 0)).double().sum()}


def token_shares(
    num_loss_tokens: Sequence[int], aggregation: Literal["token-mean", "seq-mean-token-mean"]
) -> list[float]:
    """What one token of each trajectory counts in the loss of the optimizer step that these trajectories (of all ranks) make up.

    `token-mean`: 1/N over all loss tokens (DAPO arXiv:2503.14476). `seq-mean-token-mean`: 1/(S·n_i), the mean over trajectories of
    each one's mean (GRPO arXiv:2402.03300). Trajectories without a loss token count in neither.
    """
    if aggregation == "token-mean":
        total = sum(num_loss_tokens)
        return [1.0 / total if n else 0.0 for n in num_loss_tokens]
    sequences = sum(1 for n in num_loss_tokens if n)
    return [1.0 / (sequences * n) if n else 0.0 for n in num_loss_tokens]
