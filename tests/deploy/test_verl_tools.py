"""Tools written for verl, with verl installed: they import its own classes."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from tandem import StepResult
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import EnvironmentPool
from tests.deploy.test_environment_libraries import installed
from tests.support.paths import ROOT
from tests.support.verl_tools import FUNCTION_TOOLS, VERL_TOOL, VERL_YAML

pytestmark = pytest.mark.timeout(300)

PACKAGES = "verl==0.9.1 tensordict pyvers orjson codetiming hydra-core omegaconf"
USES_VERL = "\nimport verl\nassert verl.DataProto\n"
"""What Tandem offers in verl's place does not have this."""


def test_verls_own_classes_serve_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "packages"
    installed(PACKAGES, packages, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", f"{packages}:{tmp_path}:{ROOT}")
    (tmp_path / "verl_counter.py").write_text(VERL_TOOL + USES_VERL)
    (tmp_path / "tools.yaml").write_text(VERL_YAML)
    (tmp_path / "functions.py").write_text(FUNCTION_TOOLS + USES_VERL)
    counted, halved, ended = asyncio.run(
        _played(
            EnvironmentConfig(tools=(f"{tmp_path}/tools.yaml", f"{tmp_path}/functions.py"), step_seconds=120.0),
            [("count", {"by": 1}), ("count", {"by": 2})],
            [("double", {"a": 2}), ("half", {"a": 3})],
            [],
        )
    )
    assert [one["content"] for one in counted.messages] == ["now 12", "now 16"], "one instance for the whole episode"
    assert [one["content"] for one in halved.messages] == ["4", "1.5"]
    assert [one.reward for one in (counted, halved, ended)] == [1.0, 0.25, 16.0]


async def _played(config: EnvironmentConfig, *turns: list[tuple[str, dict[str, int]]]) -> list[StepResult]:
    """What each turn of calls leads to."""
    pool = EnvironmentPool(config)
    try:
        await pool.start()
        environment = await pool.open("group/0/a")
        row = {"extra_info": {"tools_kwargs": {"count": {"create_kwargs": {"start": 10}}}}}
        await environment.reset(row, seed=1, episode_id="group/0/a")
        results = []
        for number, calls in enumerate(turns):
            written = [
                {"id": name, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for name, arguments in calls
            ]
            action = {"role": "assistant", "content": "", **({"tool_calls": written} if written else {})}
            key = f"group/0/a/{number}"
            results.append(await environment.step(action, deadline=time.time() + 120, idempotency_key=key))
        await environment.close()
        return results
    finally:
        await pool.close()
