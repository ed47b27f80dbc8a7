"""Random numbers of requests whose prompt ends with tokens that an earlier request sampled.

vLLM's model runner V1 has a generator for each seeded request and draws from it for every token. A resumed request has
to go on where the earlier one stopped: with the first numbers again, the noise of its first tokens would be used twice.
V2 derives the noise from the seed and the token's position, so nothing is to be done there.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.worker_base import WorkerBase

SAMPLED_TOKENS = "tandem_sampled_tokens"
"""Key of `SamplingParams.extra_args`: the number of tokens at the prompt's end that were sampled."""


def continue_random_numbers(worker: WorkerBase) -> None:
    """Makes the worker's model runner advance the generators of resumed requests as it adds them."""
    if worker.use_v2_model_runner:  # type: ignore[attr-defined]
        return
    runner: Any = worker.model_runner
    update_states = runner._update_states

    @functools.wraps(update_states)
    def update(scheduler_output: SchedulerOutput) -> object:
        updated = update_states(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            if params is not None and params.extra_args:
                generator = runner.requests[request.req_id].generator
                if generator is not None:  # greedy requests draw nothing
                    advance(generator, params.extra_args[SAMPLED_TOKENS], runner.input_batch.vocab_size)
        return updated

    runner._update_states = update


def advance(generator: torch.Generator, num_tokens: int, vocabulary_size: int) -> None:
    """Moves the generator as vLLM's TopKTopPSampler does when it samples so many tokens."""
    if generator.device.type == "cuda":  # a vector of noise for each token
        before = generator.get_offset()
        torch.empty(vocabulary_size, device=generator.device).exponential_(generator=generator)
        generator.set_offset(before + num_tokens * (generator.get_offset() - before))
    else:  # a seed for each token, from which its noise is made
        torch.randint(0, 2**31, (num_tokens,), generator=generator)
