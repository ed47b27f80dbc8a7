"""What an environment adds where a limit ends its episode."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.protos.types import SamplingParameters, Trajectory
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.rollout.environments.test_tool_episodes import Caller, tokenizer
from tests.rollout.environments.test_tools import VERL_TOOL, VERL_YAML
from tests.support.episodes import SAMPLING, ScriptedSampler, prompt_of, sampled_parts


def play(encoder: ChatEncoder, words: list[str], sampler: ScriptedSampler | None = None, **config: Any) -> Trajectory:
    async def main() -> Trajectory:
        settings = EnvironmentConfig.model_validate(config)
        pool = EnvironmentPool(settings)
        await pool.start()
        try:
            shown = encoder if not pool.tools else encoder.with_tools(pool.tools)
            used = sampler or ScriptedSampler(lambda _: words)
            episodes = EpisodeSampler(used, pool, EpisodeEncoder(shown), settings, seed=5)
            longest = SAMPLING if sampler is None else SamplingParameters(max_tokens=3000)
            return await episodes.sample(prompt_of(), longest, 0, on_change=lambda: None)
        finally:
            await pool.close()

    return asyncio.run(main())


def judged(folder: Path, **faults: str) -> dict[str, Any]:
    return {"path": "tests.support.environments:Judged", "arguments": {"marks": str(folder), "faults": faults}}


@pytest.mark.parametrize(
    ("limits", "stop", "rewards"),
    [
        ({"max_turns": 2}, "turns", [0.25, 2.25]),
        ({"max_turn_tokens": 4}, "turn_tokens", [0.25, 0.25, 2.0]),
        ({}, "terminated", [0.25, 0.25, 0.25, 1.0]),
    ],
)
def test_the_last_turn_earns_it_at_a_limit_and_at_no_other_end(
    encoder: ChatEncoder, tmp_path: Path, limits: dict[str, Any], stop: str, rewards: list[float]
) -> None:
    """The third turn is too long for the limit of tokens."""
    row = play(encoder, ["one", "two", "three", "end"], **judged(tmp_path), **limits)
    (segment,), (found,) = row.segments, row.token_rewards or ()
    assert row.metadata["stop"] == stop and row.earned_reward == sum(rewards)
    ends = [end - 1 for _, end in sampled_parts(segment)]
    assert [float(found[end]) for end in ends] == rewards and float(np.abs(found).sum()) == sum(rewards)
    asked = (tmp_path / "calls").read_text().splitlines().count("final_reward")
    assert asked == (stop != "terminated") and not [*tmp_path.glob("open-*")]


def test_an_environment_that_fails_at_it_costs_its_episode_an_attempt(encoder: ChatEncoder, tmp_path: Path) -> None:
    row = play(encoder, ["one", "two"], max_turns=2, **judged(tmp_path, any="once"))
    assert row.earned_reward == 2.5
    noted = (tmp_path / "calls").read_text().splitlines()
    assert [one.split()[0] for one in noted] == ["reset", "step", "step", "final_reward"] * 2


def test_verls_calc_reward_is_asked_at_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    (tmp_path / "verl_counter.py").write_text(VERL_TOOL)
    (tmp_path / "tools.yaml").write_text(VERL_YAML)
    folder = tmp_path / "model"
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    sampler = Caller(lambda _: ['<tool_call>{"name": "count", "arguments": {"by": 3}}</tool_call>'] * 3)
    sampler.max_model_tokens = 4000
    tools = (str(tmp_path / "tools.yaml"),)
    row = play(ChatEncoder(str(folder)), [], sampler, tools=tools, max_turns=2)
    assert row.metadata["stop"] == "turns" and row.metadata["num_turns"] == 2
    assert row.earned_reward == 2 * 0.5 + 12.0, "two calls, and the count of two times three"
