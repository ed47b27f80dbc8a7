"""The random numbers of seeded requests on CPUs, against those that vLLM draws one at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from tandem.rollout.vllm.seeded_requests import TokenSeeds, advance, draw_seeds_together

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

ROWS, VOCABULARY, STEPS = 5, 32, 40


def generators(*rows: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(100 + row) for row in rows}


def one_at_a_time(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**31, (1,), generator=generator))


def test_each_generator_gives_the_numbers_that_it_gives_one_at_a_time() -> None:
    together, alone = generators(0, 1, 2), generators(0, 1, 2)
    seeds = TokenSeeds()
    for step in range(STEPS):
        rows = [row for row in together if (row + step) % 3]  # a row does not take part in every step
        assert seeds.next(together[row] for row in rows) == [one_at_a_time(alone[row]) for row in rows]


def test_a_generator_that_was_advanced_goes_on_where_another_stopped() -> None:
    (first,), (second,) = generators(0).values(), generators(0).values()
    numbers = [TokenSeeds().next([first])[0]]
    seeds = TokenSeeds()
    for _ in range(3):
        numbers += seeds.next([second])
    (resumed,) = generators(0).values()
    advance(resumed, 2, VOCABULARY)
    assert numbers[0] == numbers[1] and TokenSeeds().next([resumed]) == numbers[3:]


def test_sampling_is_vllms_own_with_and_without_generators() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()
    ours: Any = TopKTopPSampler("processed_logprobs")
    vllms: Any = TopKTopPSampler("processed_logprobs")
    runner = SimpleNamespace(sampler=SimpleNamespace(topk_topp_sampler=ours))
    draw_seeds_together(cast("WorkerBase", SimpleNamespace(model_runner=runner, use_v2_model_runner=False)))
    mine, theirs = generators(0, 2, 3), generators(0, 2, 3)
    assert ours.forward != vllms.forward
    for step in range(STEPS):
        logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(step))
        k = torch.full((ROWS,), 7) if step % 2 else None
        found = []
        for one, drawn in ((ours, mine), (vllms, theirs)):
            torch.manual_seed(step)  # of the rows that have no generator
            found.append(one.forward(logits.clone(), dict(reversed(drawn.items())), k, None))
        (sampled, logprobs), (expected, expected_logprobs) = found
        assert sampled.tolist() == expected.tolist() and torch.equal(logprobs, expected_logprobs)
