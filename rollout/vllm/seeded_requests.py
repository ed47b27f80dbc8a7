"""Random numbers of requests that have a seed.

vLLM's model runner V1 has a generator for each seeded request and draws from it for every token. A request whose prompt
ends with tokens that an earlier one sampled has to go on where that one stopped: with the first numbers again, the
noise of its first tokens would be used twice. V2 derives the noise from the seed and the token's position, so nothing
is to be done there.

On CPUs vLLM draws one number for each token of each request. Here several are drawn at once, which are the same
(benchmarks/step_cpu.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

SAMPLED_TOKENS = "tandem_sampled_tokens"
"""Key of `SamplingParams.extra_args`: the number of tokens at the prompt's end that were sampled."""
_DRAWN_TOGETHER = 8


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


def draw_seeds_together(worker: WorkerBase) -> None:
    """Changes the sampling of the worker's model runner, which must be on a CPU."""
    if worker.use_v2_model_runner:  # type: ignore[attr-defined]
        return
    from vllm.v1.sample.ops import topk_topp_sampler

    runner = cast("GPUModelRunner", worker.model_runner)
    sampler = runner.sampler.topk_topp_sampler
    assert sampler.logprobs_mode == "processed_logprobs" and not sampler.use_fp64_gumbel, "as the engine was started"
    seeds = TokenSeeds()

    def forward(
        logits_BV: Tensor, generators: Mapping[int, Generator], k_B: Tensor | None, p_B: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        left_BV = topk_topp_sampler.apply_top_k_top_p(logits_BV, k_B, p_B)
        seeds_B = torch.randint(0, 2**31, (len(left_BV),))
        if generators:
            seeds_B[[*generators]] = torch.tensor(seeds.next(generators.values()))
        sampled_B = torch.ops._C.fused_gumbel_argmax(left_BV.to(torch.float32), seeds_B)
        return sampled_B, left_BV.log_softmax(-1, dtype=torch.float32)

    sampler.forward = forward  # type: ignore[method-assign]


class TokenSeeds:
    """The seeds of a request's tokens, from which their noise is made."""

    def __init__(self) -> None:
        self._drawn: WeakKeyDictionary[Generator, list[int]] = WeakKeyDictionary()

    def next(self, generators: Iterable[Generator]) -> list[int]:
        """The next number of each generator, as if one were drawn from it now."""
        found = []
        for generator in generators:
            drawn = self._drawn.get(generator)
            if not drawn:
                drawn = self._drawn[generator] = _draw(generator, _DRAWN_TOGETHER).tolist()[::-1]
            found.append(drawn.pop())
        return found


def _draw(generator: Generator, number: int) -> Tensor:
    return torch.randint(0, 2**31, (number,), generator=generator)


def advance(generator: Generator, num_tokens: int, vocabulary_size: int) -> None:
    """Moves the generator as vLLM's TopKTopPSampler does when it samples so many tokens."""
    if generator.device.type == "cuda":  # a vector of noise for each token
        before = generator.get_offset()
        torch.empty(vocabulary_size, device=generator.device).exponential_(generator=generator)
        generator.set_offset(before + num_tokens * (generator.get_offset() - before))
    else:  # a seed for each token, from which its noise is made
        _draw(generator, num_tokens)
