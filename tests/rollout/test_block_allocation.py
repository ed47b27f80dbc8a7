"""Allocation of cache blocks at the ends of blocks only, against vLLM's own for every token."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.rollout.vllm.block_allocation import skip_open_blocks

BLOCK, BLOCKS = 8, 10
PROMPTS = {"a": 3, "b": 4, "c": 5, "d": 1}


def manager_of(*, caching: bool) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, 64, BLOCK, BLOCK, enable_caching=caching)


def requests_of() -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    params = SamplingParams(max_tokens=32)
    return {name: Request(name, [7] * size, params, None, block_hasher=hasher) for name, size in PROMPTS.items()}


def play(manager: Any) -> tuple[list[tuple[str, object, object, int]], int]:
    """Starts the requests, and gives each a token in turn until the cache is full. Returns the block ids of each and
    the free blocks after every allocation, and the number of allocations.
    """
    from vllm.v1.request import RequestStatus

    calls = 0
    allocate_new_blocks = manager.coordinator.allocate_new_blocks

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return allocate_new_blocks(*arguments)

    manager.coordinator.allocate_new_blocks = counted
    history: list[tuple[str, object, object, int]] = []
    requests = requests_of()
    for name, request in requests.items():
        computed, num_computed = manager.get_computed_blocks(request)[:2]
        new = PROMPTS[name] - num_computed
        manager.allocate_slots(request, new, num_new_computed_tokens=num_computed, new_computed_blocks=computed)
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, PROMPTS[name]
    for _ in range(32):
        for name, request in requests.items():
            request.append_output_token_ids(7)
            found = manager.allocate_slots(request, 1, num_lookahead_tokens=0)
            new_blocks = None if found is None else found.get_block_ids()
            history.append((name, new_blocks, manager.get_block_ids(name), manager.block_pool.get_num_free_blocks()))
            if found is None:
                return history, calls
            request.num_computed_tokens += 1
    raise AssertionError("the cache never was full")


@pytest.mark.parametrize("caching", [False, True])
def test_the_same_blocks_are_allocated_cached_and_refused(caching: bool) -> None:
    own, changed = manager_of(caching=caching), manager_of(caching=caching)
    skip_open_blocks(changed, BLOCK)
    (expected, calls), (found, fewer) = play(own), play(changed)
    assert found == expected and found[-1][1] is None, "it ends with a token for which no block is free"
    assert fewer < calls / 2
    num_cached = [len(manager.block_pool.cached_block_hash_to_block) for manager in (own, changed)]
    assert num_cached[0] == num_cached[1] and caching == bool(num_cached[0])
