"""Computes a short prompt once for all rows of a group that vLLM starts in the same step on a CPU.

vLLM shares prompts by whole blocks of its cache, which have up to 128 tokens, and without prefix caching none. So each
row would compute a prompt that is not longer than a block, or, without caching, any prompt. Here the first row does,
and the rows that follow it compute only the prompt's last token, whose logits they need. In each layer the keys and
values of the tokens before it are written to the blocks of these rows, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm.config import VllmConfig
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


def longest_shared_prompt(config: VllmConfig, cache: KVCacheConfig) -> int:
    """The tokens of the longest prompt that is computed once here: what vLLM does not share itself; 0 for none."""
    block_tokens = plain_block_tokens(config, cache)
    if not block_tokens or config.cache_config.enable_prefix_caching:
        return block_tokens
    return int(config.model_config.max_model_len)


def schedule_prompts_once(scheduler: Scheduler) -> None:
    """Makes the scheduler take the prompt of a waiting row for computed, except for its last token, if the row before
    it has the same one. Rows start in their order, so that the rows of a step that have this prompt begin with one
    that computes it.
    """
    longest = longest_shared_prompt(scheduler.vllm_config, scheduler.kv_cache_config)
    if not longest:
        return
    schedule = scheduler.schedule

    @functools.wraps(schedule)
    def share(throttle_prefills: bool = False) -> SchedulerOutput:
        for request in followers(scheduler.waiting, longest):
            request.num_computed_tokens = request.num_prompt_tokens - 1
        try:
            return schedule(throttle_prefills)
        finally:
            for request in scheduler.waiting:  # the rows with their prompt have started, so the next one computes it
                request.num_computed_tokens = 0

    scheduler.schedule = share  # type: ignore[method-assign]


def followers(waiting: Iterable[Request], longest: int) -> list[Request]:
    """Rows that have not begun, and whose prompt of 2 to `longest` tokens is that of such a row just before them."""
    found = []
    prompt: Sequence[int] | None = None
    for request in waiting:
        if request.num_output_tokens:  # preempted
            prompt = None
        elif prompt is not None and 1 < len(prompt) <= longest and request.prompt_token_ids == prompt:
            found.append(request)
        else:
            prompt = request.prompt_token_ids
    return found


def copy_prompts(worker: WorkerBase) -> None:
    """Makes the worker write the keys and values of a prompt to the blocks of all rows that start with it."""
    runner = cast("GPUModelRunner", worker.model_runner)
    block_tokens = plain_block_tokens(worker.vllm_config, runner.kv_cache_config)
    if not (longest := longest_shared_prompt(worker.vllm_config, runner.kv_cache_config)):
        return
    copies: list[torch.Tensor] = []
    """Of the step's tokens, those to copy, and their slots in the cache. Empty if nothing is to be copied."""
    prepare_inputs = runner._prepare_inputs

    @functools.wraps(prepare_inputs)
    def prepare(scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int64]) -> object:
        prepared = prepare_inputs(scheduler_output, num_scheduled_tokens)
        starts = dict(zip(runner.input_batch.req_ids, runner.query_start_loc.np.tolist(), strict=False))
        sources, slots = copied_tokens(scheduler_output.scheduled_new_reqs, starts, block_tokens, longest)
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
    rows: Sequence[NewRequestData], starts: dict[str, int], block_tokens: int, longest: int
) -> tuple[list[int], list[int]]:
    """For the rows that start in a step: tokens of the step that are copied, and the slots that they are copied to.
    `starts`: where the tokens of a row begin.
    """
    sources: list[int] = []
    slots: list[int] = []
    computing: NewRequestData | None = None
    for row in rows:
        if not 0 < row.num_computed_tokens < longest:  # more are of vLLM's own shared blocks
            computing = row
            continue
        assert computing is not None and computing.prompt_token_ids == row.prompt_token_ids, "a row computes the prompt"
        first, (blocks,) = starts[computing.req_id], row.block_ids
        sources += range(first, first + row.num_computed_tokens)
        for start in range(0, row.num_computed_tokens, block_tokens):
            slot = blocks[start // block_tokens] * block_tokens
            slots += range(slot, slot + min(block_tokens, row.num_computed_tokens - start))
    return sources, slots
