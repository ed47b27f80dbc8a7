"""A prompt is computed once for the rows of a group: which rows follow, their blocks, and what is copied into these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2ForCausalLM

from tandem.protos.types import SamplingParameters
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments
from tandem.rollout.vllm import shared_prompts
from tandem.rollout.vllm.block_allocation import allocate_whole_blocks
from tandem.rollout.vllm.launch import engine_config
from tests.support.engine_process import EngineProcess
from tests.support.tiny_model import build_tiny_model
from tests.support.vllm_notes import note_copies

BLOCK = 16


def waiting(name: str, prompt: list[int], preempted: int = 0, salt: str = "0:0") -> Any:
    """A request that vLLM's scheduler has not begun, or preempted."""
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=prompt,
        num_prompt_tokens=len(prompt),
        num_preemptions=preempted,
        cache_salt=salt,
    )


def test_only_rows_just_behind_one_with_their_prompt_and_salt_follow_it() -> None:
    rows = [waiting("a", [1, 2]), waiting("b", [1, 2]), waiting("c", [1, 2], preempted=1), waiting("d", [1, 2])]
    rows += [waiting("e", [1, 2]), waiting("f", [3]), waiting("g", [3]), waiting("h", [5] * 900)]
    rows += [waiting("i", [5] * 900), waiting("j", [5] * 900, salt="0:1"), waiting("k", [5] * 900, salt="0:1")]
    found = [row.request_id for row in shared_prompts.followers(rows)]
    assert found == ["b", "e", "i", "k"], "not behind a preempted row, nor with a prompt of one token"


def started(name: str, prompt: list[int], *blocks: int, computed: int = 0) -> Any:
    """What vLLM's worker is told of a row that starts in these blocks."""
    return SimpleNamespace(req_id=name, prompt_token_ids=prompt, num_computed_tokens=computed, block_ids=([*blocks],))


def test_tokens_of_a_prompt_are_copied_to_the_blocks_of_the_rows_that_follow() -> None:
    long, prompt = list(range(10)), [1, 2, 3]
    rows = [started("a", long, 0, 1, computed=8), started("b", prompt, 3), started("c", prompt, 5, computed=2)]
    rows += [started("d", prompt, 7, computed=2), started("e", [1, 2], 9)]
    starts = {"a": 4, "b": 6, "c": 9, "d": 10, "e": 11}
    assert shared_prompts.copied_tokens(rows, starts, 8) == ([6, 7, 6, 7], [40, 41, 56, 57])
    with pytest.raises(AssertionError):
        shared_prompts.copied_tokens([started("e", [1, 2], 9), started("c", prompt, 5, computed=2)], starts, 8)


def test_a_prompt_of_several_blocks_is_copied_to_each_of_them() -> None:
    prompt = list(range(12))
    rows = [started("a", prompt, 2, 3), started("b", prompt, 5, 6, computed=11)]
    sources, slots = shared_prompts.copied_tokens(rows, {"a": 3, "b": 15}, 8)
    assert sources == [*range(3, 14)] and slots == [*range(40, 48), *range(48, 51)]
    assert shared_prompts.copied_tokens(rows[:1], {"a": 3}, 8) == ([], [])


def test_what_the_cache_shares_is_not_copied() -> None:
    """Blocks that a row shares with the one that computes the prompt, and tokens that the cache had for both."""
    prompt = list(range(22))
    rows = [started("a", prompt, 2, 3, 4, computed=8), started("b", prompt, 2, 3, 7, computed=21)]
    assert shared_prompts.copied_tokens(rows, {"a": 5, "b": 19}, 8) == ([*range(13, 18)], [*range(56, 61)])
    had_all = [started("a", prompt[:17], 2, 3, 4, computed=16), started("b", prompt[:17], 2, 3, 7, computed=16)]
    assert shared_prompts.copied_tokens(had_all, {"a": 5, "b": 6}, 8) == ([], [])
    without_cache = [started("a", prompt[:17], 2, 3, 4), started("b", prompt[:17], 5, 6, 7, computed=16)]
    expected = [*range(5, 21)], [*range(40, 56)]
    assert shared_prompts.copied_tokens(without_cache, {"a": 5, "b": 22}, 8) == expected


@dataclass(frozen=True)
class Group:
    start: int  # its prompt counts up from here, so prompts with the same start share their beginning
    length: int
    rows: int
    salt: str
    answer: int


GROUPS = st.builds(
    Group,
    st.sampled_from([0, 500]),
    st.sampled_from([1, 2, 17, 32, 33, 70]),
    st.integers(1, 4),
    st.sampled_from("ab"),
    st.integers(1, 20),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's configuration of an engine with blocks of 16 tokens."""
    folder = build_tiny_model(tmp_path_factory.mktemp("made") / "model")
    found = engine_config(SamplerArguments(RolloutConfig(), str(folder), "float32", max_model_tokens=100, seed=0))
    assert found.cache_config.block_size == BLOCK
    return found


@settings(max_examples=60)
@given(groups=st.lists(GROUPS, min_size=1, max_size=8), caching=st.booleans(), blocks=st.integers(8, 40))
def test_whatever_starts_together_every_row_attends_to_its_own_tokens(
    config: Any, groups: list[Group], caching: bool, blocks: int
) -> None:
    """vLLM's scheduler with a model of the cache. What stands in a slot is named by the tokens up to it."""
    from vllm.v1.outputs import ModelRunnerOutput

    scheduler = scheduler_of(config, caching, blocks)
    cache: dict[int, tuple[int, ...]] = {}
    arriving = [request for number, group in enumerate(groups) for request in requests_of(str(number), group)]
    for step in range(1000):
        for request in arriving[5 * step : 5 * step + 5]:
            scheduler.add_request(request)
        output = scheduler.schedule()
        requests = {name: scheduler.requests[name] for name in output.num_scheduled_tokens}
        starts, computed, slots = {}, [], []
        for name, request in requests.items():
            starts[name], end = len(computed), request.num_computed_tokens
            places = range(end - output.num_scheduled_tokens[name], end)
            computed += [tuple(request.all_token_ids[: place + 1]) for place in places]
            slots += [slot_of(scheduler, request, place) for place in places]
        cache.update(zip(slots, computed, strict=True))
        sources, copies = shared_prompts.copied_tokens(output.scheduled_new_reqs, starts, BLOCK)
        cache.update(zip(copies, [computed[source] for source in sources], strict=True))
        for request in requests.values():
            for place in range(request.num_computed_tokens):
                assert cache[slot_of(scheduler, request, place)] == tuple(request.all_token_ids[: place + 1])
        for before, row in pairwise(output.scheduled_new_reqs):
            first, second = requests[before.req_id], requests[row.req_id]
            if (first.cache_salt, first.prompt_token_ids) == (second.cache_salt, second.prompt_token_ids):
                assert output.num_scheduled_tokens[row.req_id] == 1, "the row before has computed the prompt"
        sampled = [[9000 + 100 * step + number] for number in range(len(requests))]  # another one for each row
        positions = {name: number for number, name in enumerate(requests)}
        scheduler.update_from_output(output, ModelRunnerOutput([*requests], positions, sampled))
        if not scheduler.has_unfinished_requests() and 5 * step > len(arriving):
            return
    raise AssertionError("the requests do not end")


def scheduler_of(config: Any, caching: bool, blocks: int) -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.enable_prefix_caching, config.cache_config.num_gpu_blocks = caching, blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK)
    shared_prompts.schedule_prompts_once(scheduler)
    allocate_whole_blocks(scheduler)
    return scheduler


def requests_of(name: str, group: Group) -> list[Any]:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    prompt = [*range(group.start, group.start + group.length)]
    params = SamplingParams(max_tokens=group.answer, ignore_eos=True)
    hasher = get_request_block_hasher(BLOCK, sha256)
    names = [f"{name}-{row}" for row in range(group.rows)]
    return [Request(one, prompt, params, None, cache_salt=group.salt, block_hasher=hasher) for one in names]


def slot_of(scheduler: Any, request: Any, place: int) -> int:
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
    return int(blocks[place // BLOCK]) * BLOCK + place % BLOCK


@pytest.mark.slow
@pytest.mark.parametrize(("longest", "block", "cache"), [(120, 16, 1 << 20), (400, 128, 4 << 20)])
def test_groups_with_prompts_of_several_blocks_are_sampled_as_each_row_alone(
    tmp_path: Path, longest: int, block: int, cache: int
) -> None:
    """More rows than the cache holds, so that some are preempted. Blocks of 128 are those of a prefix cache."""
    folder = build_tiny_model(tmp_path / "model", hidden=64, layers=3)
    config = RolloutConfig(engine="vllm", kv_cache_bytes=cache, max_groups_in_flight=8, samples_per_prompt=8)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lengths = [2 + 15 * number for number in range(7)] if block == 16 else [17, 128, 129, 130, 256, 257, 300]
    prompts = [[10 + (7 * number + place) % 80 for place in range(size)] for number, size in enumerate(lengths)]
    few = SamplingParameters(max_tokens=20)
    arguments = SamplerArguments(config, str(folder), "float32", max_model_tokens=longest, seed=3)
    with EngineProcess(arguments, partial(note_copies, tmp_path / "copies")) as engine:
        engine.call("sample", prompts[-1], 4, few, key="first")
        shared = 0 if block == 16 else (lengths[-1] - 1) // block * block
        assert (tmp_path / "copies").read_text().split()[0] == str(3 * (lengths[-1] - 1 - shared))
        assert engine.call("figures").cached_tokens == 3 * (lengths[-1] - 1)
        crowd = [engine.submit("sample", prompt, 8, few, key=str(number)) for number, prompt in enumerate(prompts)]
        for number, (prompt, rows) in enumerate(zip(prompts, [one.result(60) for one in crowd], strict=True)):
            alone = engine.call("sample_one", prompt, few, trajectory_id=5, key=str(number))
            assert alone.segments[0].ids.tolist() == rows[5].segments[0].ids.tolist()
            for row in rows:
                (segment,) = row.segments
                ids = torch.tensor(segment.ids, dtype=torch.long)
                with torch.inference_mode():
                    logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
                chosen = logprobs.gather(1, ids[1:, None])[len(prompt) - 1 :, 0].numpy()
                assert np.abs(chosen - segment.behavior_logprobs[len(prompt) :]).mean() <= 1e-5
