"""Blocks of 16 tokens for the KV cache on CPUs, for short sequences (benchmarks/cache_blocks.py).

vLLM's blocks hold a multiple of 32 tokens, by default 128. Its attention reads 32 tokens at once, however few of them
there are, and a key's elements lie as far apart as a block has tokens. For blocks of 16 it has a kernel that reads 16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.kv_cache_interface import KVCacheSpec

LEAST_BLOCK_TOKENS = 32  # vLLM's: its configuration warns of what is no multiple
SMALL_BLOCK_TOKENS = 16


def allow_small_blocks() -> None:
    """Makes vLLM's attention on CPUs accept small blocks, in this process and its forks. May be called twice."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    def block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(SMALL_BLOCK_TOKENS)]

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(block_sizes)  # type: ignore[method-assign]


def use_small_blocks(config: VllmConfig) -> None:
    """Takes small blocks in place of vLLM's least, unless the model has Mamba layers, MLA or a quantised cache, or the
    processor has a kernel of its own (AMX for bfloat16, ARM): these need other sizes.
    """
    from vllm.utils.torch_utils import is_quantized_kv_cache
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = config.model_config, config.cache_config
    if cache.block_size != LEAST_BLOCK_TOKENS or model.is_hybrid or model.use_mla:
        return
    if is_quantized_kv_cache(cache.cache_dtype):
        return
    if _get_attn_isa(model.dtype, cache.block_size, model.get_head_size()) in ("vec", "vec16"):
        cache.block_size = SMALL_BLOCK_TOKENS
