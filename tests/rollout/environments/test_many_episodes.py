"""500 episodes at once, of which some have tools that hang or crash."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tandem.rollout.environments import process
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import EnvironmentPool

EPISODES, STEP_SECONDS, PROCESSES = 500, 24.0, 2
TOOLS = tuple(f"tests.support.tools:{name}" for name in ("add", "fail", "wait"))
TASK = {"data_source": "", "prompt": [], "ability": "", "ground_truth": "", "extra_info": {}}


def called(tool: str, **arguments: object) -> Mapping[str, object]:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "0", "type": "function", "function": function}]}


def fault_of(number: int) -> str:
    """A tenth of the episodes has a tool that hangs, another tenth one that crashes."""
    return {0: "hang", 5: "crash"}.get(number % 10, "")


async def play(pool: EnvironmentPool, number: int) -> list[str]:
    """What the tools answered."""
    episode_id, answers = f"many/{number}", []
    environment = await pool.open(episode_id)
    await environment.reset(TASK, seed=number, episode_id=episode_id)
    fault = fault_of(number)
    turns = [called("fail", how=fault)] if fault else [called("wait", name="w", seconds=0.0)]
    for turn, action in enumerate([*turns, called("add", a=number, b=1)]):
        result = await environment.step(
            action, deadline=time.time() + STEP_SECONDS, idempotency_key=f"{episode_id}/{turn}"
        )
        answers += [message["content"] for message in result.messages]
    await environment.close()
    return answers


def processes_below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def open_files(processes: list[psutil.Process]) -> int:
    return sum(one.num_fds() for one in processes)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_of_500_episodes_with_tools_that_hang_or_crash_every_other_one_is_unharmed_and_nothing_leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # 500 episodes at once on a busy machine: an answer may take longer than those of a run's few.
    monkeypatch.setattr(process, "_CLOSE_SECONDS", 30.0)
    monkeypatch.setattr(process, "_GRACE_SECONDS", 10.0)
    before = set(processes_below())

    async def main() -> list[list[str]]:
        pool = EnvironmentPool(EnvironmentConfig(tools=TOOLS, num_processes=PROCESSES, step_seconds=STEP_SECONDS))
        await pool.start()
        try:
            await play(pool, 1)
            mine = [one for one in processes_below() if one not in before]
            files = open_files(mine)
            async with asyncio.timeout(4 * STEP_SECONDS):
                found = await asyncio.gather(*(play(pool, number) for number in range(EPISODES)))
            assert set(mine) == {one for one in processes_below() if one not in before}, (
                "none is left, none was replaced"
            )
            assert open_files(mine) <= files, "no file or pipe is left open"
            return found
        finally:
            await pool.close()

    for number, (first, second) in enumerate(asyncio.run(main())):
        expected = {"hang": "error: timeout", "crash": "error: crashed"}.get(fault_of(number), "w")
        assert first.startswith(expected), first
        assert second == str(number + 1), f"episode {number}: {second}"
    assert [*tmp_path.iterdir()] == []
    assert set(processes_below()) <= before
