"""Episodes that a limit of time or of calls ends, and what the recipe's policies make of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.protos.types import SamplingParameters, Trajectory
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.rollout.environments.test_tool_episodes import ADD, FAIL, Caller, tokenizer
from tests.support.episodes import SAMPLING, ScriptedSampler, prompt_of, sampled_parts

ECHO = "tests.support.environments:Echo"
TOOLS = ("tests.support.tools:add", "tests.support.tools:fail")
UNKNOWN = '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>'
UNREADABLE = '<tool_call>{"name": "add", </tool_call>'


def play(encoder: ChatEncoder, sampler: ScriptedSampler, sampling: SamplingParameters, **config: Any) -> Trajectory:
    async def main() -> Trajectory:
        settings = EnvironmentConfig(**config)
        pool = EnvironmentPool(settings)
        await pool.start()
        try:
            shown = encoder if not pool.tools else encoder.with_tools(pool.tools)
            episodes = EpisodeSampler(sampler, pool, EpisodeEncoder(shown), settings, seed=5)
            row = await episodes.sample(prompt_of(), sampling, 0)
            assert episodes.figures.ended[row.metadata["stop"]] == sum(episodes.figures.ended.values()) == 1
            return row
        finally:
            await pool.close()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    folder = tmp_path_factory.mktemp("tools")
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return ChatEncoder(str(folder))


@pytest.mark.parametrize(("name", "policy"), [("turn", "end"), ("episode", "unscored")])
def test_a_turn_that_takes_too_long_is_discarded_and_ends_the_episode(
    encoder: ChatEncoder, name: str, policy: str
) -> None:
    """The second turn never ends."""
    sampler = ScriptedSampler(lambda _: ["one", "two", "end"], stops_at=(1, 2))
    limits = {f"{name}_seconds": 0.5, "policies": {f"{name}_time": policy}}
    row = play(encoder, sampler, SAMPLING, path=ECHO, **limits)
    assert (row.metadata["stop"], row.metadata["num_turns"], row.text) == (f"{name}_time", 1, "one")
    assert len(sampled_parts(row.segments[0])) == 1 and row.earned_reward == 0.25
    assert row.finish_reason == ("stop" if policy == "end" else "error")
    assert row.metadata.get("unscored", "").endswith("leaves unscored") == (policy == "unscored")


@pytest.mark.parametrize(
    ("turns", "limits", "stop", "num_turns", "executed"),
    [
        ([UNREADABLE, ADD, "done"], {}, "terminated", 3, 1),
        ([UNREADABLE, ADD, "done"], {"policies": {"parse_error": "end"}}, "parse_error", 1, 0),
        ([UNKNOWN, ADD, UNKNOWN, UNREADABLE, "done"], {"max_invalid_calls": 2}, "invalid_calls", 4, 1),
        (
            [FAIL.replace("HOW", "hang"), "done"],
            {"step_seconds": 1.0, "policies": {"tool_timeout": "end"}},
            *("tool_timeout", 1, 1),
        ),
        ([ADD, ADD, "done"], {"arguments": {"max_calls": 1}}, "terminated", 3, 1),
        ([ADD, ADD, "done"], {"arguments": {"max_calls": 1}, "policies": {"call_limit": "end"}}, "call_limit", 2, 1),
    ],
    ids=["told", "parse_error", "invalid_calls", "tool_timeout", "told of the limit", "call_limit"],
)
def test_calls_that_cannot_be_read_or_take_too_long_are_told_or_end_the_episode(
    with_tools: ChatEncoder, turns: Sequence[str], limits: dict[str, Any], stop: str, num_turns: int, executed: int
) -> None:
    sampler = Caller(lambda _: turns)
    sampler.max_model_tokens = 4000
    row = play(with_tools, sampler, SamplingParameters(max_tokens=3000), tools=TOOLS, **limits)
    assert (row.metadata["stop"], row.metadata["num_turns"]) == (stop, num_turns)
    assert row.metadata["info"].get("num_tool_calls", 0) == executed


def test_an_unscored_end_is_no_reward_of_a_tool_that_was_too_slow(with_tools: ChatEncoder) -> None:
    sampler = Caller(lambda _: [FAIL.replace("HOW", "hang"), "done"])
    limits = {"step_seconds": 1.0, "policies": {"tool_timeout": "unscored"}}
    sampler.max_model_tokens = 4000
    row = play(with_tools, sampler, SamplingParameters(max_tokens=3000), tools=TOOLS, **limits)
    assert row.finish_reason == "error" and "tool_timeout" in row.metadata["unscored"]
