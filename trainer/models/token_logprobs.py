"""Log-probabilities of given tokens, and the entropy and Σπ² of their distributions, without storing all logits.

N tokens over a vocabulary of V have N·V logits: 4,096 tokens of 151,936 take 2.5 GB in float32, and several times that
with the softmax and its gradient. This module applies the output head to one chunk of tokens at a time. The backward
pass recomputes each chunk and adds its part of the gradients. With z the logits divided by the temperature,
π = softmax(z), H its entropy, S = Σπ²:

    ∂ log π(y)/∂z = 1[y] − π        ∂H/∂z = −π·(log π + H)        ∂S/∂z = 2π·(π − S)

Where truncation (top-k, top-p, min-p) left only some tokens to sample from, π is the softmax over these, and all three
statistics are π's; z of the others has no gradient.

N tokens, H hidden size, V vocabulary. From the logits on, everything is float32 (float64 for float64 inputs).
In bfloat16 on CPUs, the gradients of several chunks' logits are kept, and the head's gradient is added to once for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tandem.trainer.batch.kept_tokens import KeptTokens

_CHUNK_LOGITS = 1 << 25
"""Logits of one chunk: 128 MiB in float32; at most three copies exist at a time."""
_CUT_OFF = -1e4
"""log π of what truncation cut off: π is exactly 0, and π·log π is 0, which −∞ would make NaN."""
_CHUNK_LOGITS_ON_CUDA = 1 << 27
"""Each chunk also reads and writes the gradient of the whole head; larger chunks do so less often."""
_KEPT_SLOPES = 1 << 27
"""In bfloat16, gradients of so many logits are kept (256 MiB), so that the gradient of the head is added to less often
(benchmarks/head_gradient.py)."""


class TokenStatistics(NamedTuple):
    """For N tokens: log π(token) and, on request, the entropy (nats) of its distribution π and Σπ²."""

    logprobs_N: Tensor
    entropy_N: Tensor | None
    squared_probs_N: Tensor | None


def token_statistics(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    temperature_N: Tensor,
    kept: KeptTokens | None = None,
    *,
    entropy: bool = False,
    squared_probs: bool = False,
) -> TokenStatistics:
    """The statistics of softmax((hidden·weightᵀ + bias)/temperature) over the kept tokens at the targets.

    Gradients of all three flow to hidden states, weight and bias; there are no second derivatives. Without tokens the
    statistics are empty and the gradients zero. Hidden states that are not finite, or a temperature of 0, give NaN; the
    optimizer step is then skipped and counted.
    """
    num_tokens, hidden_size = hidden_NH.shape
    assert weight_VH.ndim == 2 and weight_VH.shape[1] == hidden_size, (weight_VH.shape, hidden_NH.shape)
    assert bias_V is None or bias_V.shape == weight_VH.shape[:1], (bias_V, weight_VH.shape)
    assert target_N.shape == temperature_N.shape == (num_tokens,), (target_N.shape, temperature_N.shape, num_tokens)
    arguments = hidden_NH, weight_VH, bias_V, target_N, temperature_N, kept, entropy, squared_probs
    return TokenStatistics(*_ChunkedStatistics.apply(*arguments))  # type: ignore[no-untyped-call]


def statistics_from_logits(
    logits_NV: Tensor,
    target_N: Tensor,
    temperature_N: Tensor,
    kept: KeptTokens | None = None,
    *,
    entropy: bool = False,
    squared_probs: bool = False,
) -> TokenStatistics:
    """The same statistics from existing logits, for models that change their logits after the output head."""
    scaled_NV = logits_NV.to(_wide_type(logits_NV)) / temperature_N[:, None]
    logprobs_NV = _log_softmax(scaled_NV, kept, slice(0, len(target_N)))
    return TokenStatistics(
        logprobs_N=logprobs_NV.gather(1, target_N[:, None]).squeeze(1),
        entropy_N=-(logprobs_NV.exp() * logprobs_NV).sum(-1) if entropy else None,
        squared_probs_N=(2 * logprobs_NV).exp().sum(-1) if squared_probs else None,
    )


class _ChunkedStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature_N: Tensor,
        kept: KeptTokens | None,
        entropy: bool,
        squared_probs: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logprobs_N = hidden_NH.new_empty(len(hidden_NH), dtype=_wide_type(hidden_NH))
        entropy_N = torch.empty_like(logprobs_N) if entropy else None
        squared_N = torch.empty_like(logprobs_N) if squared_probs else None
        for part in _chunks(hidden_NH, weight_VH):
            logprobs_CV = _logprobs(hidden_NH, weight_VH, bias_V, temperature_N, kept, part)
            logprobs_N[part] = logprobs_CV.gather(1, target_N[part, None]).squeeze(1)
            if entropy_N is None and squared_N is None:
                continue
            probs_CV = logprobs_CV.exp()
            if squared_N is not None:
                squared_N[part] = torch.linalg.vector_norm(probs_CV, dim=-1).square()
            if entropy_N is not None:
                entropy_N[part] = -probs_CV.mul_(logprobs_CV).sum(-1)
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_N, temperature_N, entropy_N, squared_N)
        return logprobs_N, entropy_N, squared_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, target_N, temperature_N, entropy_N, squared_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden_NH) if needs_hidden else None
        weight_grad: Tensor | None = None
        bias_grad = torch.zeros_like(bias_V, dtype=_wide_type(hidden_NH)) if needs_bias else None

        def slopes_of(part: slice) -> Tensor:
            # The gradients of a chunk's logits; adds their part of the bias's gradient.
            slopes_CV = _logit_gradient(
                _logprobs(hidden_NH, weight_VH, bias_V, temperature_N, ctx.kept, part),
                target_N[part],
                [None if gradient is None else gradient[part] for gradient in gradients],
                None if entropy_N is None else entropy_N[part],
                None if squared_N is None else squared_N[part],
            )
            slopes_CV /= temperature_N[part, None]
            if bias_grad is not None:
                bias_grad.add_(slopes_CV.sum(0))
            return slopes_CV

        groups = _groups(hidden_NH, weight_VH) if needs_weight else _chunks(hidden_NH, weight_VH)
        for group in groups:
            slopes_GV = _joined(slopes_of, group, hidden_NH, weight_VH)
            if hidden_grad is not None:
                torch.mm(slopes_GV, weight_VH, out=hidden_grad[group])
            if needs_weight:
                weight_grad = _added(weight_grad, slopes_GV, hidden_NH[group], alone=len(groups) == 1)
            del slopes_GV  # before the next ones take memory
        if needs_weight and weight_grad is None:  # no tokens
            weight_grad = torch.zeros_like(weight_VH)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight_VH.dtype),
            None if bias_grad is None else bias_grad.to(bias_V.dtype),
            *[None] * 5,
        )


def _logit_gradient(
    logprobs_CV: Tensor,
    target_C: Tensor,
    gradients: list[Tensor | None],
    entropy_C: Tensor | None,
    squared_C: Tensor | None,
) -> Tensor:
    # Sum of the three formulas above, each times its gradient; overwrites `logprobs_CV` where it can.
    of_logprob_C, of_entropy_C, of_squared_C = gradients
    if of_entropy_C is None and of_squared_C is None:
        slopes_CV = logprobs_CV.exp_()
        if of_logprob_C is not None:
            slopes_CV *= -of_logprob_C[:, None]
        else:
            slopes_CV.zero_()
    else:
        probs_CV = logprobs_CV.exp()
        slopes_CV = logprobs_CV
        if of_entropy_C is not None and entropy_C is not None:
            slopes_CV += entropy_C[:, None]
            slopes_CV *= -of_entropy_C[:, None]
        else:
            slopes_CV.zero_()
        if of_squared_C is not None and squared_C is not None:
            slopes_CV.addcmul_(probs_CV, 2 * of_squared_C[:, None])
            slopes_CV -= (2 * of_squared_C * squared_C)[:, None]
        if of_logprob_C is not None:
            slopes_CV -= of_logprob_C[:, None]
        slopes_CV *= probs_CV
    if of_logprob_C is not None:
        slopes_CV[torch.arange(len(target_C), device=target_C.device), target_C] += of_logprob_C
    return slopes_CV


def _logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    temperature_N: Tensor,
    kept: KeptTokens | None,
    chunk: slice,
) -> Tensor:
    logits_CV = functional.linear(hidden_NH[chunk], weight_VH, bias_V).to(_wide_type(hidden_NH))
    return _log_softmax(logits_CV.div_(temperature_N[chunk, None]), kept, chunk)


def _log_softmax(scaled_CV: Tensor, kept: KeptTokens | None, chunk: slice) -> Tensor:
    """Overwrites a chunk's scaled logits where tokens were cut off."""
    if kept is None:
        return functional.log_softmax(scaled_CV, dim=-1)
    scaled_CV = scaled_CV.masked_fill_(kept.cut_off(chunk, scaled_CV.shape[-1]), -torch.inf)
    return functional.log_softmax(scaled_CV, dim=-1).clamp(min=_CUT_OFF)


def _wide_type(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _chunks(hidden_NH: Tensor, weight_VH: Tensor) -> list[slice]:
    """The tokens whose logits are computed at once."""
    return _slices(slice(0, len(hidden_NH)), _chunk_size(hidden_NH, weight_VH))


def _groups(hidden_NH: Tensor, weight_VH: Tensor) -> list[slice]:
    """The tokens whose part of the head's gradient is computed at once: whole chunks."""
    size = _chunk_size(hidden_NH, weight_VH)
    if _wide_type(hidden_NH) != hidden_NH.dtype:
        size *= max(1, _KEPT_SLOPES // (size * len(weight_VH)))
    return _slices(slice(0, len(hidden_NH)), size)


def _chunk_size(hidden_NH: Tensor, weight_VH: Tensor) -> int:
    return max(1, (_CHUNK_LOGITS_ON_CUDA if hidden_NH.is_cuda else _CHUNK_LOGITS) // len(weight_VH))


def _slices(whole: slice, size: int) -> list[slice]:
    return [slice(first, min(first + size, whole.stop)) for first in range(whole.start, whole.stop, size)]


def _joined(slopes_of: Callable[[slice], Tensor], group: slice, hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """The gradients of a group's logits, computed chunk by chunk, in the type of the hidden states."""
    parts = _slices(group, _chunk_size(hidden_NH, weight_VH))
    if len(parts) == 1:
        return slopes_of(group).to(hidden_NH.dtype)
    slopes_GV = hidden_NH.new_empty((group.stop - group.start, len(weight_VH)))
    for part in parts:
        slopes_GV[part.start - group.start : part.stop - group.start] = slopes_of(part)
    return slopes_GV


def _added(total: Tensor | None, slopes_GV: Tensor, hidden_GH: Tensor, *, alone: bool) -> Tensor:
    """The head's gradient with the part of a group. Groups are summed in float32, without rounding at each one."""
    if total is not None and total.dtype == slopes_GV.dtype:
        return total.addmm_(slopes_GV.T, hidden_GH)
    part = slopes_GV.T @ hidden_GH
    if total is not None:
        return total.add_(part)
    return part if alone else part.to(_wide_type(part))
