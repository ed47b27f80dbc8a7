"""Top-k on CPUs that keeps k tokens, also where the last of them has equals.

On CPUs vLLM keeps all tokens whose logit equals the k-th largest. A request gets the log-probs of k candidates, so the
others would be missing in its sampling mask. On GPUs vLLM keeps k tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

Truncation = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


def keep_k_tokens() -> None:
    """Changes vLLM's truncation in this process."""
    from vllm.v1.sample.ops import topk_topp_sampler

    truncate = topk_topp_sampler.apply_top_k_top_p
    if not hasattr(truncate, "__wrapped__"):
        topk_topp_sampler.apply_top_k_top_p = without_equals(truncate)


def without_equals(truncate: Truncation) -> Truncation:
    """Takes logits (B, V), top-k (B,) or None and top-p (B,) or None; what was cut off is −∞ in the result."""

    @functools.wraps(truncate)
    def exact(logits_BV: Tensor, k_B: Tensor | None, p_B: Tensor | None) -> Tensor:
        left_BV = truncate(logits_BV, k_B, p_B)
        if k_B is not None:
            surplus_B = (left_BV > -torch.inf).sum(-1) > k_B
            for row in surplus_B.nonzero()[:, 0].tolist():
                top = left_BV[row].topk(int(k_B[row]))
                left_BV[row] = torch.full_like(left_BV[row], -torch.inf).scatter(0, top.indices, top.values)
        return left_BV

    return exact
