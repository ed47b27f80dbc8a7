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
    Agent,
    Environment,
    JsonObject,
    Message,
    Observation,
    Resume,
    SnapshotEnvironment,
    StepResult,
    ToolOutcome,
)
from tandem.rollout.environments.adapters.recognition import is_foreign
from tandem.rollout.environments.loading import ContractError, described, load_module

MAX_LINE_BYTES = 256 << 10  # it becomes part of the trajectory


def load_class(path: str) -> Callable[..., Environment]:
    """What makes environments at `module.path:Class` or `file.py:Class`: a class of them, of agents (`is_agent`), or of
    another library, whose objects may be agents, or a function. Raises ContractError if there is none.
    """
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise ContractError(f"{path!r} names no class; write module.path:Class or path/to/file.py:Class")
    module = load_module(place, path)
    found = getattr(module, name, None)
    if is_agent(found) and not is_foreign(found):
        return cast("Callable[..., Environment]", found)
    if is_foreign(found):
        from tandem.rollout.environments.adapters.choice import ForeignClass  # with pydantic and jsonschema

        return ForeignClass(path, found)
    if not isinstance(found, type):
        raise ContractError(f"{path}: {place} has no class {name}")
    _check_methods(path, found, "reset", "step", "close")
    if resume_mode(found) not in get_args(Resume):
        expected = " or ".join(f"'{mode}'" for mode in get_args(Resume))
        raise ContractError(f"{path}: the class's resume is {resume_mode(found)!r:.80}; it must be {expected}")
    if resume_mode(found) == "snapshot":
        _check_methods(path, found, "snapshot", "restore")
    return found


def is_agent(found: object) -> bool:
    """Whether the class is a `tandem.Agent`: it runs its episodes itself."""
    return isinstance(found, type) and callable(getattr(found, "run", None)) and not hasattr(found, "reset")


def resume_mode(environment: Environment | Callable[..., Environment]) -> Resume:
    """How an interrupted episode of the class goes on. An object may have another mode than its class."""
    return cast("Resume", getattr(environment, "resume", "restart"))


def _unsafe_tools(path: str, environment: Environment) -> list[str]:
    """The tools whose calls may not be repeated."""
    names = list(getattr(environment, "unsafe_tools", ()))
    if not all(isinstance(name, str) for name in names):
        raise ContractError(f"{path}: unsafe_tools is {names!r:.80}; it must be a list of names of tools")
    shown = [schema["function"]["name"] for schema in _tool_schemas(path, environment)]
    if hidden := [name for name in names if name not in shown or is_agent(type(environment))]:
        seen = "only calls of tools in its tool_schemas are seen, and none of an agent's"
        raise ContractError(f"{path}: unsafe_tools names {hidden[0]}, but {seen}")
    if names and resume_mode(environment) == "replay":
        raise ContractError(f"{path}: resume = 'replay' would call {names[0]} again, which is in unsafe_tools")
    return names


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
            case "final_reward":
                return {"reward": await checked_final_reward(self._open[episode_id])}
            case "restore":
                environment = self._open[episode_id] = self._create()
                await cast("SnapshotEnvironment", environment).restore(b64decode(message["state"]))
                return {}
            case "run":
                environment = self._open[episode_id] = self._create()
                return await _run(cast("Agent", environment), message)
            case "close":
                closing = self._open.pop(episode_id, None)
                if closing is not None and hasattr(closing, "close"):  # an agent need not have it
                    await closing.close()
                return {}
            case "ping":
                return {}
        raise AssertionError(f"unknown call {message['do']!r}")


async def _run(agent: Agent, message: JsonObject) -> JsonObject:
    """The fields of an `AgentResult`. What the agent raises is one, for its calls may have been refused."""
    try:
        result: object = await agent.run(message["data"], base_url=message["base_url"], api_key=message["api_key"])
        info = dict(result) if isinstance(result, Mapping) else {"reward": result}
        return {"reward": _checked_reward(info.pop("reward", None), "run"), "info": info}
    except Exception as error:  # user code
        return {"error_of_run": described(error)}


async def checked_final_reward(environment: Environment) -> float:
    """What `final_reward` returns, 0 without that method. Raises ContractError if it is no finite number."""
    method = getattr(environment, "final_reward", None)
    return 0.0 if method is None else _checked_reward(await method(), "final_reward")


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
    reward, ended = _checked_reward(result.reward, "step"), result.terminated or result.truncated
    if not messages and not ended:
        raise ContractError("step returned no messages although the episode goes on")
    ends = {"terminated": bool(result.terminated), "truncated": bool(result.truncated)}
    seen = {"info": dict(result.info), "tool_outcomes": [_checked_outcome(one) for one in result.tool_outcomes]}
    return {"messages": messages, "reward": reward, **ends, **seen}


def _checked_outcome(found: object) -> ToolOutcome:
    if isinstance(found, Mapping):
        tool, outcome, seconds = (found.get(name) for name in ("tool", "outcome", "seconds"))
        is_time = isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0.0
        if isinstance(tool, str) and isinstance(outcome, str) and (seconds is None or is_time):
            return {"tool": tool, "outcome": outcome, "seconds": seconds}
    raise ContractError(f"step returned the tool outcome {found!r:.80}; it needs tool, outcome and seconds")


def _checked_reward(reward: object, method: str) -> float:
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise ContractError(f"{method} returned the reward {reward!r:.80}, which is no finite number")
    return float(reward)


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


def _reach_this_machine_directly() -> None:
    """An agent calls the policy on this machine, also where other addresses are reached by an HTTP proxy."""
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))


def main() -> None:
    """Builds the class named by the first line of standard input, then serves its episodes."""
    calls, reply = taken_pipes()
    start = json.loads(calls.readline() or "null")
    if start is None:
        return
    try:
        chosen = load_class(start["path"])
        _reach_this_machine_directly()
        first = chosen(**start["arguments"])
        offered = {"tools": _tool_schemas(start["path"], first), "unsafe_tools": _unsafe_tools(start["path"], first)}
        mode = resume_mode(first if hasattr(first, "resume") else chosen)
        if mode not in get_args(Resume):
            raise ContractError(f"{start['path']}: its resume is {mode!r:.80}")
        if mode == "snapshot":
            _check_methods(start["path"], type(first), "snapshot", "restore")
        ready = {"resume": mode, "is_agent": is_agent(type(first)), **offered}
        first_line = json.dumps(ready, allow_nan=False)
    except Exception as error:
        text = described(error) if isinstance(error, ContractError) else f"{start['path']}: {described(error)}"
        reply.write(json.dumps({"error": text}) + "\n")
        return
    reply.write(first_line + "\n")
    reply.flush()
    asyncio.run(_serve(lambda: chosen(**start["arguments"]), calls, reply))


if __name__ == "__main__":
    main()
