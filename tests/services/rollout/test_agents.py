"""Agents in processes of their own: their trajectories, limits, and agents that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tandem.protos.errors import EpisodeError, UnavailableError
from tandem.protos.types import FinishReason, SamplingParameters, Trajectory
from tandem.rollout.environments import episode
from tandem.rollout.environments.agent_episodes import AgentSampler
from tandem.rollout.environments.checked_episode import CheckedClass, CheckError
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.config import Recipe
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder, start_episodes
from tandem.services.rollout.openai_proxy import OpenAIProxy
from tests.support.episodes import (
    SAMPLING,
    ScriptedSampler,
    chat_encoder,
    prompt_of,
    texts_of,
)
from tests.support.paths import ROOT
from tests.support.redis_ring import new_run
from tests.support.strangers import listening_ports
from tests.support.tiny_model import build_tiny_model

AGENT = "tests.support.agents:Scripted"
SILENT = "tests.support.environments:SilentAgent"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return chat_encoder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode, "_FIRST_PAUSE_SECONDS", 0.01)


def play(
    encoder: ChatEncoder, script: str, finish: FinishReason = "stop", times: int = 3, **config: Any
) -> tuple[Trajectory, AgentSampler]:
    """One trajectory of an agent in a process of its own."""
    sampling = config.pop("sampling", SAMPLING)

    async def main() -> tuple[Trajectory, AgentSampler]:
        arguments = {"script": script, "times": times}
        settings = EnvironmentConfig(**{"path": AGENT, "arguments": arguments, "max_attempts": 1, **config})
        pool = EnvironmentPool(settings)
        await pool.start()
        try:
            sampler = ScriptedSampler(lambda _: ["one", "two", "three", "four"], finish)
            agents = AgentSampler(sampler, pool, EpisodeEncoder(encoder), settings, seed=5)
            async with OpenAIProxy(agents.sessions).serving() as agents.address:
                return await agents.sample(prompt_of(), sampling, 0), agents
        finally:
            await pool.close()

    return asyncio.run(main())


def test_an_agent_in_a_process_of_its_own_becomes_a_trajectory_with_its_reward(
    encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    row, agents = play(encoder, "conversation")
    assert texts_of(row) == [["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]]
    assert row.earned_reward == 1.5 and row.metadata["info"] == {"said": ["one", "two", "three"]}
    assert agents.sessions == {}, "the session has ended"
    json.dumps(dict(row.metadata))


def test_an_agent_may_run_under_another_interpreter(encoder: ChatEncoder) -> None:
    row, _ = play(encoder, "conversation", interpreter=sys.executable)
    assert row.earned_reward == 1.5


@pytest.mark.parametrize(
    ("limits", "stop", "finish", "turns"),
    [
        ({"max_turns": 2}, "turns", "stop", 2),
        ({"sampling": SamplingParameters(max_tokens=30)}, "episode_tokens", "length", 2),
        ({"max_turn_tokens": 4, "times": 3}, "turn_tokens", "length", 3),
    ],
)
def test_limits_end_an_agents_episode(
    encoder: ChatEncoder, limits: dict[str, Any], stop: str, finish: str, turns: int
) -> None:
    row, _ = play(encoder, "conversation", **limits)
    assert (row.metadata["stop"], row.finish_reason, row.earned_reward) == (stop, finish, 0.5 * turns)
    assert len(texts_of(row)[0]) == turns
    assert turns == 3 or row.metadata["info"]["code"] == "context_length_exceeded"


def test_an_agent_that_raises_at_a_limit_has_earned_nothing(encoder: ChatEncoder) -> None:
    row, _ = play(encoder, "careless", max_turns=2)
    assert (row.metadata["stop"], row.metadata["num_turns"], row.earned_reward) == ("turns", 2, 0.0)
    assert "the episode has had its 2 turns (environment.max_turns)" in row.metadata["info"]["error"]


def test_an_agent_that_asks_nothing_gets_no_score(encoder: ChatEncoder) -> None:
    row, _ = play(encoder, "silent", path=SILENT)
    assert row.segments[0].ids.tolist() == prompt_of().token_ids.tolist()
    assert not np.any(row.segments[0].loss_mask) and row.finish_reason == "error"
    assert row.metadata["unscored"] == "nothing was sampled (it ended by 'terminated')"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("raises", r"run: RuntimeError: no idea \(environments.py:"),
        ("returns_text", "run: run returned the reward 'done', which is no finite number"),
        ("idle", "run has neither ended nor called the policy for 1 s"),
        ("dies", "the environments' process has ended"),
    ],
)
def test_an_agent_that_fails_is_an_episode_that_failed(encoder: ChatEncoder, script: str, told: str) -> None:
    with pytest.raises(EpisodeError, match=told):
        play(encoder, script, path=SILENT, step_seconds=1.0)


def test_an_engine_that_ends_is_no_fault_of_the_agent(encoder: ChatEncoder) -> None:
    with pytest.raises(UnavailableError, match="the engine ended turn 0 of 0-0 with 'error'"):
        play(encoder, "conversation", finish="error")


def test_the_example_plays_and_the_proxy_listens_on_loopback_only(encoder: ChatEncoder) -> None:
    async def main() -> tuple[Trajectory, set[str]]:
        settings = EnvironmentConfig(path=str(ROOT / "examples/environments/self_check.py") + ":SelfCheck")
        pool = EnvironmentPool(settings)
        await pool.start()
        try:
            sampler = ScriptedSampler(lambda _: ["it is 1,2", "no, 1"])
            agents = AgentSampler(sampler, pool, EpisodeEncoder(encoder), settings, seed=5)
            before = listening_ports(psutil.Process())
            async with OpenAIProxy(agents.sessions).serving() as agents.address:
                row = await agents.sample(prompt_of(), SAMPLING, 0)
                return row, {host for host, _ in set(listening_ports(psutil.Process())) - set(before)}
        finally:
            await pool.close()

    row, hosts = asyncio.run(main())
    assert (row.earned_reward, row.metadata["info"]) == (1.0, {"was_right_at_first": False})
    assert hosts == {"127.0.0.1"}


def test_a_sampler_whose_recipe_names_an_agent_serves_it(tmp_path: Path, redis_url: str) -> None:
    model, buffer = build_tiny_model(tmp_path), new_run(redis_url)
    values = {
        "run": {"run_id": "agents", "folder": str(tmp_path), "total_batches": 1},
        "model": {"path": str(model)},
        "data": {"train_file": "unread.jsonl"},
        "environment": {"path": AGENT, "arguments": {"script": "conversation"}},
    }

    async def main() -> Trajectory:
        async with contextlib.AsyncExitStack() as stack:
            sampler = ScriptedSampler(lambda _: ["one", "two", "three"])
            episodes = await start_episodes(Recipe.model_validate(values), sampler, buffer, threading.Event(), stack)
            assert isinstance(episodes, AgentSampler)
            return await episodes.sample(prompt_of(), SAMPLING, 0)

    with contextlib.closing(buffer):
        assert asyncio.run(main()).earned_reward == 1.5


def test_the_check_of_environments_says_that_an_agent_is_none() -> None:
    request = {"path": SILENT, "arguments": {}, "actions": [], "step_seconds": 1.0, "task": {}}
    with pytest.raises(CheckError, match="the class is an agent: it has `run`, and no steps that can be checked"):
        CheckedClass(request, lambda _: None)
