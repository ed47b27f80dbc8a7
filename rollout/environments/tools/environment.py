"""The environment of a policy that calls tools: it executes the calls of a turn and answers with their results."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pydantic import ValidationError

from tandem.protos.contracts import JsonObject, Message, Observation, Resume, StepResult, ToolOutcome
from tandem.rollout.environments.config import PYTHON
from tandem.rollout.environments.loading import ContractError
from tandem.rollout.environments.tools.effects import KEY
from tandem.rollout.environments.tools.forked_call import CrashError, RaisedError
from tandem.rollout.environments.tools.function_schema import ArgumentError
from tandem.rollout.environments.tools.outcomes import RESULT, InvalidCall, ToolError
from tandem.rollout.environments.tools.python_tool import PythonConfig
from tandem.rollout.environments.tools.sources import load_tools
from tandem.rollout.environments.tools.tool import Instance, Tool, ToolResult, shortened

_RESERVE_SECONDS = 5.0  # of a step, for what is not the tools' time; a quarter of a short one
_MAX_TURN_CALLS = 64
_MAX_TURN_CHARS = 16_000  # of all results of a turn: a step has at most 256 KiB, and a character up to 12 bytes there


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the policy. Without a `tool` it is invalid, and `fault` says why."""

    call_id: str
    tool: Tool | None
    arguments: Mapping[str, object]
    fault: tuple[InvalidCall, str] | None = None
    key: str = ""
    """Names the call in all attempts at its turn."""


class ToolEnvironment:
    """Calls tools for the policy until it answers without a call.

    `tools` name their sources, or are tools by name. `max_calls` bounds the executed calls of an episode,
    `max_invalid_calls` how many calls in a row may be invalid before the episode ends, `max_result_chars` the text of
    one result, `python` the settings of that tool. An interrupted episode goes on without the calls that were answered,
    unless an instance of a tool would be lost.
    """

    def __init__(
        self,
        tools: Sequence[str] | Mapping[str, Tool],
        *,
        max_calls: int = 32,
        max_invalid_calls: int = 3,
        max_result_chars: int = 4096,
        call_seconds: float | None = None,
        python: JsonObject | None = None,
    ) -> None:
        limits = {"max_calls": max_calls, "max_invalid_calls": max_invalid_calls, "max_result_chars": max_result_chars}
        for name, limit in limits.items():
            if not isinstance(limit, int) or limit < 1:
                raise ContractError(f"arguments.{name} is {limit!r}, and it must be a whole number of at least 1")
        if call_seconds is not None and not (isinstance(call_seconds, int | float) and call_seconds > 0):
            raise ContractError(f"arguments.call_seconds is {call_seconds!r}, and it must be a number above 0")
        if max_result_chars > _MAX_TURN_CHARS:
            raise ContractError(f"arguments.max_result_chars is {max_result_chars}, at most {_MAX_TURN_CHARS}")
        self._tools = tools if isinstance(tools, Mapping) else load_tools(tuple(tools), _python_config(tools, python))
        self.tool_schemas = [tool.schema for tool in self._tools.values()]
        self.unsafe_tools = [name for name, tool in self._tools.items() if tool.effect == "unsafe"]
        keeps_state = any(tool.keeps_state for tool in self._tools.values())
        self.resume: Resume = "restart" if keeps_state else "snapshot"
        self._max_calls = max_calls
        self._max_invalid_calls = max_invalid_calls
        self._max_result_chars = max_result_chars
        self._call_seconds = math.inf if call_seconds is None else call_seconds
        self._instances: dict[str, Instance] = {}
        self._num_calls = 0
        self._num_invalid_calls = 0
        self._num_invalid_in_a_row = 0
        self._errors: Counter[ToolError] = Counter()
        self._outcomes: list[ToolOutcome] = []
        """Of the current step."""

    async def reset(self, task: JsonObject, *, seed: int, episode_id: str) -> Observation:
        for name, tool in self._tools.items():
            self._instances[name] = await tool.create(task)
        return Observation([])

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        written = action.get("tool_calls", ())
        if not written:
            return StepResult([], await self.final_reward(), terminated=True, info=self._info())
        read = [self._read(call) for call in written[:_MAX_TURN_CALLS]]
        calls = [replace(call, key=f"{idempotency_key}/{place}") for place, call in enumerate(read)]
        max_chars = min(self._max_result_chars, _MAX_TURN_CHARS // len(calls))
        messages: list[Message] = []
        self._outcomes = []
        reward, too_many_invalid = 0.0, False
        groups = list(_groups(calls))
        reserve = min(_RESERVE_SECONDS, (deadline - time.time()) / 4)
        for place, group in enumerate(groups):
            share = max(0.0, (deadline - reserve - time.time()) / (len(groups) - place))
            seconds = min(share, self._call_seconds)
            answers = await asyncio.gather(*(self._answer(call, seconds, max_chars) for call in group))
            for call, result in zip(group, answers, strict=True):
                messages.append(_message(call, result.text))
                reward += result.reward
                self._num_invalid_in_a_row = self._num_invalid_in_a_row + 1 if call.fault else 0
                too_many_invalid |= self._num_invalid_in_a_row >= self._max_invalid_calls
        if left_out := len(written) - len(calls):
            told = f"{left_out} more calls were not executed: a turn has at most {_MAX_TURN_CALLS}"
            messages.append({"role": "tool", "content": self._error("call_limit", told, len(told))})
        if too_many_invalid:
            reward += await self.final_reward()
        return StepResult(messages, reward, too_many_invalid, info=self._info(), tool_outcomes=self._outcomes)

    async def final_reward(self) -> float:
        """What the tools add at the end of the episode (verl's `calc_reward`)."""
        return sum([await self._tools[name].calc_reward(one) for name, one in self._instances.items()])

    async def snapshot(self) -> bytes:
        state = {
            "calls": (self._num_calls, self._num_invalid_calls, self._num_invalid_in_a_row),
            "errors": self._errors,
            "tools_kwargs": {name: one.arguments for name, one in self._instances.items() if one.arguments},
        }
        return json.dumps(state).encode()

    async def restore(self, state: bytes) -> None:
        saved = json.loads(state)
        await self.reset({"extra_info": {"tools_kwargs": saved["tools_kwargs"]}}, seed=0, episode_id="")
        self._num_calls, self._num_invalid_calls, self._num_invalid_in_a_row = saved["calls"]
        self._errors.update(saved["errors"])

    async def close(self) -> None:
        instances, self._instances = self._instances, {}
        released = (self._tools[name].release(instance) for name, instance in instances.items())
        failed = [one for one in await asyncio.gather(*released, return_exceptions=True) if one is not None]
        if failed:
            raise failed[0]

    def _read(self, written: JsonObject) -> _Call:
        """A call of `action["tool_calls"]`, with its tool and the arguments that it takes."""
        call_id, function = written["id"], written["function"]
        if "error" in written:
            return _Call(call_id, None, {}, ("unparsable_call", written["error"]))
        name = function["name"]
        if (tool := self._tools.get(name)) is None:
            told = f"there is no tool {name!r:.80}; there is {', '.join(self._tools)}"
            return _Call(call_id, None, {}, ("unknown_tool", told))
        try:
            return _Call(call_id, tool, tool.arguments.convert(json.loads(function["arguments"])))
        except ArgumentError as error:
            return _Call(call_id, tool, {}, ("bad_arguments", str(error)))
        except RecursionError:
            return _Call(call_id, tool, {}, ("bad_arguments", "they are nested too deeply"))

    async def _answer(self, call: _Call, seconds: float, max_chars: int) -> ToolResult:
        if call.fault is not None:
            self._num_invalid_calls += 1
            return ToolResult(self._error(*call.fault, max_chars, call.tool))
        assert call.tool is not None, "a valid call has a tool"
        if self._num_calls >= self._max_calls:
            told = f"the call was not executed: an episode has at most {self._max_calls} calls"
            return ToolResult(self._error("call_limit", told, max_chars, call.tool))
        self._num_calls += 1
        instance, began_at = self._instances[call.tool.name], time.monotonic()
        given = {**call.arguments, KEY: call.key} if call.tool.takes_key else call.arguments
        try:
            result = await call.tool.execute(instance, given, seconds=seconds, max_chars=max_chars)
        except TimeoutError as error:
            told = str(error) or f"the tool had not ended after {seconds:.3g} s"
            return ToolResult(self._error("timeout", told, max_chars, call.tool, began_at))
        except CrashError as error:
            return ToolResult(self._error("crashed", str(error), max_chars, call.tool, began_at))
        except RaisedError as error:
            return ToolResult(self._error("exception", str(error), max_chars, call.tool, began_at))
        self._note(RESULT, call.tool, began_at)
        return result

    def _error(
        self, kind: ToolError, detail: str, max_chars: int, tool: Tool | None = None, began_at: float | None = None
    ) -> str:
        """What the policy reads of an error, which is counted. `began_at`: when a call that was executed began."""
        self._errors[kind] += 1
        self._note(kind, tool, began_at)
        return f"error: {kind}: {shortened(detail, max_chars)}"

    def _note(self, outcome: str, tool: Tool | None, began_at: float | None) -> None:
        seconds = None if began_at is None else time.monotonic() - began_at
        self._outcomes.append({"tool": "" if tool is None else tool.name, "outcome": outcome, "seconds": seconds})

    def _info(self) -> JsonObject:
        failures = sum(self._errors[kind] for kind in ("exception", "timeout", "crashed"))
        return {
            "num_tool_calls": self._num_calls,
            "num_invalid_calls": self._num_invalid_calls,
            "num_tool_failures": failures,
            "tool_errors": dict(self._errors),
        }


def _python_config(tools: Sequence[str], settings: JsonObject | None) -> PythonConfig:
    if settings is not None and PYTHON not in tools:
        raise ContractError(f'arguments.{PYTHON} is for the tool "{PYTHON}", which tools does not name')
    try:
        return PythonConfig.model_validate(settings or {})
    except ValidationError as error:
        fault = error.errors()[0]
        raise ContractError(f"arguments.{'.'.join(map(str, (PYTHON, *fault['loc'])))}: {fault['msg']}") from None


def _groups(calls: Iterable[_Call]) -> Iterator[Sequence[_Call]]:
    """Calls in order; those in one group run at the same time."""
    for is_parallel, group in groupby(calls, lambda call: call.fault is not None or _is_parallel(call.tool)):
        together = list(group)
        yield from [together] if is_parallel else ([call] for call in together)


def _is_parallel(tool: Tool | None) -> bool:
    return tool is not None and tool.parallel


def _message(call: _Call, content: str) -> Message:
    readable = content.encode("utf-8", "replace").decode("utf-8")  # a tokenizer refuses lone surrogates
    name = {} if call.tool is None else {"name": call.tool.name}
    return {"role": "tool", "tool_call_id": call.call_id, **name, "content": readable}
