"""The record of an answer against transformers; seeds, stop conditions, aborts and refused prompts."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from tandem.protos.errors import DataError, EnvironmentLackError, ModelError
from tandem.protos.types import SamplingMask, SamplingParameters, Trajectory
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments, find_engine
from tandem.rollout.segments import first_tokens
from tests.support.engine_process import EngineProcess
from tests.support.tiny_model import EOS_ID, VOCABULARY, build_tiny_model

PROMPT = list(range(10, 22))
MAX_TOKENS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden=64, layers=3)


@pytest.fixture(scope="module")
def config(engine_name: str) -> RolloutConfig:
    """A configuration whose cache holds 10 of 32 sequences."""
    return RolloutConfig(engine=engine_name, kv_cache_bytes=4 << 20, max_groups_in_flight=8, samples_per_prompt=4)


@pytest.fixture(scope="module")
def engine(folder: Path, config: RolloutConfig) -> Iterator[EngineProcess]:
    with EngineProcess(SamplerArguments(config, str(folder), "float32", MAX_TOKENS, seed=3)) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Qwen2ForCausalLM, row: Trajectory) -> torch.Tensor:
    """(T − 1, V): the logits from which every token but the first was sampled."""
    with torch.inference_mode():
        return model(torch.tensor(row.segments[0].ids, dtype=torch.long)[None]).logits[0, :-1]


def sampled(row: Trajectory) -> list[int]:
    (segment,) = row.segments
    return [int(token) for token, mask in zip(segment.ids, segment.loss_mask, strict=True) if mask]


def sample(
    engine: EngineProcess, n: int, prompt: Sequence[int] = PROMPT, key: str = "", **sampling: Any
) -> list[Trajectory]:
    parameters = SamplingParameters(**{"max_tokens": 100, **sampling})
    return list(engine.call("sample", list(prompt), n, parameters, key=key))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_sampling_distribution(
    engine: EngineProcess, model: Qwen2ForCausalLM, temperature: float
) -> None:
    for row in sample(engine, 4, temperature=temperature):
        (segment,) = row.segments
        dtypes = [array.dtype for array in (segment.ids, segment.behavior_logprobs, segment.loss_mask)]
        assert dtypes == [np.int32, np.float32, np.uint8]
        assert segment.ids[: len(PROMPT)].tolist() == PROMPT
        assert not segment.loss_mask[: len(PROMPT)].any() and segment.loss_mask[len(PROMPT) :].all()
        assert not segment.behavior_logprobs[: len(PROMPT)].any()
        expected = (logits(model, row) / temperature).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(segment.ids[1:], dtype=torch.long)[:, None])[len(PROMPT) - 1 :, 0]
        assert np.abs(chosen.numpy() - segment.behavior_logprobs[len(PROMPT) :]).mean() <= 1e-5
        assert [(s.first_token, s.incarnation, s.policy_version) for s in segment.spans] == [(len(PROMPT), 0, -1)]


def test_greedy_sampling_takes_the_most_likely_token(engine: EngineProcess, model: Qwen2ForCausalLM) -> None:
    first, second = sample(engine, 2, temperature=0.0)
    assert sampled(first) == sampled(second) == logits(model, first).argmax(-1)[len(PROMPT) - 1 :].tolist()


def test_the_end_token_is_part_of_the_answer_but_not_of_the_text(engine: EngineProcess, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [row for number in range(2) for row in sample(engine, 16, max_tokens=200, key=f"end-{number}")]
    assert {row.finish_reason for row in rows} == {"stop", "length"}
    assert sorted(row.trajectory_id for row in rows[:16]) == list(range(16)) and rows[0].role == "policy"
    for row in rows:
        ids = sampled(row)
        assert (ids[-1] == EOS_ID) == (row.finish_reason == "stop") and EOS_ID not in ids[:-1]
        assert len(ids) == 200 or row.finish_reason == "stop"
        assert row.text == tokenizer.decode(ids, skip_special_tokens=True) and "<|im_end|>" not in row.text


def test_a_stop_string_ends_an_answer(engine: EngineProcess) -> None:
    rows = sample(engine, 8, stop=("e", "4"), max_tokens=200, key="stop")
    for row in rows:
        if row.finish_reason == "stop" and sampled(row)[-1] != EOS_ID:
            assert VOCABULARY[sampled(row)[-1]] in ("e", "4") and not {"e", "4"} & set(row.text[:-1])
    assert any(row.text[-1:] in ("e", "4") for row in rows)


def test_random_numbers_depend_only_on_seed_group_and_trajectory(engine: EngineProcess) -> None:
    alone = sample(engine, 3, key="0-7")
    long = SamplingParameters(max_tokens=230)  # exceeds the cache: some sequences are preempted and computed again
    crowd = [engine.submit("sample", PROMPT, 4, long, key=f"1-{number}") for number in range(5)]
    among_others = sample(engine, 3, key="0-7")
    for future in crowd:
        future.result(60)
    assert [sampled(row) for row in alone] == [sampled(row) for row in among_others]
    others = [*sample(engine, 3, key="0-8"), *sample(engine, 3, key="0-7", seed=9)]
    assert len({tuple(sampled(row)) for row in [*alone, *others]}) == 9
    unseeded = [tuple(sampled(row)) for _ in range(2) for row in sample(engine, 16)]
    longer = [ids for ids in unseeded if len(ids) > 5]  # two answers may end at once, but not share five tokens
    assert len({ids[:5] for ids in longer}) == len(longer) > 16
    single = engine.call("sample_one", PROMPT, SamplingParameters(max_tokens=100), trajectory_id=2, key="0-7")
    assert sampled(single) == sampled(alone[2]), "a row sampled again alone, as after a lost lease, is the same"


def kept_ids(mask: SamplingMask | None) -> list[list[int]]:
    """The ids that were left at each token, a list for each."""
    return [] if mask is None else [ids.tolist() for ids in np.split(mask.ids, np.cumsum(mask.counts)[:-1])]


def begun(row: Trajectory, num_tokens: int) -> Trajectory:
    """The trajectory as it was when it had this many tokens."""
    (segment,) = row.segments
    segments = (first_tokens(segment, len(PROMPT) + num_tokens),)
    return replace(row, segments=segments, finish_reason="abort", text="")


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 0), (1.0, 5)])
def test_an_unfinished_answer_continues_as_if_it_had_not_been_interrupted(
    engine: EngineProcess, temperature: float, top_k: int
) -> None:
    sampling = SamplingParameters(max_tokens=200, temperature=temperature, top_k=top_k)
    whole = engine.call("sample", PROMPT, 4, sampling, key="resumed")
    before = engine.call("figures")
    for row in whole:
        for num_tokens in (1, len(sampled(row)) - 1):
            options: dict[str, Any] = {"trajectory_id": row.trajectory_id, "key": "resumed"}
            again = engine.call("sample_one", PROMPT, sampling, **options, unfinished=begun(row, num_tokens))
            assert (sampled(again), again.text, again.finish_reason) == (sampled(row), row.text, row.finish_reason)
            (one,), (other,) = again.segments, row.segments
            assert np.abs(one.behavior_logprobs - other.behavior_logprobs).max() <= 1e-5
            assert np.array_equal(one.loss_mask, other.loss_mask) and one.spans == other.spans
            assert [sorted(ids) for ids in kept_ids(one.sampling_mask)] == [
                sorted(ids) for ids in kept_ids(other.sampling_mask)
            ]
    after = engine.call("figures")
    assert after.resumed_tokens - before.resumed_tokens == sum(len(sampled(row)) for row in whole)


def test_answers_under_way_can_be_read_and_continue_in_another_request(engine: EngineProcess) -> None:
    sampling = SamplingParameters(max_tokens=240)
    whole = {row.trajectory_id: row for row in engine.call("sample", PROMPT, 4, sampling, key="under-way")}
    running = engine.submit("sample", PROMPT, 4, sampling, key="under-way")
    deadline = time.monotonic() + 60
    while not (found := engine.call("unfinished", {"under-way", "another"})):
        assert time.monotonic() < deadline and not running.done()
    engine.cancel(running)
    assert engine.call("unfinished", {"under-way"}) == {}
    for (key, number), row in found.items():
        assert (key, row.finish_reason) == ("under-way", "abort") and 0 < len(sampled(row)) < 240
        again = engine.call("sample_one", PROMPT, sampling, trajectory_id=number, key=key, unfinished=row)
        assert sampled(again) == sampled(whole[number])
        difference = again.segments[0].behavior_logprobs - whole[number].segments[0].behavior_logprobs
        assert np.abs(difference).max() <= 1e-5


def test_a_stop_string_may_begin_before_the_interruption(engine: EngineProcess) -> None:
    (row,) = sample(engine, 1, key="seam")
    ids = sampled(row)
    # The first place after which two tokens together are new, so that the string ends the answer nowhere else.
    place = next(n for n in range(5, 90) if VOCABULARY[ids[n]] + VOCABULARY[ids[n + 1]] not in row.text[: n + 1])
    stop = VOCABULARY[ids[place]] + VOCABULARY[ids[place + 1]]
    sampling = SamplingParameters(max_tokens=100, stop=(stop,))
    saved = begun(row, place + 1)
    again = engine.call("sample_one", PROMPT, sampling, trajectory_id=0, key="seam", unfinished=saved)
    assert (sampled(again), again.finish_reason) == (ids[: place + 2], "stop")


def test_more_prompts_than_fit_into_one_step_and_the_cache(engine: EngineProcess) -> None:
    prompts = [[10 + (number + place) % 80 for place in range(240)] for number in range(30)]
    short = SamplingParameters(max_tokens=12)
    crowd = [engine.submit("sample", prompt, 1, short, key=str(number)) for number, prompt in enumerate(prompts)]
    together = [sampled(future.result(60)[0]) for future in crowd]
    alone = [engine.call("sample", prompt, 1, short, key=str(number)) for number, prompt in enumerate(prompts)]
    assert together == [sampled(row) for (row,) in alone]


def test_rows_of_groups_that_do_not_fit_into_the_cache_are_those_sampled_alone(
    engine: EngineProcess, model: Qwen2ForCausalLM
) -> None:
    prompts = [[10 + (7 * number + place) % 80 for place in range(2 + 20 * number)] for number in range(7)]
    few = SamplingParameters(max_tokens=8)
    crowd = [engine.submit("sample", prompt, 8, few, key=str(number)) for number, prompt in enumerate(prompts)]
    together = [future.result(60) for future in crowd]
    for number, (prompt, rows) in enumerate(zip(prompts, together, strict=True)):
        alone = engine.call("sample_one", prompt, few, trajectory_id=5, key=str(number))
        assert sampled(alone) == sampled(rows[5])
        for row in rows:
            (segment,) = row.segments
            expected = logits(model, row).log_softmax(-1)[len(prompt) - 1 :]
            chosen = expected.gather(1, torch.tensor(sampled(row))[:, None])[:, 0].numpy()
            assert np.abs(chosen - segment.behavior_logprobs[len(prompt) :]).mean() <= 1e-5


def test_an_answer_ends_at_the_models_maximum_length(engine: EngineProcess) -> None:
    long_prompt = [10 + number % 80 for number in range(MAX_TOKENS - 5)]
    for row in sample(engine, 4, long_prompt, max_tokens=100):
        assert len(sampled(row)) <= 5 and (len(sampled(row)) == 5 or row.finish_reason == "stop")


@pytest.mark.parametrize("prompt", [[], list(range(10, 90)) * 4, [10, 10_000]], ids=["empty", "long", "unknown-token"])
def test_a_prompt_that_cannot_be_sampled_is_a_data_error(engine: EngineProcess, prompt: list[int]) -> None:
    with pytest.raises(DataError):
        sample(engine, 2, prompt)
    with pytest.raises(DataError, match="temperature"):
        sample(engine, 1, temperature=-1.0)
    with pytest.raises(DataError, match="max_tokens is -1"):
        sample(engine, 1, max_tokens=-1)
    assert len(sample(engine, 1)) == 1


def test_an_aborted_request_leaves_the_engine(engine: EngineProcess) -> None:
    running = engine.submit("sample", PROMPT, 4, SamplingParameters(max_tokens=240), key="aborted")
    engine.cancel(running)
    assert len(sample(engine, 2)) == 2
    idle = engine.call("figures").busy_seconds
    time.sleep(0.05)
    assert engine.call("figures").busy_seconds == idle, "nothing is in flight"


@pytest.mark.parametrize(
    "truncation",
    [{"top_k": 3}, {"top_k": 20, "top_p": 0.3}, {"top_k": 40, "min_p": 0.3}, {"top_k": 500, "top_p": 0.7}],
    ids=str,
)
def test_truncated_distributions_are_sampled_and_recorded_with_what_was_left(
    engine: EngineProcess, model: Qwen2ForCausalLM, truncation: dict[str, Any]
) -> None:
    plain = engine.submit("sample", PROMPT, 4, SamplingParameters(max_tokens=100))  # in the same steps of the engine
    rows = sample(engine, 4, temperature=0.7, key="truncated", **truncation)
    assert {row.segments[0].sampling_mask for row in plain.result(60)} == {None}
    sizes = set()
    for row in rows:
        (segment,) = row.segments
        kept = kept_ids(segment.sampling_mask)
        assert kept[: len(PROMPT)] == [[]] * len(PROMPT) and len(kept) == len(segment.ids)
        logprobs = segment.behavior_logprobs[len(PROMPT) :]
        scaled = logits(model, row)[len(PROMPT) - 1 :] / 0.7
        for token, logprob, logits_V, ids in zip(sampled(row), logprobs, scaled, kept[len(PROMPT) :], strict=True):
            most, least = (truncated(logits_V, **truncation, margin=margin) for margin in (1e-4, -1e-4))
            assert set(least) <= set(ids) <= set(most) and len(set(ids)) == len(ids)
            assert abs(float(logits_V[ids].log_softmax(-1)[ids.index(token)]) - logprob) <= 1e-4
            sizes.add(len(ids))
    assert max(sizes) <= truncation["top_k"] and (len(sizes) > 1 or truncation == {"top_k": 3})


def truncated(
    logits_V: torch.Tensor, top_k: int, top_p: float = 1.0, min_p: float = 0.0, *, margin: float
) -> list[int]:
    """The tokens that are left by min-p, then top-k, then top-p, with a margin for rounding at both thresholds."""
    probs_V = logits_V.softmax(-1)
    left_V = logits_V.masked_fill(probs_V < (min_p - margin) * probs_V.max(), -torch.inf)
    order_K = left_V.argsort(descending=True)[: min(top_k, int(left_V.isfinite().sum()))]
    probs_K = left_V[order_K].softmax(-1)
    return [int(token) for token in order_K[probs_K.cumsum(0) - probs_K < top_p + margin]]


def test_other_truncated_distributions_are_sampled(engine: EngineProcess, model: Qwen2ForCausalLM) -> None:
    (certain,) = sample(engine, 1, top_p=1e-6)
    assert sampled(certain) == logits(model, certain).argmax(-1)[len(PROMPT) - 1 :].tolist()
    (varied,) = sample(engine, 1, temperature=0.0, repetition_penalty=50.0, max_tokens=20)
    assert len(set(sampled(varied))) == len(sampled(varied)) and not set(sampled(varied)) & set(PROMPT)


def test_metrics_count_tokens_and_busy_and_idle_time(engine: EngineProcess) -> None:
    before = engine.call("figures")
    rows = sample(engine, 4)
    after = engine.call("figures")
    assert after.sampled_tokens - before.sampled_tokens == sum(len(sampled(row)) for row in rows)
    assert after.prompt_tokens - before.prompt_tokens == 4 * len(PROMPT)
    assert 0.0 < after.busy_seconds - before.busy_seconds < 30.0
    later = [engine.call("figures") for _ in range(20)]
    assert {figures.busy_seconds for figures in later} == {after.busy_seconds}, "nothing is in flight"
    idle = [figures.idle_seconds for figures in (before, after, *later)]
    assert idle == sorted(idle), "a figure that falls would count as a restart of the sampler"


def test_the_architectures_are_read_from_the_installed_package(engine_name: str) -> None:
    known = find_engine(engine_name).known_architectures()
    assert {"Qwen2ForCausalLM", "LlamaForCausalLM", "GPT2LMHeadModel"} <= known and "CLIPModel" not in known


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def cut_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"cut")


def too_long(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('_embeddings": 1024', '_embeddings": 64'))


@pytest.mark.parametrize(
    "case",
    [
        (shutil.rmtree, {}, ModelError, "does not exist"),
        (broken_config, {}, ModelError, "not a valid JSON"),
        (too_long, {}, ModelError, "max_model_len|max_position_embeddings"),
        (cut_weights, {}, ModelError, "cannot be sampled"),
        (None, {"kv_cache_bytes": 1 << 20}, EnvironmentLackError, "rollout.kv_cache_bytes"),
        (None, {"kv_cache_bytes": 1 << 44}, EnvironmentLackError, "GB are free"),
    ],
    ids=["missing", "config", "length", "weights", "cache", "memory"],
)
def test_a_model_or_a_configuration_that_cannot_be_used_is_refused_in_one_line(
    folder: Path,
    engine_name: str,
    tmp_path: Path,
    case: tuple[Callable[[Path], Any] | None, dict[str, int], type[Exception], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil, values, error, told = case
    for name in ("TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # set here so that monkeypatch restores it
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    if spoil is not None:
        spoil(broken)
    config = RolloutConfig.model_validate({"engine": engine_name, "kv_cache_bytes": 4 << 20, **values})
    with pytest.raises(error, match=told) as caught:
        asyncio.run(find_engine(engine_name).start(SamplerArguments(config, str(broken), "float32", 1024, seed=0)))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
