"""The environment of a policy that calls tools: it executes the calls of a turn and answers with their results."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from tandem.protos.contracts import JsonObject, Message, Observation, StepResult
from tandem.rollout.environments.loading import ContractError
from tandem.rollout.environments.tools.forked_call import CrashError, RaisedError
from tandem.rollout.environments.tools.function_schema import ArgumentError
from tandem.rollout.environments.tools.sources import load_tools
from tandem.rollout.environments.tools.tool import Instance, Tool, ToolResult

_RESERVE_SECONDS = 2.0  # of a step, for what is not the tools' time; a quarter of a short one
_MAX_TURN_CALLS = 64
_MAX_TURN_CHARS = 16_000  # of all results of a turn: a step has at most 256 KiB, and a character up to 12 bytes there

InvalidCall = Literal["unparsable_call", "unknown_tool", "bad_arguments"]
ToolError = Literal["exception", "timeout", "crashed", "call_limit"] | InvalidCall


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the policy. Without a `tool` it is invalid, and `fault` says why."""

    call_id: str
    tool: Tool | None
    arguments: Mapping[str, object]
    fault: tuple[InvalidCall, str] | None = None


class ToolEnvironment:
    """Calls tools for the policy until it answers without a call.

    `tools` name their sources. `max_calls` bounds the executed calls of an episode, `max_invalid_calls` how many calls
    in a row may be invalid before the episode ends, `max_result_chars` the text of one result.
    """

    def __init__(
        self,
        tools: Sequence[str],
        *,
        max_calls: int = 32,
        max_invalid_calls: int = 3,
        max_result_chars: int = 4096,
    ) -> None:
        limits = {"max_calls": max_calls, "max_invalid_calls": max_invalid_calls, "max_result_chars": max_result_chars}
        for name, limit in limits.items():
            if not isinstance(limit, int) or limit < 1:
                raise ContractError(f"arguments.{name} is {limit!r}, and it must be a whole number of at least 1")
        if max_result_chars > _MAX_TURN_CHARS:
            raise ContractError(f"arguments.max_result_chars is {max_result_chars}, at most {_MAX_TURN_CHARS}")
        self._tools = load_tools(tuple(tools))
        self.tool_schemas = [tool.schema for tool in self._tools.values()]
        self._max_calls = max_calls
        self._max_invalid_calls = max_invalid_calls
        self._max_result_chars = max_result_chars
        self._instances: dict[str, Instance] = {}
        self._num_calls = 0
        self._num_invalid_calls = 0
        self._num_invalid_in_a_row = 0
        self._errors: Counter[ToolError] = Counter()

    async def reset(self, task: JsonObject, *, seed: int, episode_id: str) -> Observation:
        for name, tool in self._tools.items():
            self._instances[name] = await tool.create(task)
        return Observation([])

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        written = action.get("tool_calls", ())
        if not written:
            return StepResult([], await self._final_reward(), terminated=True, info=self._info())
        calls = [self._read(call) for call in written[:_MAX_TURN_CALLS]]
        max_chars = min(self._max_result_chars, _MAX_TURN_CHARS // len(calls))
        messages: list[Message] = []
        reward, too_many_invalid = 0.0, False
        groups = list(_groups(calls))
        reserve = min(_RESERVE_SECONDS, (deadline - time.time()) / 4)
        for place, group in enumerate(groups):
            seconds = max(0.0, (deadline - reserve - time.time()) / (len(groups) - place))
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
            reward += await self._final_reward()
        return StepResult(messages, reward, terminated=too_many_invalid, info=self._info())

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
            return ToolResult(self._error(*call.fault, max_chars))
        assert call.tool is not None, "a valid call has a tool"
        if self._num_calls >= self._max_calls:
            told = f"the call was not executed: an episode has at most {self._max_calls} calls"
            return ToolResult(self._error("call_limit", told, max_chars))
        self._num_calls += 1
        instance = self._instances[call.tool.name]
        try:
            return await call.tool.execute(instance, call.arguments, seconds=seconds, max_chars=max_chars)
        except TimeoutError:
            return ToolResult(self._error("timeout", f"the tool had not ended after {seconds:.3g} s", max_chars))
        except CrashError as error:
            return ToolResult(self._error("crashed", str(error), max_chars))
        except RaisedError as error:
            return ToolResult(self._error("exception", str(error), max_chars))

    def _error(self, kind: ToolError, detail: str, max_chars: int) -> str:
        """What the policy reads of an error, which is counted."""
        self._errors[kind] += 1
        return f"error: {kind}: {detail[:max_chars]}"

    async def _final_reward(self) -> float:
        return sum([await self._tools[name].calc_reward(one) for name, one in self._instances.items()])

    def _info(self) -> JsonObject:
        failures = sum(self._errors[kind] for kind in ("exception", "timeout", "crashed"))
        return {
            "num_tool_calls": self._num_calls,
            "num_invalid_calls": self._num_invalid_calls,
            "num_tool_failures": failures,
            "tool_errors": dict(self._errors),
        }


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
