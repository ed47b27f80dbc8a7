"""Unsafe tools: their calls are saved before they are made, and nothing that happens makes them twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.errors import ConfigError, EpisodeError, UnavailableError
from tandem.protos.types import SamplingParameters, Trajectory, TrajectoryGroup
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeFigures
from tandem.rollout.environments.process import RemoteEnvironment, check_class
from tests.support.episodes import ScriptedSampler, prompt_of
from tests.support.unsafe_tools import TOOLS, VARIABLE, call, caller, calling_episodes, calls

SAMPLING = SamplingParameters(max_tokens=2000)
PAY, DIE = call("pay", "rent"), call("die_once", "here")
VERL = """
tools:
  - class_name: verl_tools.Remembers
    config: {type: native%s}
    tool_schema:
      type: function
      function: {name: remember, description: Remembers., parameters: {type: object, properties: {}, required: []}}
"""
REMEMBERS = """
import os
from uuid import uuid4
from verl.tools.base_tool import BaseTool

class Remembers(BaseTool):
    async def execute(self, instance_id, parameters, *, idempotency_key, **kwargs):
        with open(os.environ["UNSAFE_CALLS"], "a") as file:
            file.write(f"remember {instance_id} {idempotency_key}\\n")
        return f"remembered {kwargs.get('who', '')}", 0.5, {}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has a line for each call."""
    made = tmp_path / "calls"
    made.touch()
    monkeypatch.setenv(VARIABLE, str(made))
    return made


@dataclass
class Disk:
    """What is saved of an episode, and what its tools had done by then."""

    file: Path
    refuses: bool = False
    rows: list[Trajectory] = field(default_factory=list)
    done: list[list[str]] = field(default_factory=list)

    async def save(self, row: Trajectory) -> None:
        self.done += calls(self.file)
        if self.refuses:
            raise UnavailableError("Redis is away")
        (known,) = decode_group(encode_group(TrajectoryGroup(prompt_of(), (row,)))).rows
        assert isinstance(known, Trajectory)
        self.rows.append(known)


def play(
    disk: Disk,
    folder: Path,
    *words: str,
    tools: Sequence[str] = TOOLS,
    unfinished: Trajectory | None = None,
    seconds: float = 60.0,
    max_turns: int = 8,
    is_saved: bool = True,
) -> tuple[Trajectory, EpisodeFigures]:
    async def main() -> tuple[Trajectory, EpisodeFigures]:
        async with AsyncExitStack() as stack:
            episodes = await calling_episodes(stack, folder, ScriptedSampler(caller(*words)), tools, seconds, max_turns)
            more: dict[str, Any] = {"save": disk.save, "on_change": lambda: None} if is_saved else {}
            return await episodes.sample(prompt_of(), SAMPLING, 1, unfinished=unfinished, **more), episodes.figures

    return asyncio.run(main())


def answers(row: Trajectory) -> list[str]:
    return [message["content"] for message in row.metadata["messages"] if message["role"] == "tool"]


def test_an_intent_is_saved_before_its_call_and_then_nobody_makes_the_call_again(file: Path, tmp_path: Path) -> None:
    disk = Disk(file)
    row, _ = play(disk, tmp_path, call("look", "up"), PAY, DIE, "done")
    assert row.finish_reason == "stop" and answers(row) == ["saw up", "paid rent", "alive"]
    assert row.metadata["resumed_at"] == [2], "the process ended after the payment"
    assert row.metadata["info"]["num_tool_calls"] == 3, "counts go on, too"
    assert [tool for tool, *_ in calls(file)] == ["look", "pay", "die_once", "die_once"]
    (intent,) = disk.rows
    assert intent.metadata["episode"]["intents"] == [1] and [tool for tool, *_ in disk.done] == ["look"]
    keys = [key for *_, key in calls(file)]
    assert keys[2] == keys[3] and len(set(keys)) == 3, "a call has the same key in each attempt"
    episode_id = intent.metadata["episode"]["episode_id"]
    assert keys[1].startswith(f"{episode_id}/1/") and keys[1].endswith("/0")

    lost, figures = play(disk, tmp_path, call("look", "up"), PAY, "done", unfinished=intent)
    assert (lost.finish_reason, figures.unscored_episodes) == ("error", 1)
    assert "turn 1 called an unsafe tool, and its outcome is unknown" in lost.metadata["unscored"]
    assert len(calls(file)) == 4, "no tool was called"


def test_an_unsafe_tool_is_not_called_unless_its_intent_is_saved(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="Redis is away"):
        play(Disk(file, refuses=True), tmp_path, PAY, "done")
    with pytest.raises(EpisodeError, match=r"turn 0 of .* calls an unsafe tool, and the episode is not saved"):
        play(Disk(file), tmp_path, PAY, "done", is_saved=False)
    assert calls(file) == []


def test_an_environment_that_dies_beside_an_unsafe_call_leaves_its_outcome_unknown(file: Path, tmp_path: Path) -> None:
    disk = Disk(file)
    row, _ = play(disk, tmp_path, PAY + DIE, "done")
    assert row.finish_reason == "error" and "turn 0 called an unsafe tool" in row.metadata["unscored"]
    assert [tool for tool, *_ in calls(file)] == ["pay", "die_once"]
    assert row.text == PAY + DIE and row.metadata["num_turns"] == 1, "what was sampled remains to be read"


def test_an_unsafe_tool_that_hangs_has_an_outcome(file: Path, tmp_path: Path) -> None:
    row, _ = play(Disk(file), tmp_path, call("pay", "forever"), "done", seconds=1.0)
    assert row.finish_reason == "stop" and answers(row)[0].startswith("error: timeout")
    assert len(calls(file)) == 1


def test_an_episode_whose_last_reward_fails_after_an_unsafe_call_is_unscored(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteEnvironment, "final_reward", AsyncMock(side_effect=EpisodeError("calc_reward failed")))
    row, figures = play(Disk(file), tmp_path, PAY, PAY, "done", max_turns=2)
    assert (row.finish_reason, figures.unscored_episodes) == ("error", 1)
    assert row.metadata["unscored"] == "calc_reward failed, and an unsafe tool was called"
    assert row.metadata["num_turns"] == 2 and len(calls(file)) == 2, "no call is made again"


@pytest.mark.parametrize(
    ("effect", "finish"), [(", effect: unsafe", "error"), ("", "stop"), (", effect: pure", "stop")]
)
def test_verls_tools_begin_anew_unless_they_are_pure_or_were_unsafe(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: str, finish: str
) -> None:
    (tmp_path / "tools.yaml").write_text(VERL % effect)
    (tmp_path / "verl_tools.py").write_text(REMEMBERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ('<tool_call>{"name": "remember", "arguments": {}}</tool_call>', DIE, "done")
    tools = (str(tmp_path / "tools.yaml"), TOOLS[2])
    row, figures = play(Disk(file), tmp_path, *words, tools=tools)
    remembered = [key for tool, _, key in calls(file) if tool == "remember"]
    assert row.finish_reason == finish and figures.unscored_episodes == (finish == "error")
    begins_anew = not effect
    assert len(remembered) == 1 + begins_anew and len(set(remembered)) == len(remembered)
    assert row.earned_reward == (0.0 if finish == "error" else 0.5)


SHOWN = "unsafe_tools = ['pay']; tool_schemas = [{'type': 'function', 'function': {'name': 'pay'}}]"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("@tool_effect('safe')\ndef f() -> str:\n    'Does.'\n    return ''\n", "effect is 'safe'; it must be 'pure'"),
        (f"class f(Env):\n    resume = 'replay'\n    {SHOWN}\n", "'replay' would call pay again"),
        ("class f(Env):\n    unsafe_tools = ['pay']\n", "unsafe_tools names pay, but only calls of tools in its"),
        ("class f(Env):\n    unsafe_tools = [pow]\n", "must be a list of names of tools"),
    ],
)
def test_a_wrong_declaration_is_refused_with_a_line_that_names_it(tmp_path: Path, source: str, told: str) -> None:
    module = tmp_path / "declared.py"
    module.write_text(
        f"from tandem import tool_effect\nfrom tests.support.faulty_environments import Fresh as Env\n{source}"
    )
    place = {"tools": (f"{module}:f",)} if source.startswith("@") else {"path": f"{module}:f"}
    with pytest.raises(ConfigError) as refused:
        asyncio.run(check_class(EnvironmentConfig(**place)))  # type: ignore[arg-type]
    assert told in str(refused.value) and str(module) in str(refused.value)
