"""Blocks of 16 tokens on CPUs: which samplers have them, what vLLM's kernel computes with them, and shared prompts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments
from tandem.rollout.vllm.launch import engine_config
from tandem.rollout.vllm.small_blocks import allow_small_blocks, use_small_blocks
from tests.support.tiny_model import build_tiny_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig


AMX_BLOCK = 32 if torch.cpu._is_amx_tile_supported() else 16


@pytest.mark.parametrize(
    ("dtype", "longest", "tokens", "caches"),
    [
        ("float32", 1, 16, False),
        ("float32", 127, 16, False),
        ("float32", 128, 128, True),
        ("bfloat16", 127, AMX_BLOCK, False),
    ],
)
def test_short_sequences_have_small_blocks(tmp_path: Path, dtype: str, longest: int, tokens: int, caches: bool) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    arguments = SamplerArguments(RolloutConfig(), str(build_tiny_model(tmp_path / "model")), dtype, longest, seed=0)
    cache = engine_config(arguments).cache_config
    assert (cache.block_size, cache.enable_prefix_caching) == (tokens, caches)
    allow_small_blocks()  # a second time changes nothing
    assert CPUAttentionBackend.supports_block_size(tokens) and not CPUAttentionBackend.supports_block_size(24)


def test_what_needs_other_sizes_keeps_them() -> None:
    def size(block: int = 32, cached: str = "auto", hybrid: bool = False, mla: bool = False) -> int:
        model = SimpleNamespace(dtype=torch.float32, is_hybrid=hybrid, use_mla=mla, get_head_size=lambda: 64)
        cache = SimpleNamespace(block_size=block, cache_dtype=cached)
        use_small_blocks(cast("VllmConfig", SimpleNamespace(model_config=model, cache_config=cache)))
        return cache.block_size

    assert (size(), size(256), size(cached="fp8"), size(hybrid=True), size(mla=True)) == (16, 256, 32, 32, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 80, 128])
def test_the_kernel_for_small_blocks_attends_as_torch(size: int, dtype: torch.dtype) -> None:
    """Sequences that end in their first, second and fourth block; new tokens at the end of each."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()
    isa = _get_attn_isa(dtype, 16, size)
    assert isa == "vec16"
    generator = torch.Generator().manual_seed(size)
    lengths, new, heads, kv_heads = (9, 17, 64), 3, 4, 2
    keys, values = (
        [torch.randn(length, kv_heads, size, generator=generator).to(dtype) for length in lengths] for _ in range(2)
    )
    queries = torch.randn(new * len(lengths), heads, size, generator=generator).to(dtype)
    cache = torch.zeros(10, kv_heads, 16 * 2, size, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    tables = torch.tensor([[7, 0, 0, 0], [2, 9, 0, 0], [1, 8, 3, 5]], dtype=torch.int32)
    for key, value, table in zip(keys, values, tables, strict=True):
        slots = torch.tensor([int(table[place // 16]) * 16 + place % 16 for place in range(len(key))])
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    starts = torch.arange(0, len(queries) + 1, new, dtype=torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        len(lengths), heads, kv_heads, size, ends, dtype, starts, True, -1, isa, enable_kv_split=True
    )
    found = torch.zeros_like(queries)
    ops.cpu_attention_with_kv_cache(
        queries, key_cache, value_cache, found, starts, ends, 0.2, True, None, -1, tables, 0.0, plan, None
    )
    expected = torch.cat([_attended(*states) for states in zip(queries.split(new), keys, values, strict=True)])
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, rtol=close, atol=close)


def _attended(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor) -> Tensor:
    """(T, H, D) of a sequence's last tokens, in float32."""
    states = [each.float().transpose(0, 1)[None] for each in (query_THD, key_THD, value_THD)]
    num_queries, num_keys = len(query_THD), len(key_THD)
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    found = functional.scaled_dot_product_attention(*states, attn_mask=seen, scale=0.2, enable_gqa=True)
    return found[0].transpose(0, 1)
