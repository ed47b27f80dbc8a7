"""Computes a prompt once for all rows of a group that vLLM starts in the same step on a CPU.

vLLM shares a prompt by whole blocks of its cache, which have up to 128 tokens, and without prefix caching not at all,
so each row would compute the rest. Here the first row does, and the rows behind it compute only the prompt's last
token, whose logits they need. In each layer the keys and values of the rest are written to the blocks of these rows,
too. vLLM allocates the blocks as it does for tokens that a connector loads. With prompts of 256 tokens and answers of
32, a step of training takes 0.85 of the processor time (benchmarks/records/step_cpu_prompts.json).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase


def plain_block_tokens(config: VllmConfig, cache: KVCacheConfig) -> int:
    """The tokens of a block of a cache on a CPU whose layers keep nothing but keys and values; otherwise 0."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if config.device_config.device_type != "cpu" or [type(spec) for spec in specs] != [FullAttentionSpec]:
        return 0
    if config.use_v2_model_runner:
        return 0
    return specs[0].block_size


def schedule_prompts_once(scheduler: Scheduler) -> None:
    """Makes the scheduler take the prompt of a waiting row for computed, except for its last token, if the row before
    it has the same one. Rows start in their order, so that the rows of a step that have this prompt begin with one
    that computes it.
    """
    block_tokens = plain_block_tokens(scheduler.vllm_config, scheduler.kv_cache_config)
    if not block_tokens:
        return
    assert not scheduler.scheduler_config.enable_chunked_prefill, "a row computes its whole prompt in one step"
    manager = scheduler.kv_cache_manager
    schedule, get_computed_blocks, allocate = scheduler.schedule, manager.get_computed_blocks, manager.allocate_slots
    following: set[str] = set()
    """Rows whose prompt another row computes if they start in this step."""

    @functools.wraps(schedule)
    def share(throttle_prefills: bool = False) -> SchedulerOutput:
        following.update(request.request_id for request in followers(scheduler.waiting))
        try:
            output = schedule(throttle_prefills)
            for before, row in pairwise([None, *output.scheduled_new_reqs]):
                follows = before is not None and before.prompt_token_ids == row.prompt_token_ids
                assert follows or row.req_id not in following, "a row starts behind the one that computes its prompt"
            return output
        finally:
            following.clear()  # the rows with their prompt have started, so the next one computes it

    @functools.wraps(get_computed_blocks)
    def get_more_computed(request: Request) -> tuple[KVCacheBlocks, int, int]:
        blocks, num_tokens, boundary = get_computed_blocks(request)
        if request.request_id in following:
            num_tokens = request.num_prompt_tokens - 1  # more than is in the blocks: `allocate_slots` adds others
        return blocks, num_tokens, boundary

    @functools.wraps(allocate)
    def allocate_slots(
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        **others: object,
    ) -> KVCacheBlocks | None:
        if request.request_id in following:
            assert new_computed_blocks is not None
            found = block_tokens * len(new_computed_blocks.blocks[0])
            others["num_external_computed_tokens"] = num_new_computed_tokens - found
            num_new_computed_tokens = found
        computed = num_new_computed_tokens, new_computed_blocks
        return allocate(request, num_new_tokens, *computed, **others)  # type: ignore[arg-type]

    scheduler.schedule = share  # type: ignore[method-assign]
    manager.get_computed_blocks = get_more_computed  # type: ignore[method-assign]
    manager.allocate_slots = allocate_slots  # type: ignore[method-assign]


def followers(waiting: Iterable[Request]) -> list[Request]:
    """Rows that have not begun, and whose prompt of two tokens and more is that of such a row just before them. Their
    salts are the same, too. So they may both read the cache or not, and it has for one what it has for the other.
    """
    found = []
    before: Request | None = None
    for request in waiting:
        if request.num_preemptions:
            before = None
        elif before is not None and request.num_prompt_tokens > 1 and _prompt(request) == _prompt(before):
            found.append(request)
        else:
            before = request
    return found


def _prompt(request: Request) -> tuple[object, object]:
    return request.cache_salt, request.prompt_token_ids


def copy_prompts(worker: WorkerBase) -> None:
    """Makes the worker write the keys and values of a prompt to the blocks of all rows that start with it."""
    runner = cast("GPUModelRunner", worker.model_runner)
    block_tokens = plain_block_tokens(worker.vllm_config, runner.kv_cache_config)
    if not block_tokens:
        return
    copies: list[torch.Tensor] = []
    """Of the step's tokens, those to copy, and their slots in the cache. Empty if nothing is to be copied."""
    prepare_inputs = runner._prepare_inputs

    @functools.wraps(prepare_inputs)
    def prepare(scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int64]) -> object:
        prepared = prepare_inputs(scheduler_output, num_scheduled_tokens)
        starts = dict(zip(runner.input_batch.req_ids, runner.query_start_loc.np.tolist(), strict=False))
        sources, slots = copied_tokens(scheduler_output.scheduled_new_reqs, starts, block_tokens)
        copies[:] = [torch.tensor(sources), torch.tensor(slots)] if sources else []
        return prepared

    def copying(update: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(update)
        def copy(layer: object, key: torch.Tensor, value: torch.Tensor, cache: object, slots: object) -> None:
            update(layer, key, value, cache, slots)
            if copies:
                update(layer, key.index_select(0, copies[0]), value.index_select(0, copies[0]), cache, copies[1])

        return copy

    runner._prepare_inputs = prepare
    layers = worker.vllm_config.compilation_config.static_forward_context
    for layer in (layers[name] for name in runner.kv_cache_config.kv_cache_groups[0].layer_names):
        layer.impl.do_kv_cache_update = copying(layer.impl.do_kv_cache_update)


def copied_tokens(
    rows: Sequence[NewRequestData], starts: dict[str, int], block_tokens: int
) -> tuple[list[int], list[int]]:
    """For the rows that start in a step: tokens of the step that are copied, and the slots that they are copied to.
    `starts`: where the tokens of a row begin.
    """
    sources: list[int] = []
    slots: list[int] = []
    computing: NewRequestData | None = None
    for row in rows:
        assert row.prompt_token_ids is not None
        end = len(row.prompt_token_ids) - 1
        follows = computing is not None and computing.prompt_token_ids == row.prompt_token_ids
        if computing is None or not follows or row.num_computed_tokens != end:
            assert row.num_computed_tokens % block_tokens == 0, "vLLM shares whole blocks, a row computes the rest"
            computing = row
            continue
        (blocks,), (computed,) = row.block_ids, computing.block_ids
        shared = next(place for place in range(len(blocks)) if blocks[place] != computed[place])
        begin = max(shared * block_tokens, computing.num_computed_tokens)
        first = starts[computing.req_id] - computing.num_computed_tokens
        sources += range(first + begin, first + end)
        slots += [blocks[place // block_tokens] * block_tokens + place % block_tokens for place in range(begin, end)]
    return sources, slots
