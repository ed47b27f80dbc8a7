"""`Generate` on a sampler with an environment: episodes by name, exact tokens, and environments that fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.protos import rollout_pb2
from tandem.protos.errors import ConfigError, DataError, NotAdmittedError
from tandem.rollout.environments.config import TOOL_ENVIRONMENT, EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.config import Recipe, parse_recipe
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder, start_episodes
from tandem.services.rollout.server import RolloutServicer
from tests.rollout.environments.test_episode import ECHO, ScriptedSampler, prompt_of, tokenizer
from tests.support.tiny_model import TOOL_TEMPLATE, build_tiny_model, character_tokenizer

Words = Callable[[int], Sequence[str]]
Sample = rollout_pb2.GenerateReply.Sample
WORDS = ["one", "two", "end"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(str(build_tiny_model(tmp_path_factory.mktemp("model"))))


def request_of(*names: str, num_samples: int = 1, row: str = "") -> rollout_pb2.GenerateRequest:
    ids = prompt_of().token_ids.astype("<i4").tobytes()
    row = row or json.dumps({"prompt": "Repeat.", "ground_truth": "?"})
    items = [
        rollout_pb2.GenerateRequest.Item(
            prompt_ids=ids, num_samples=num_samples, episode=rollout_pb2.GenerateRequest.Episode(row=row, name=name)
        )
        for name in names
    ]
    sampling = rollout_pb2.SamplingParameters(temperature=1.0, max_tokens=400)
    return rollout_pb2.GenerateRequest(items=items, sampling=sampling)


def generate(
    encoder: ChatEncoder,
    words: Words,
    request: rollout_pb2.GenerateRequest,
    versions: Sequence[int] = (0,),
    **config: Any,
) -> list[list[Sample]]:
    """The samples of the request, which is made once for each version that the sampler carries."""

    async def main() -> list[list[Sample]]:
        settings = EnvironmentConfig(**{"path": ECHO, **config})
        pool = EnvironmentPool(settings)
        await pool.start()
        sampler = ScriptedSampler(words)
        found = []
        try:
            episodes = EpisodeSampler(sampler, pool, EpisodeEncoder(encoder), settings, seed=5)
            servicer = RolloutServicer("rollout-0", sampler, None, 400, Path(), episodes)  # type: ignore[arg-type]
            for version in versions:
                sampler._version = (1, version)
                reply = await servicer.Generate(request, None)  # type: ignore[arg-type]
                found.append([sample for item in reply.items for sample in item.samples])
        finally:
            await pool.close()
        return found

    return asyncio.run(main())


def seed_of(sample: Sample) -> str:
    return str(json.loads(sample.episode)["messages"][1]["content"])


def test_an_episode_is_answered_with_its_sampled_tokens_its_reward_and_how_it_ended(encoder: ChatEncoder) -> None:
    ((sample,),) = generate(encoder, lambda _: WORDS, request_of("eval-test-0"))
    ids = np.frombuffer(sample.ids, "<i4")
    assert tokenizer().decode(ids.tolist()) == "one<|im_end|>two<|im_end|>end<|im_end|>"
    logprobs = np.frombuffer(sample.behavior_logprobs, "<f4")
    assert len(logprobs) == len(ids) and (logprobs < 0).all()
    versions = [(span.first_token, span.policy_version) for span in sample.spans]
    assert versions == [(0, 0), (8, 1)], "counted over sampled tokens: the weights changed before the third turn"
    assert (sample.text, sample.finish_reason, sample.earned_reward) == ("one\ntwo\nend", "stop", 1.5)
    episode = json.loads(sample.episode)
    assert (episode["stop"], episode["num_turns"], episode["info"]) == ("terminated", 3, {"said": "end"})
    assert [one["content"] for one in episode["messages"]][2:] == ["one", "one?", "two", "two?", "end"]


def test_the_environments_seed_depends_on_the_name_and_the_sample_and_not_on_the_version(encoder: ChatEncoder) -> None:
    asked = request_of("eval-test-0", "eval-test-1", "eval-other-0", num_samples=2)
    first, second = generate(encoder, lambda _: ["end"], asked, versions=(0, 7))
    seeds = [seed_of(sample) for sample in first]
    assert len(set(seeds)) == 6
    assert [seed_of(sample) for sample in second] == seeds


def test_an_environment_that_fails_costs_its_own_sample_only(encoder: ChatEncoder) -> None:
    config: dict[str, Any] = {"arguments": {"faults": {"bad": "raise"}}, "max_attempts": 1}
    asked = request_of("eval-test-0", num_samples=3)
    (samples,) = generate(encoder, lambda number: ["bad" if number == 1 else "good", "end"], asked, **config)
    assert [sample.finish_reason for sample in samples] == ["stop", "error", "stop"]
    assert json.loads(samples[1].episode)["error"].startswith("step: RuntimeError: the server of this environment")


def test_an_episode_of_which_another_version_sampled_a_turn_is_refused(encoder: ChatEncoder) -> None:
    asked = request_of("eval-test-0")
    asked.required_version = 0
    with pytest.raises(NotAdmittedError, match=r"asked for version 0, tokens were sampled by \[0, 1\]"):
        generate(encoder, lambda _: WORDS, asked)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "the row of an episode is not JSON"),
        ("[]", "the row of an episode cannot be used: malformed: it is no JSON object"),
        ("{}", "the row of an episode cannot be used: empty: prompt is missing"),
        ('{"prompt": "?"}', "the row of an episode cannot be used: no_ground_truth"),
        ("", "rollout-3 has no environment, so it plays no episodes"),
    ],
)
def test_an_episode_that_cannot_be_played_is_refused(row: str, told: str) -> None:
    sampler = ScriptedSampler(lambda _: WORDS)
    servicer = RolloutServicer("rollout-3", sampler, None, 400, Path())  # type: ignore[arg-type]
    with pytest.raises(DataError, match=told):
        asyncio.run(servicer.Generate(request_of("eval-test-0", row=row), None))  # type: ignore[arg-type]


def recipe_with(model: str | Path, *environments: Any, **config: Any) -> Recipe:
    """A recipe with an environment, and evaluation sets with others."""
    sets = [{"name": f"s{n}", "file": "unread.jsonl", "environment": one} for n, one in enumerate(environments)]
    return parse_recipe(
        {
            "run": {"run_id": "r"},
            "model": {"path": str(model)},
            "data": {"train_file": "unread.jsonl"},
            "environment": {"path": ECHO, "max_attempts": 1, **config},
            "eval": {"sets": sets},
        }
    )


def answered(words: Words, recipe: Recipe, *environments: str) -> tuple[list[Sample], dict[str, int]]:
    """A sample of the recipe's sampler in each environment, and the ends that the sampler counts."""

    async def main() -> tuple[list[Sample], dict[str, int]]:
        sampler = ScriptedSampler(words)
        async with AsyncExitStack() as stack:
            episodes = await start_episodes(recipe, sampler, None, threading.Event(), stack)  # type: ignore[arg-type]
            assert episodes is not None
            servicer = RolloutServicer("rollout-0", sampler, None, 400, Path(), episodes)  # type: ignore[arg-type]
            request = request_of(*(f"eval-s-{number}" for number in range(len(environments))))
            for item, environment in zip(request.items, environments, strict=True):
                item.episode.environment = environment
            reply = await servicer.Generate(request, None)  # type: ignore[arg-type]
            return [item.samples[0] for item in reply.items], episodes.figures.ended

    return asyncio.run(main())


def test_an_evaluation_set_plays_its_own_arguments_or_class(encoder: ChatEncoder) -> None:
    agent = {"path": "tests.support.agents:Scripted", "arguments": {"script": "conversation"}}
    faults = {"faults": {"one": "raise"}}
    recipe = recipe_with(encoder.model_path, {"arguments": {"faults": {}}}, agent, "none", agent, arguments=faults)
    keys = [one.environment.key(recipe.environment) for one in recipe.eval_sets]
    assert (keys[2], keys[1]) == ("none", keys[3])
    (failed, other, agents), ended = answered(lambda _: ["one", "two", "end"], recipe, "", keys[0], keys[1])
    assert failed.finish_reason == "error" and "step: RuntimeError" in failed.episode
    assert (other.finish_reason, other.earned_reward, other.text) == ("stop", 1.5, "one\ntwo\nend")
    assert (agents.finish_reason, agents.earned_reward) == ("stop", 1.5)
    assert ended["terminated"] == 2, "the sampler counts all of them"


def test_an_environment_that_no_set_of_the_recipe_names_is_refused(encoder: ChatEncoder) -> None:
    recipe = recipe_with(encoder.model_path, {"arguments": {"faults": {"a": "raise"}}})
    with pytest.raises(DataError, match="rollout-0: no evaluation set of its recipe has the class and arguments"):
        answered(lambda _: ["end"], recipe, '{"arguments": {}, "path": "os:system"}')


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"arguments": {"turns": 8}}, "evaluation set s0: environment.path: .*Echo: TypeError: .*'turns'"),
        ("tests.support.environments:Nobody", "evaluation set s0: environment.path: .* has no class Nobody"),
    ],
)
def test_a_sampler_does_not_start_with_a_set_whose_environment_cannot_be_used(
    environment: Any, told: str, encoder: ChatEncoder
) -> None:
    with pytest.raises(ConfigError, match=told):
        answered(lambda _: ["end"], recipe_with(encoder.model_path, environment))


def test_a_set_may_not_play_with_unsafe_tools(tmp_path: Path) -> None:
    character_tokenizer(TOOL_TEMPLATE).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    unsafe = {"path": TOOL_ENVIRONMENT, "arguments": {"tools": ["tests.support.unsafe_tools:pay"]}}
    recipe = recipe_with(tmp_path, unsafe, tool_format="hermes")
    with pytest.raises(ConfigError, match="set s0: pay is unsafe, and evaluations do not save their episodes"):
        answered(lambda _: ["end"], recipe)


def test_an_item_that_fails_ends_the_others_of_its_call() -> None:
    ended: list[str] = []

    class Endless:
        async def sample(self, *_: object, **_named: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

    async def main() -> None:
        servicer = RolloutServicer("rollout-0", Endless(), None, 400, Path())  # type: ignore[arg-type]
        items = [rollout_pb2.GenerateRequest.Item(prompt_ids=ids) for ids in (bytes(8), bytes(7))]
        with pytest.raises(DataError, match="item 1: prompt_ids are int32, 7 bytes are none"):
            await servicer.Generate(rollout_pb2.GenerateRequest(items=items), None)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert ended == ["cancelled"]

    asyncio.run(main())
