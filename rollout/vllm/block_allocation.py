"""Leaves out the allocation of cache blocks for a token that its request's last block has room for, on CPUs.

vLLM goes through all of its block managers for every token of every request, to find most of the time that nothing
is to be done: blocks have 16 tokens or more (benchmarks/step_cpu.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.rollout.vllm.shared_prompts import plain_block_tokens

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def allocate_whole_blocks(scheduler: Scheduler) -> None:
    """Changes the scheduler's manager if the cache holds nothing but keys and values on a CPU."""
    if block_tokens := plain_block_tokens(scheduler.vllm_config, scheduler.kv_cache_config):
        skip_open_blocks(scheduler.kv_cache_manager, block_tokens)


def skip_open_blocks(manager: KVCacheManager, block_tokens: int) -> None:
    """Makes a manager with one group of layers allocate, and cache a full block, at the ends of blocks only."""
    allocate = manager.allocate_slots
    (layers,) = manager.coordinator.single_type_managers
    blocks_of = layers.req_to_blocks

    def allocate_slots(request: Request, num_new_tokens: int, **others: object) -> KVCacheBlocks | None:
        if num_new_tokens == 1 and others == {"num_lookahead_tokens": 0}:  # a request that is running
            end = request.num_computed_tokens + 1
            if end % block_tokens and end < block_tokens * len(blocks_of.get(request.request_id, ())):
                return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, **others)  # type: ignore[arg-type]

    manager.allocate_slots = allocate_slots  # type: ignore[method-assign]
