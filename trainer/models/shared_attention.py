"""Attention over rows that share prompts (trainer/batch/shared_prompts.py), an implementation for transformers.

All other layers see one line of tokens. Here keys and values are gathered for each sequence, so that every answer sees
its prompt's without computing them again, at the cost of separate rows' attention. On CUDA in half precision this is
torch's variable-length attention, elsewhere one masked attention for each block of similar squares.

R squares of a block, Q queries and K keys of each, H heads, D size of a head, T tokens of the line.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from tandem.trainer.batch.shared_prompts import AttentionBlock, SharedPrompts
from tandem.trainer.models.varlen_attention import TORCH_VARLEN, attend_varlen, kernel_runs

SHARED_PROMPTS = "shared_prompts"
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def why_not_shared(model: Any, attention: str) -> str | None:
    """Why this model, which runs separate rows with `attention`, has no attention over shared prompts; None if it has.
    A model without a reason must still be measured (trainer/models/flat_rows.py).
    """
    config = model.config.get_text_config()
    if attention not in ("sdpa", "flash_attention_2", TORCH_VARLEN):
        return f"its attention is {attention}"
    if not model._supports_flash_attn or model._compatible_flash_implementations:
        return "its attention is not transformers' common one"
    if attention != "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention caps logits"
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS)
    return f"it has layers of {unknown[0]}" if unknown else None


def shared_prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    shared_prompts: SharedPrompts | None = None,
    **named: object,
) -> tuple[Tensor, None]:
    """(1, H, T, D) → (1, T, H, D), by transformers' interface. Raises ValueError for a model that passes masks or
    additions, or does not pass `shared_prompts` on.
    """
    unknown = [name for name in ("s_aux", "position_bias") if named.get(name) is not None]
    if attention_mask is not None or dropout or unknown:
        raise ValueError(f"attention over shared prompts knows no {', '.join(unknown) or 'mask or dropout'}")
    if shared_prompts is None:
        raise ValueError("the model does not pass shared prompts on to its attention")
    query_THD, key_THD, value_THD = (states[0].transpose(0, 1) for states in (query, key, value))
    num_heads, num_shared, size = query.shape[1], key.shape[1], query.shape[-1]
    if kernel_runs(query.device, query.dtype, num_heads, num_shared, size):
        varlen = shared_prompts.varlen
        found_THD = attend_varlen(
            query_THD,
            key_THD.index_select(0, varlen.keys),
            value_THD.index_select(0, varlen.keys),
            (varlen.query_ends, varlen.key_ends),
            (varlen.most_queries, varlen.most_keys),
            scale=scaling,
            window=sliding_window,
        )
        return found_THD[None], None
    attention = shared_prompts.attention
    parts = [_attend(one, query_THD, key_THD, value_THD, scaling, sliding_window) for one in attention.blocks]
    return torch.cat(parts).index_select(0, attention.places_T)[None], None


def _attend(
    block: AttentionBlock,
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """The results of all queries of a block, (R·Q, H, D)."""
    query = _gather(query_THD, block.queries.columns)
    key, value = _gather(key_THD, block.keys.columns), _gather(value_THD, block.keys.columns)
    window = None if window is None or window >= block.keys.columns.shape[1] else window
    is_causal = window is None and block.is_causal
    if query.is_cuda and not is_causal:  # CUDA's fused kernels take no mask if several heads share a key
        key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value))
    found = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        None if is_causal else block.mask(window, query.dtype),
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2).flatten(0, 1)


def _gather(states_THD: Tensor, columns_RK: Tensor) -> Tensor:
    """(R, H, K, D)."""
    gathered = states_THD.index_select(0, columns_RK.flatten())
    return gathered.view(*columns_RK.shape, *states_THD.shape[1:]).transpose(1, 2)


AttentionInterface.register(SHARED_PROMPTS, shared_prompt_attention)
