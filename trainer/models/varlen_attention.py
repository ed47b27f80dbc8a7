"""Variable-length attention: concatenated rows of any lengths, each attending only to itself, at the cost of the rows
instead of the square of their sum.

Uses flash attention's package through transformers if it is installed, else the copy in torch's CUDA builds, registered
as an attention implementation of transformers. Half precision on CUDA only. benchmarks/gpu_proof.py compares it with
padded rows; trainer/models/flat_rows.py checks the model's results at start-up.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from transformers.utils import is_flash_attn_2_available

TORCH_VARLEN = "torch_varlen"
_kernel = varlen.varlen_attn
if "enable_gqa" in inspect.signature(_kernel).parameters:  # before torch 2.12, heads may share keys without it
    _kernel = partial(_kernel, enable_gqa=True)


def varlen_attention(model: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """The argument for `model.set_attn_implementation`; None if this model, the dtype of its forward pass or this
    device has no implementation.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    if not model._supports_flash_attn or model._compatible_flash_implementations:
        return None  # neither supports additions such as learned sinks
    if is_flash_attn_2_available():
        return "flash_attention_2"
    config = model.config.get_text_config()
    num_heads, soft_cap = config.num_attention_heads, getattr(config, "attn_logit_softcapping", None)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    shape = num_heads, getattr(config, "num_key_value_heads", None) or num_heads, head_size
    return TORCH_VARLEN if soft_cap is None and kernel_runs(device, dtype, *shape) else None


@cache
def kernel_runs(device: torch.device, dtype: torch.dtype, num_heads: int, num_shared: int, head_size: int) -> bool:
    """Runs torch's kernel on two rows, forward and backward, because support differs between builds and cards."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    query, key = (
        torch.ones(8, heads, head_size, device=device, dtype=dtype, requires_grad=True)
        for heads in (num_heads, num_shared)
    )
    ends = torch.tensor([0, 3, 8], device=device, dtype=torch.int32)
    try:
        with torch.enable_grad():
            attend_varlen(query, key, key, (ends, ends), (5, 5)).sum().backward()
    except RuntimeError:
        return False
    return True


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None = None,
    window: int | None = None,
    is_causal: bool = True,
) -> Tensor:
    """torch's variable-length attention over sequences end to end: (queries, heads, size) → the same.

    `ends` and `longest` are those of queries and of keys. A sequence with fewer queries than keys has the last ones. A
    window of w is the token and the w − 1 before it.
    """
    left = -1 if window is None or window >= longest[1] else window - 1  # the kernel does not count the token itself
    value_size, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    value = functional.pad(value, [0, missing]) if missing else value  # the kernel needs one size for all
    sides = left, 0 if is_causal else left
    found = _kernel(query, key, value, *ends, *longest, scale=scale, window_size=sides)
    assert isinstance(found, Tensor)
    return found[..., :value_size]


def torch_varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **named: object,
) -> tuple[Tensor, None]:
    """torch's variable-length attention with transformers' interface: (lines, heads, T, size) → (lines, T, heads,
    size).

    Without ends every line is a row. Raises ValueError for arguments that the kernel does not support.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if named.get(name) is not None]
    if attention_mask is not None or dropout or unknown:
        raise ValueError(f"torch's variable-length attention knows no {', '.join(unknown) or 'mask or dropout'}")
    num_lines, num_heads, length, _ = query.shape
    ends, longest = cu_seq_lens_q, max_length_q
    if ends is None or longest is None:
        ends = torch.arange(0, (num_lines + 1) * length, length, device=query.device, dtype=torch.int32)
        longest = length
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    query, key, value = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    found = attend_varlen(
        query, key, value, (ends, ends), (longest, longest), scale=scaling, window=sliding_window, is_causal=causal
    )
    return found.view(num_lines, length, num_heads, -1), None


AttentionInterface.register(TORCH_VARLEN, torch_varlen_attention)
AttentionMaskInterface.register(TORCH_VARLEN, flash_attention_mask)  # no mask: the rows' ends separate them
