"""Episodes that a limit of time or of calls ends, and what the recipe's policies make of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.protos.types import SamplingParameters, Trajectory
from tandem.rollout.environments.config import EnvironmentConfig, StopPolicies
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


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("name", ["turn", "episode"])
def test_an_episode_whose_first_turn_takes_too_long_is_unscored(
    encoder: ChatEncoder, name: str, num_tokens: int
) -> None:
    sampler = ScriptedSampler(lambda _: ["one", "end"], stops_at=(0, num_tokens))
    row = play(encoder, sampler, SAMPLING, path=ECHO, **{f"{name}_seconds": 0.5})
    assert (row.metadata["stop"], row.metadata["num_turns"], row.finish_reason) == (f"{name}_time", 0, "error")
    assert row.metadata["unscored"] == f"nothing was sampled (it ended by '{name}_time')"
    (segment,) = row.segments
    assert len(segment.ids) and not segment.num_loss_tokens


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


HANG = FAIL.replace("HOW", "hang")
LATE: dict[str, Any] = {"path": ECHO, "words": ["one", "two"], "stops_at": (1, 2)}
"""The second turn never ends."""
LONG: dict[str, Any] = {"path": ECHO, "words": ["one", "x" * 1000]}
ENDS: dict[str, dict[str, Any]] = {
    "turns": {"path": ECHO, "words": ["one", "two"], "max_turns": 1},
    "episode_tokens": LONG,
    "turn_tokens": {**LONG, "max_turn_tokens": 20},
    "context": {**LONG, "longest": 300},
    "episode_time": {**LATE, "episode_seconds": 0.5},
    "turn_time": {**LATE, "turn_seconds": 0.5},
    "parse_error": {"words": [UNREADABLE]},
    "invalid_calls": {"words": [UNKNOWN], "max_invalid_calls": 1},
    "call_limit": {"words": [ADD, ADD], "arguments": {"max_calls": 1}},
    "tool_timeout": {"words": [HANG], "step_seconds": 1.0},
}
"""An episode for each limit that a policy is known for; with tools, unless it has a path."""
OF_AGENTS = {"refused"}
"""Ends of agents alone: tests/services/rollout/test_openai_proxy.py."""


def ended(
    encoder: ChatEncoder,
    words: Sequence[str],
    longest: int = 4000,
    stops_at: tuple[int, int] | None = None,
    **more: Any,
) -> Trajectory:
    """An episode with tools, unless `more` has a path."""
    sampler = (ScriptedSampler if "path" in more else Caller)(lambda _: words)
    sampler.max_model_tokens, sampler._stops_at = longest, stops_at
    config = more if "path" in more else {"tools": TOOLS, **more}
    return play(encoder, sampler, SAMPLING if "path" in more else SamplingParameters(max_tokens=3000), **config)


@pytest.mark.parametrize("stop", sorted({*StopPolicies.model_fields} - OF_AGENTS))
def test_every_limit_leaves_its_episode_unscored_where_the_recipe_says_so(
    encoder: ChatEncoder, with_tools: ChatEncoder, stop: str
) -> None:
    how = ENDS[stop]
    row = ended(encoder if "path" in how else with_tools, **how, policies={stop: "unscored"})
    assert row.metadata["stop"] == stop and row.finish_reason == "error"
    assert row.metadata["unscored"] == f"it ended by {stop!r}, which environment.policies leaves unscored"
    assert row.segments[0].loss_mask.any(), "it is unscored by its policy, and not because nothing was sampled"


@pytest.mark.parametrize(
    ("how", "policies", "stop"),
    [
        ({"words": [UNREADABLE], "max_turn_tokens": 5}, ["turn_tokens", "parse_error"], "turn_tokens"),
        ({"words": [UNREADABLE], "max_invalid_calls": 1}, ["parse_error", "invalid_calls"], "parse_error"),
        ({"words": [UNKNOWN], "max_invalid_calls": 1, "max_turns": 1}, ["invalid_calls", "turns"], "invalid_calls"),
        (
            {"words": [ADD + ADD + UNKNOWN], "arguments": {"max_calls": 1, "max_invalid_calls": 1}},
            *(["call_limit"], "terminated"),
        ),
        (
            {"words": [HANG + ADD], "arguments": {"max_calls": 1}, "step_seconds": 1.0},
            *(["tool_timeout", "call_limit"], "call_limit"),
        ),
        ({"words": [HANG], "step_seconds": 1.0, "max_turns": 1}, ["tool_timeout", "turns"], "tool_timeout"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_of_ends_that_apply_at_once_the_first_one_of_the_documented_order_is_told(
    with_tools: ChatEncoder, how: dict[str, Any], policies: Sequence[str], stop: str
) -> None:
    row = ended(with_tools, **how, policies=dict.fromkeys(policies, "end"))
    assert (row.metadata["stop"], row.metadata["num_turns"]) == (stop, 1)
