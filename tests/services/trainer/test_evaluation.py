"""Evaluation over gRPC with samplers and a scorer that fail on demand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tandem.protos import common_pb2, reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import UnavailableError
from tandem.protos.types import Prompt, SamplingParameters
from tandem.services.config import Recipe, parse_recipe
from tandem.services.rpc.server import ServerThread
from tandem.services.trainer.evaluation import (
    EvaluationEndpoints,
    chunks_of,
    deadline_seconds,
    evaluate,
    load_set,
)
from tandem.services.trainer.generations import EvaluationSet, final_answer
from tests.support.dataset_files import verl_row, write_lines
from tests.support.run_inputs import recipe_of, small_values, write_chat_model

VERSION = 3


class Answers(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers every prompt with its first token id plus the number of the sample, labelled with the given version. The
    first one of each call is truncated.
    """

    def __init__(self, version: int = VERSION, failures: int = 0, last: int = 1000) -> None:
        self.version = version
        self.failures = failures
        self.last = last
        self.requests: list[rollout_pb2.GenerateRequest] = []

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GenerateReply:
        self.requests.append(request)
        if self.failures > 0 or len(self.requests) > self.last:
            self.failures -= 1
            raise UnavailableError("scripted")
        span = common_pb2.VersionSpan(first_token=0, incarnation=1, policy_version=self.version)
        reply = rollout_pb2.GenerateReply()
        for item in request.items:
            row = reply.items.add()
            for number in range(item.num_samples):
                text = str(np.frombuffer(item.prompt_ids, "<i4")[0] + number)
                row.samples.add(text=text, spans=[span], ids=b"\0" * 8, finish_reason="stop")
        reply.items[0].samples[0].finish_reason = "length"
        return reply


class Episodes(Answers):
    """Every sample is an episode of two turns that earns 0.5 and calls three tools. Sample 1 of each prompt is cut off,
    the environment of sample 2 fails.
    """

    tool_failures: object = "none"

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GenerateReply:
        reply = await super().Generate(request, context)
        for item in reply.items:
            for number, sample in enumerate(item.samples):
                info = {
                    "num_tool_calls": 3,
                    "num_invalid_calls": number,
                    "num_tool_failures": self.tool_failures,
                    "score": 1,
                }
                ended = {"stop": "turns" if number else "terminated", "num_turns": 2, "info": info}
                sample.earned_reward = 0.5
                sample.episode = json.dumps({**ended, "messages": [{"role": "user", "content": "?"}]})
            if len(item.samples) > 2:
                item.samples[2].CopyFrom(
                    rollout_pb2.GenerateReply.Sample(finish_reason="error", episode='{"error": "step: gone"}')
                )
        return reply


class Judge(reward_pb2_grpc.RewardServiceServicer):
    """Scores 1 for an even answer, 0 for an odd one, a time-out for multiples of 10. Finds no answer in 7."""

    def __init__(self) -> None:
        self.requests: list[reward_pb2.ScoreRequest] = []

    async def Score(self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext) -> reward_pb2.ScoreReply:
        self.requests.append(request)
        reply = reward_pb2.ScoreReply()
        for number in (int(item.solution) for item in request.items):
            if number % 10 == 0:
                reply.items.add().unscored.reason = "timeout"
            else:
                scored = reply.items.add().scored
                scored.value = float(number % 2 == 0)
                scored.breakdown["math/answered"] = float(number != 7)
        return reply


@contextmanager
def serving(*samplers: Answers, judge: Judge | None = None) -> Iterator[EvaluationEndpoints]:
    with ExitStack() as stack:

        def serve(add: Callable[..., None], servicer: object) -> str:
            server = ServerThread("127.0.0.1", 0, info=common_pb2.InfoReply, register=partial(add, servicer))
            stack.callback(server.stop, grace_seconds=0.0)
            return server.address

        addresses = [serve(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, sampler) for sampler in samplers]
        scorer = serve(reward_pb2_grpc.add_RewardServiceServicer_to_server, judge or Judge())
        yield EvaluationEndpoints(addresses, scorer, token="", credentials=None)


def prompts(count: int, num_samples: int = 1, **sampling: Any) -> EvaluationSet:
    parameters = SamplingParameters(**{"temperature": 0.0, "max_tokens": 8, **sampling})
    return EvaluationSet(
        "test",
        [
            Prompt(
                0, index, np.array([index + 1], np.int32), num_samples, parameters, f"s{index % 2}", ground_truth="?"
            )
            for index in range(count)
        ],
    )


def recipe(**eval_section: Any) -> Recipe:
    data = {"train_file": "train.jsonl", "eval_file": "data/test.jsonl"}
    return parse_recipe({"run": {"run_id": "r"}, "model": {"path": "m"}, "data": data, "eval": eval_section})


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rows_without_a_score_are_counted_and_not_averaged_in(tmp_path: Path) -> None:
    one, two = Answers(), Answers()
    with serving(one, two) as endpoints:
        result = evaluate(VERSION, [prompts(200)], endpoints, recipe(), tmp_path)
    assert (result.num_rows, result.num_scored, result.unscored) == (200, 180, {"timeout": 20})
    assert result.accuracy == pytest.approx(80 / 180)
    assert result.mean_reward == pytest.approx(80 / 180)
    requests = one.requests + two.requests
    assert one.requests and two.requests, "both samplers were asked"
    assert sum(len(request.items) for request in requests) == 200
    assert {(request.sampling.temperature, request.required_version) for request in requests} == {(0.0, VERSION)}
    found = result.sets["test"]
    assert (found.num_truncated, found.num_no_answer) == (len(requests), 1)
    assert {source: figures["num_prompts"] for source, figures in found.data_sources.items()} == {"s0": 100, "s1": 80}
    assert [figures["mean@1"] for figures in found.data_sources.values()] == [0.0, 1.0], (
        "index 0 answers 1, which is odd"
    )


def test_the_samples_of_an_evaluation_are_in_a_file_in_the_order_of_their_scores(tmp_path: Path) -> None:
    with serving(Answers()) as endpoints:
        evaluate(VERSION, [prompts(10)], endpoints, recipe(), tmp_path)
    rows = lines(tmp_path / "test.jsonl")
    assert [(row["index"], row["sample"], row["answer"]) for row in rows] == [(n, 0, str(n + 1)) for n in range(10)]
    wanted = {"reward": 1.0, "correct": True, "data_source": "s1", "num_tokens": 2, "finish_reason": "stop"}
    assert wanted.items() <= rows[1].items() and rows[1]["unscored"] == ""
    assert (rows[9]["reward"], rows[9]["unscored"], rows[0]["finish_reason"]) == (None, "timeout", "length")


def test_several_samples_give_metrics_of_each_k_with_intervals(tmp_path: Path) -> None:
    judge = Judge()
    with serving(sampler := Answers(), judge=judge) as endpoints:
        result = evaluate(VERSION, [prompts(8, 2, temperature=1.0, top_p=0.9, seed=5)], endpoints, recipe(), tmp_path)
    # Prompt n answers n + 1 and n + 2, one of which is even: 1 2, 2 3, …, 8 9.
    found = result.sets["test"]
    expected = {"mean@2": 0.5, "mean_reward": 0.5, "pass@1": 0.5, "pass@2": 1.0, "pass^2": 0.0, "best@2": 1.0}
    # 7 does not vote, so 6 and 8 decide where they stand beside it; elsewhere two answers tie.
    expected |= {"worst@2": 0.0, "maj@2": (2 * 1.0 + 6 * 0.5) / 8}
    assert found.metrics == pytest.approx(expected)
    assert found.intervals["pass@2"] == (1.0, 1.0) and found.intervals["maj@2"][0] < 0.625 < found.intervals["maj@2"][1]
    sampling = sampler.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == pytest.approx((1.0, 0.9, 5))
    assert Counter(item.group for item in judge.requests[0].items) == {f"0-{n}": 2 for n in range(8)}


def test_an_evaluation_goes_on_with_the_samples_that_are_missing(tmp_path: Path) -> None:
    sets, file = [prompts(200)], tmp_path / "test.jsonl"
    with serving(Answers(last=2)) as endpoints:
        broken = evaluate(VERSION, sets, endpoints, recipe(), tmp_path)
    assert broken.accuracy is None and broken.sets["test"].unscored["UnavailableError"] == 200 - len(lines(file))
    kept = {row["index"] for row in lines(file)}
    assert 0 < len(kept) < 200
    alone = {**json.loads(file.read_text().splitlines()[0]), "index": max(set(range(200)) - kept)}
    with file.open("a") as torn:
        torn.write(json.dumps(alone) + '\n{"index": 198, "sam')
    with serving(sampler := Answers()) as endpoints:
        whole = evaluate(VERSION, sets, endpoints, recipe(), tmp_path)
    asked = [int(np.frombuffer(item.prompt_ids, "<i4")[0]) - 1 for one in sampler.requests for item in one.items]
    assert sorted(asked) == sorted(set(range(200)) - kept)
    assert whole.accuracy == pytest.approx(80 / 180)
    assert sorted(row["index"] for row in lines(file)) == list(range(200))
    with serving(again := Answers()) as endpoints:
        assert evaluate(VERSION, sets, endpoints, recipe(), tmp_path).sets == whole.sets
        assert again.requests == []
        evaluate(VERSION + 1, sets, endpoints, recipe(), tmp_path)
    assert again.requests, "samples of another version are not used"


def test_without_a_version_only_samples_of_the_same_weights_are_used_again(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"some weights")
    exported = recipe().model_copy(update={"model": recipe().model.model_copy(update={"path": str(weights.parent)})})
    with serving(Answers(last=2)) as endpoints:
        evaluate(None, [prompts(200)], endpoints, exported, tmp_path)
    num_kept = len(lines(tmp_path / "test.jsonl"))
    for other, asked in ((b"some weights", 200 - num_kept), (b"other weights", 200)):
        weights.write_bytes(other)
        with serving(sampler := Answers()) as endpoints:
            evaluate(None, [prompts(200)], endpoints, exported, tmp_path)
        assert sum(len(one.items) for one in sampler.requests) == asked


def test_samples_of_other_settings_are_not_used_again(tmp_path: Path) -> None:
    for number, one in enumerate((prompts(10), prompts(10, temperature=0.5, seed=1), prompts(11))):
        with serving(sampler := Answers()) as endpoints:
            evaluate(VERSION, [one], endpoints, recipe(), tmp_path)
        assert sampler.requests, f"settings {number}"
        assert len(lines(tmp_path / "test.jsonl")) == len(one.prompts)
    with serving(sampler := Answers()) as endpoints:
        other = parse_recipe({**recipe().model_dump(), "reward": {"scorer": "numeric"}})
        evaluate(VERSION, [prompts(11)], endpoints, other, tmp_path)
    assert sampler.requests, "another scorer"


def test_with_an_environment_samples_are_episodes_whose_reward_is_what_they_earned_and_their_score(
    tmp_path: Path,
) -> None:
    values = recipe(min_scored=0.5).model_dump()
    with_environment = parse_recipe({**values, "environment": {"path": "a:B", "max_turns": 2}})
    one = prompts(2, 3, temperature=1.0, seed=1)
    with serving(sampler := Episodes(), judge=(judge := Judge())) as endpoints:
        result = evaluate(VERSION, [one], endpoints, with_environment, tmp_path)
    (request,) = sampler.requests
    assert [item.episode.name for item in request.items] == ["eval-test-0", "eval-test-1"]
    row = {"data_source": "s1", "prompt": [], "ability": "", "ground_truth": "?", "extra_info": {}}
    assert json.loads(request.items[1].episode.row) == row
    asked = [item for one in judge.requests for item in one.items]
    assert [item.solution for item in asked] == ["1", "2", "2", "3"], "what failed is not scored"
    assert json.loads(asked[0].extra_info)["messages"] == [{"role": "user", "content": "?"}]
    rows = lines(tmp_path / "test.jsonl")
    assert [row["reward"] for row in rows] == [0.5, 1.5, None, 1.5, 0.5, None]
    assert [row["correct"] for row in rows] == [False, True, False, True, False, False]
    assert rows[0]["breakdown"] == {"math/answered": 1.0, "earned": 0.5}
    assert (rows[2]["unscored"], rows[2]["episode"]["error"]) == ("environment", "step: gone")
    found = result.sets["test"]
    assert (found.unscored, found.num_scored) == ({"environment": 2}, 4)
    counted = {"num_turns": 8, "stop_terminated": 2, "stop_turns": 2, "num_tool_calls": 12, "num_invalid_calls": 2}
    assert found.episodes == counted, "what is no whole number is not counted"
    with serving(sampler := Episodes()) as endpoints:
        evaluate(VERSION, [one], endpoints, with_environment, tmp_path)
        assert sampler.requests == []
        longer = parse_recipe({**values, "environment": {"path": "a:B", "max_turns": 3}})
        evaluate(VERSION, [one], endpoints, longer, tmp_path)
        assert sampler.requests, "another environment"


def test_below_the_bound_of_scored_samples_a_set_fails_with_one_line(tmp_path: Path) -> None:
    with serving(Answers()) as endpoints:
        result = evaluate(VERSION, [prompts(200)], endpoints, recipe(min_scored=0.95), tmp_path)
    told = "180 of 200 samples have a score, fewer than eval.min_scored = 0.95: 20 timeout"
    assert result.failures == [f"evaluation set test failed: {told}"]
    assert (result.accuracy, result.sets["test"].metrics, result.sets["test"].num_scored) == (None, {}, 180)


def test_a_failed_chunk_is_retried_on_another_sampler(tmp_path: Path) -> None:
    broken = Answers(failures=1000)
    with serving(broken, Answers()) as endpoints:
        result = evaluate(VERSION, [prompts(100)], endpoints, recipe(), tmp_path)
    assert (result.num_scored, result.unscored) == (90, {"timeout": 10})


def test_answers_of_another_version_are_refused(tmp_path: Path) -> None:
    with serving(Answers(version=VERSION + 1)) as endpoints:
        result = evaluate(VERSION, [prompts(10)], endpoints, recipe(), tmp_path)
        assert (result.accuracy, result.num_scored, result.unscored) == (None, 0, {"NotAdmittedError": 10})
        result = evaluate(None, [prompts(10)], endpoints, recipe(), tmp_path)
        assert result.num_scored == 9, "no version asked for: any will do"


def test_without_samplers_nothing_is_scored(tmp_path: Path) -> None:
    with serving() as endpoints:
        result = evaluate(VERSION, [prompts(3)], endpoints, recipe(), tmp_path)
    assert (result.mean_reward, result.unscored) == (None, {"no_sampler": 3})


def test_every_call_has_few_samples_and_a_seed_of_its_own() -> None:
    chunks = chunks_of(prompts(40, 4, temperature=1.0, seed=7).prompts)
    assert [len(chunk) for chunk in chunks] == [16, 16, 8]
    assert [{one.sampling.seed for one in chunk} for chunk in chunks] == [{7}, {8}, {9}]
    assert {one.sampling.seed for chunk in chunks_of(prompts(70, seed=7).prompts) for one in chunk} == {None}, "greedy"
    mixed = [*prompts(2).prompts, *prompts(2, max_tokens=3).prompts]
    assert [len(chunk) for chunk in chunks_of(mixed)] == [2, 2], "rows with a limit of their own"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{1  + x}", "1 + x"),
        ("<answer> 4 </answer>", "4"),
        ("<answer>3</answer> no, \\boxed{4}", "4"),
        ("2 + 2\n#### 4 ", "4"),
        (" a  b\n", "a b"),
    ],
)
def test_the_vote_of_an_answer_is_what_it_ends_with(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_a_set_is_loaded_with_its_own_sampling(tmp_path: Path) -> None:
    values = small_values(tmp_path)
    values["model"]["path"] = str(write_chat_model(tmp_path / "chat"))
    values["rollout"] |= {"top_k": 5, "min_p": 0.1}  # of training samples only
    limited = {**verl_row("1 + 1 =", "2"), "extra_info": {"max_response_tokens": 4}}
    file = write_lines(tmp_path / "aime.jsonl", [verl_row(f"{number} + 1 =", "2") for number in range(4)] + [limited])
    sampled = {"file": str(file), "samples_per_prompt": 2, "top_p": 0.5, "max_response_tokens": 16, "scorer": "exact"}
    short, many = recipe_of(
        values,
        run={"seed": 11},
        data={"eval_file": str(file)},
        eval={"sets": [{**sampled, "name": "many", "every": 3}]},
        trainer={"evaluate_every": 5},
    ).eval_sets
    assert (short.name, short.every, many.every) == ("aime", 5, 3)
    assert (short.temperature, many.temperature) == (0.0, 1.0), (
        "one answer is greedy; several are sampled as in training"
    )
    whole = recipe_of(values, run={"seed": 11})
    one, two = load_set(short, whole), load_set(many.model_copy(update={"limit": 2}), whole)
    assert [prompt.sampling.max_tokens for prompt in one.prompts] == [32] * 4 + [4]
    assert len(two.prompts) == 2 and two.prompts[0].num_samples == 2
    assert two.prompts[0].sampling == SamplingParameters(1.0, 0.5, max_tokens=16, seed=11)
    assert (one.rubric, two.rubric) == ("", '[[components]]\nscorer = "exact"\n')


def test_tool_failures_that_are_whole_numbers_are_summed(tmp_path: Path) -> None:
    with_environment = parse_recipe({**recipe().model_dump(), "environment": {"path": "a:B"}})
    sampler = Episodes()
    for failures, counted in ((2, {"num_tool_failures": 8}), (0, {"num_tool_failures": 0}), (True, {}), (1.0, {})):
        sampler.tool_failures = failures
        with serving(sampler) as endpoints:
            result = evaluate(None, [prompts(2, 2)], endpoints, with_environment, tmp_path / repr(failures))
        found = result.sets["test"].episodes
        assert {name: number for name, number in found.items() if name == "num_tool_failures"} == counted


def test_a_set_plays_what_it_says_and_its_samples_depend_on_it(tmp_path: Path) -> None:
    with_environment = parse_recipe({**recipe().model_dump(), "environment": {"path": "a:B", "arguments": {"n": 1}}})
    longer = parse_recipe({**with_environment.model_dump(), "environment": {"path": "a:B", "max_turns": 3}})
    other, asked = '{"arguments": {"n": 2}, "path": "a:B"}', []
    cases = [("", with_environment), (other, with_environment), (other, longer), ("none", longer)]
    for environment, played in [*cases, ("none", with_environment)]:
        with serving(sampler := Answers()) as endpoints:
            evaluate(VERSION, [replace(prompts(3), environment=environment)], endpoints, played, tmp_path)
        items = [item for request in sampler.requests for item in request.items]
        asked.append([(item.HasField("episode"), item.episode.environment) for item in items])
    assert asked == [[(True, "")] * 3, [(True, other)] * 3, [(True, other)] * 3, [(False, "")] * 3, []], (
        "single answers do not depend on the environment"
    )


def test_a_set_has_time_for_all_attempts_at_its_episodes() -> None:
    def seconds(one: EvaluationSet, num_samplers: int = 1, **environment: Any) -> float:
        played = parse_recipe({**recipe().model_dump(), "environment": {"step_seconds": 60.0, **environment}})
        return deadline_seconds(one, played, num_samplers)

    long = {"path": "a:B", "episode_seconds": 2400.0, "max_attempts": 2}
    assert seconds(prompts(8)) == seconds(prompts(8), path="a:B") == 900.0
    assert seconds(replace(prompts(8), environment="none"), **long) == 900.0
    assert seconds(prompts(8), **{**long, "episode_seconds": 60.0}) == 900.0
    assert seconds(prompts(128), **long) == 2 * 2460.0, "two calls of 64 samples at once"
    assert seconds(prompts(129), **long) == seconds(prompts(512), num_samplers=2, **long) == 2 * 2 * 2460.0
    assert seconds(prompts(8), **{**long, "episode_seconds": 1e300}) == 604_800.0


def test_a_loaded_set_names_the_environment_that_it_plays(tmp_path: Path) -> None:
    values = small_values(tmp_path)
    values["model"]["path"] = str(write_chat_model(tmp_path / "chat"))
    file = write_lines(tmp_path / "aime.jsonl", [verl_row("1 + 1 =", "2")])
    sets = [{"name": "own", "file": str(file)}, {"name": "single", "file": str(file), "environment": "none"}]
    whole = recipe_of(values, environment={"path": "a:B"}, eval={"sets": sets})
    assert [load_set(one, whole).environment for one in whole.eval_sets] == ["", "none"]
