"""The process in which environments of one class run: `python -m tandem.rollout.environments.inside`.

It reads a JSON object from each line of its standard input and answers with one on its standard output, in any order.
What environments print goes to standard error. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import threading
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TextIO, cast, get_args

from tandem.protos.contracts import (
    MAX_SNAPSHOT_BYTES,
    Environment,
    JsonObject,
    Message,
    Observation,
    Resume,
    SnapshotEnvironment,
    StepResult,
)
from tandem.rollout.environments.loading import ContractError, described, load_module

MAX_LINE_BYTES = 256 << 10  # it becomes part of the trajectory


def load_class(path: str) -> Callable[..., Environment]:
    """The class at `module.path:Class` or `file.py:Class`. Raises ContractError if there is none."""
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ContractError(f"{path!r} names no class; write module.path:Class or path/to/file.py:Class")
    module = load_module(place, path)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ContractError(f"{path}: {place} has no class {name}")
    _check_methods(path, found, "reset", "step", "close")
    if resume_mode(found) not in get_args(Resume):
        expected = " or ".join(f"'{mode}'" for mode in get_args(Resume))
        raise ContractError(f"{path}: the class's resume is {resume_mode(found)!r:.80}; it must be {expected}")
    if resume_mode(found) == "snapshot":
        _check_methods(path, found, "snapshot", "restore")
    return found


def resume_mode(environment: Callable[..., Environment]) -> Resume:
    """How an interrupted episode of the class goes on."""
    return cast("Resume", getattr(environment, "resume", "restart"))


def _check_methods(path: str, found: type, *methods: str) -> None:
    if missing := [method for method in methods if not callable(getattr(found, method, None))]:
        raise ContractError(f"{path}: the class has no method {' and no '.join(missing)} (see tandem.Environment)")


class _Episodes:
    """The environments of this process, one for each open episode."""

    def __init__(self, create: Callable[[], Environment]) -> None:
        self._create = create
        self._open: dict[str, Environment] = {}

    async def call(self, message: JsonObject) -> JsonObject:
        """Carries out one call of `RemoteEnvironment`."""
        episode_id = message["episode_id"]
        match message["do"]:
            case "reset":
                environment = self._open[episode_id] = self._create()
                observation = await environment.reset(message["task"], seed=message["seed"], episode_id=episode_id)
                return {"messages": checked_messages(observation, Observation)}
            case "step":
                result = await self._open[episode_id].step(
                    message["action"], deadline=message["deadline"], idempotency_key=message["idempotency_key"]
                )
                return result_fields(result)
            case "snapshot":
                return {"state": b64encode(await checked_snapshot(self._open[episode_id])).decode()}
            case "restore":
                environment = self._open[episode_id] = self._create()
                await cast("SnapshotEnvironment", environment).restore(b64decode(message["state"]))
                return {}
            case "close":
                if (closing := self._open.pop(episode_id, None)) is not None:
                    await closing.close()
                return {}
            case "ping":
                return {}
        raise AssertionError(f"unknown call {message['do']!r}")


async def checked_snapshot(environment: Environment) -> bytes:
    """The snapshot of an environment. Raises ContractError if the contract does not allow it."""
    state: object = await cast("SnapshotEnvironment", environment).snapshot()
    if not isinstance(state, bytes):
        raise ContractError(f"snapshot returned {type(state).__name__} instead of bytes")
    if len(state) > MAX_SNAPSHOT_BYTES:
        raise ContractError(f"snapshot returned {len(state)} bytes; it may have {MAX_SNAPSHOT_BYTES}")
    return state


def result_fields(result: StepResult) -> JsonObject:
    """What `step` returned, for JSON. Raises ContractError if the contract does not allow it."""
    messages = checked_messages(result, StepResult)
    reward, ended = result.reward, result.terminated or result.truncated
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise ContractError(f"step returned the reward {reward!r:.80}, which is no finite number")
    if not messages and not ended:
        raise ContractError("step returned no messages although the episode goes on")
    ends = {"terminated": bool(result.terminated), "truncated": bool(result.truncated)}
    return {"messages": messages, "reward": float(reward), **ends, "info": dict(result.info)}


def checked_messages(result: object, expected: type[Observation] | type[StepResult]) -> list[Message]:
    """The messages that `reset` or `step` returned. Raises ContractError if the contract does not allow them."""
    if not isinstance(result, expected):
        method = "reset" if expected is Observation else "step"
        raise ContractError(f"{method} returned {type(result).__name__} instead of {expected.__name__}")
    for message in result.messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ContractError(f"{message!r:.80} is no chat message: it needs role and content")
    return [dict(message) for message in result.messages]


def _tool_schemas(path: str, environment: Environment) -> list[JsonObject]:
    """The tools that the environment shows the policy, in OpenAI's form."""
    schemas = list(getattr(environment, "tool_schemas", ()))
    for number, schema in enumerate(schemas):
        function = schema.get("function") if isinstance(schema, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ContractError(f"{path}: tool_schemas[{number}] is no tool in OpenAI's form: it needs function.name")
    return [dict(schema) for schema in schemas]


async def _answer(episodes: _Episodes, message: JsonObject, reply: TextIO) -> None:
    try:
        line = json.dumps({"call": message["call"], **await episodes.call(message)}, allow_nan=False)
        if len(line) > MAX_LINE_BYTES:
            raise ContractError(f"{message['do']} returned more than {MAX_LINE_BYTES >> 10} KiB")
    except Exception as error:  # user code: its episode fails, no other
        line = json.dumps({"call": message["call"], "error": described(error)})
    reply.write(line + "\n")
    reply.flush()


async def _serve(create: Callable[[], Environment], calls: TextIO, reply: TextIO) -> None:
    episodes, loop = _Episodes(create), asyncio.get_running_loop()
    running: dict[str, set[asyncio.Task[None]]] = defaultdict(set)

    def begin(message: JsonObject) -> None:
        of_episode = running[message["episode_id"]]
        if message["do"] == "close":
            for task in of_episode:
                task.cancel()  # its caller has given up
        task = asyncio.create_task(_answer(episodes, message, reply))
        of_episode.add(task)
        task.add_done_callback(of_episode.discard)
        if message["do"] == "close":
            del running[message["episode_id"]]

    def read() -> None:
        for line in calls:
            loop.call_soon_threadsafe(begin, json.loads(line))
        os.killpg(0, signal.SIGKILL)  # the sampler has ended; an environment may block the loop, or have started others

    threading.Thread(target=read, daemon=True).start()
    await loop.create_future()  # until `read` ends the process


def taken_pipes() -> tuple[TextIO, TextIO]:
    """Standard input and output of before: environments, and what they start, may read and print."""
    calls, reply = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return calls, reply


def main() -> None:
    """Builds the class named by the first line of standard input, then serves its episodes."""
    calls, reply = taken_pipes()
    start = json.loads(calls.readline() or "null")
    if start is None:
        return
    try:
        chosen = load_class(start["path"])
        schemas = _tool_schemas(start["path"], chosen(**start["arguments"]))
        ready = json.dumps({"resume": resume_mode(chosen), "tools": schemas}, allow_nan=False)
    except Exception as error:
        text = described(error) if isinstance(error, ContractError) else f"{start['path']}: {described(error)}"
        reply.write(json.dumps({"error": text}) + "\n")
        return
    reply.write(ready + "\n")
    reply.flush()
    asyncio.run(_serve(lambda: chosen(**start["arguments"]), calls, reply))


if __name__ == "__main__":
    main()
