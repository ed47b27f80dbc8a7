"""For the tests of tools in their processes: episodes, and calls of a turn."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from tandem.rollout.environments.process import EnvironmentPool, RemoteEnvironment

TASK = {"data_source": "", "prompt": [], "ability": "", "ground_truth": "", "extra_info": {}}


def call(tool: str, /, **arguments: object) -> dict[str, Any]:
    return {"id": "call", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}


async def reset(pool: EnvironmentPool, name: str) -> RemoteEnvironment:
    environment = await pool.open(name)
    await environment.reset(TASK, seed=1, episode_id=name)
    return environment


async def step(environment: RemoteEnvironment, calls: Sequence[dict[str, Any]], seconds: float = 30.0) -> list[str]:
    action = {"role": "assistant", "content": "", "tool_calls": calls}
    result = await environment.step(action, deadline=time.time() + seconds, idempotency_key="key")
    return [message["content"] for message in result.messages]
