"""A tool that may not be called twice, its neighbours, and a policy that calls them.

Each call writes a line into the file that `UNSAFE_CALLS` names: the tool, its argument and the call's key.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tandem import tool_effect
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.support.episodes import ScriptedSampler
from tests.support.tiny_model import TOOL_TEMPLATE, character_tokenizer

VARIABLE = "UNSAFE_CALLS"
TOOLS = tuple(f"tests.support.unsafe_tools:{name}" for name in ("pay", "look", "die_once"))


def _note(tool: str, what: str, key: str) -> None:
    with open(os.environ[VARIABLE], "a") as file:
        file.write(f"{tool} {what} {key}\n")


@tool_effect("unsafe")
def pay(what: str, *, idempotency_key: str) -> str:
    """Pays.

    Args:
        what: For what; "slow" ends when the file `<UNSAFE_CALLS>.paid` is there, "forever" does not end.
        idempotency_key: Of this call.
    """
    _note("pay", what, idempotency_key)
    while what == "forever" or (what == "slow" and not Path(f"{os.environ[VARIABLE]}.paid").exists()):
        time.sleep(0.01)
    return f"paid {what}"


async def look(what: str, *, idempotency_key: str) -> str:
    """Looks."""
    _note("look", what, idempotency_key)
    if what == "long":
        await asyncio.sleep(3600)
    return f"saw {what}"


@tool_effect("pure")
async def die_once(what: str, *, idempotency_key: str) -> str:
    """Ends the environments' process with its first call."""
    is_first = f"die_once {what} " not in Path(os.environ[VARIABLE]).read_text()
    _note("die_once", what, idempotency_key)
    if is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def call(name: str, what: str) -> str:
    """What the policy writes to call a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'what': what}})}</tool_call>"


def calls(file: Path) -> list[list[str]]:
    """Tool, argument and key of each call."""
    return [line.split() for line in file.read_text().splitlines()]


async def calling_episodes(
    stack: AsyncExitStack,
    folder: Path,
    sampler: ScriptedSampler,
    tools: Sequence[str] = TOOLS,
    seconds: float = 60.0,
    max_turns: int = 8,
) -> EpisodeSampler:
    """Episodes with these tools. Their processes end with `stack`."""
    config = EnvironmentConfig(
        tools=tuple(tools), variables=(VARIABLE,), step_seconds=seconds, max_attempts=3, max_turns=max_turns
    )
    pool = EnvironmentPool(config)
    stack.push_async_callback(pool.close)
    await pool.start()
    character_tokenizer(TOOL_TEMPLATE).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    sampler.max_model_tokens = 8000
    encoder = EpisodeEncoder(ChatEncoder(str(folder), tools=pool.tools), "hermes")
    return EpisodeSampler(sampler, pool, encoder, config, seed=5)


def caller(*words: str) -> Callable[[int], Sequence[str]]:
    return lambda _: words
