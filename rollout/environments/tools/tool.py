"""Tools as an environment calls them: Python functions, and verl's tool classes."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import NamedTuple, Protocol, cast

from tandem.protos.contracts import JsonObject, ToolEffect
from tandem.rollout.environments.loading import described
from tandem.rollout.environments.tools.effects import KEY, takes_key
from tandem.rollout.environments.tools.forked_call import RaisedError, call_in_fork


class ToolResult(NamedTuple):
    """What a call gave: the text that the policy reads, and what the call earned."""

    text: str
    reward: float = 0.0


class Instance(NamedTuple):
    """What a tool keeps for one episode. `arguments` are the row's `extra_info.tools_kwargs` for this tool."""

    name: str
    arguments: Mapping[str, JsonObject]


class Arguments(Protocol):
    """Converts the arguments of a call. Raises ArgumentError if they do not fit the schema."""

    def convert(self, given: JsonObject) -> Mapping[str, object]: ...


class Tool(ABC):
    """One tool for all episodes of a process. Each episode has an instance of it.

    `parallel`: calls may run at the same time as other calls of their turn. `takes_key`: its arguments include the
    call's idempotency key.
    """

    keeps_state = False
    """Whether an instance has a state that would be lost with its process."""

    def __init__(
        self,
        schema: JsonObject,
        arguments: Arguments,
        parallel: bool,
        effect: ToolEffect = "idempotent",
        *,
        takes_key: bool = False,
    ) -> None:
        self.schema = schema
        self.name: str = schema["function"]["name"]
        self.arguments = arguments
        self.parallel = parallel
        self.effect = effect
        self.takes_key = takes_key

    async def create(self, task: JsonObject) -> Instance:
        return Instance("", {})

    @abstractmethod
    async def execute(
        self, instance: Instance, arguments: Mapping[str, object], *, seconds: float, max_chars: int
    ) -> ToolResult:
        """One call, whose text is shortened to about `max_chars`.

        Raises RaisedError or CrashError if the tool fails, TimeoutError after `seconds`.
        """

    async def calc_reward(self, instance: Instance) -> float:
        return 0.0

    async def release(self, instance: Instance) -> None:
        return


class FunctionTool(Tool):
    """A function. One that is no coroutine runs in a process of its own, so it may block, hang or crash."""

    def __init__(
        self,
        function: Callable[..., object],
        schema: JsonObject,
        arguments: Arguments,
        effect: ToolEffect = "idempotent",
        *,
        returns_reward: bool,
    ) -> None:
        parallel = getattr(function, "parallel", False) is True
        super().__init__(schema, arguments, parallel, effect, takes_key=takes_key(function))
        self._function = function
        self._returns_reward = returns_reward

    async def execute(
        self, instance: Instance, arguments: Mapping[str, object], *, seconds: float, max_chars: int
    ) -> ToolResult:
        if inspect.iscoroutinefunction(self._function):
            value = await _within(partial(self._function, **arguments), seconds)
            return _shortened_result(value, self._returns_reward, max_chars)
        answer = await call_in_fork(partial(self._call, arguments, max_chars), seconds)
        return ToolResult(answer["text"], answer["reward"])

    def _call(self, arguments: Mapping[str, object], max_chars: int) -> JsonObject:
        return _shortened_result(self._function(**arguments), self._returns_reward, max_chars)._asdict()


class VerlTool(Protocol):
    """The methods of verl's tool classes."""

    create: Callable[..., Awaitable[object]]
    execute: Callable[..., Coroutine[object, object, object]]
    calc_reward: Callable[..., Awaitable[float]]
    release: Callable[..., Awaitable[None]]


class ClassTool(Tool):
    """An object of one of verl's tool classes. It runs in the environments' process, which it may not block."""

    def __init__(self, tool: VerlTool, schema: JsonObject, arguments: Arguments, effect: ToolEffect) -> None:
        parallel = getattr(tool, "parallel", False) is True
        super().__init__(schema, arguments, parallel, effect, takes_key=takes_key(tool.execute))
        self.keeps_state = effect != "pure"
        self._tool = tool

    async def create(self, task: JsonObject) -> Instance:
        of_row = (task["extra_info"].get("tools_kwargs") or {}).get(self.name) or {}
        given = of_row.get("create_kwargs") or {}
        created = await self._tool.create(None, **_accepted(self._tool.create, {**given, "create_kwargs": given}))
        name = created[0] if isinstance(created, tuple) else created  # with verl's first message, which it ignores, too
        return Instance(cast("str", name), of_row)

    async def execute(
        self, instance: Instance, arguments: Mapping[str, object], *, seconds: float, max_chars: int
    ) -> ToolResult:
        given, more = dict(arguments), dict(instance.arguments.get("execute_kwargs") or {})
        if self.takes_key:
            more[KEY] = given.pop(KEY)
        value = await _within(partial(self._tool.execute, instance.name, given, **more), seconds)
        return _shortened_result(value, True, max_chars)

    async def calc_reward(self, instance: Instance) -> float:
        return await self._tool.calc_reward(instance.name, **(instance.arguments.get("calc_reward_kwargs") or {}))

    async def release(self, instance: Instance) -> None:
        await self._tool.release(instance.name, **(instance.arguments.get("release_kwargs") or {}))


def _accepted(function: Callable[..., object], given: JsonObject) -> JsonObject:
    """Those keyword arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


async def _within(function: Callable[[], Coroutine[object, object, object]], seconds: float) -> object:
    """The result of a user's coroutine. Does not wait for one that ignores its cancellation."""
    try:
        task = asyncio.ensure_future(function())
    except Exception as refusal:  # user code, or arguments that its schema allows and its signature does not
        raise RaisedError(described(refusal)) from None
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
    finally:
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else reads it
    if task.cancelled():
        raise RaisedError("CancelledError: the tool cancelled itself")
    if (error := task.exception()) is not None:
        raise RaisedError(described(error))
    return task.result()


def _shortened_result(value: object, returns_reward: bool, max_chars: int) -> ToolResult:
    try:
        text, reward = _result(value, returns_reward)
    except (TypeError, ValueError, RecursionError) as error:
        raise RaisedError(f"the tool returned no text: {described(error)}") from None
    return ToolResult(shortened(text, max_chars), reward)


def _result(value: object, returns_reward: bool) -> ToolResult:
    """verl's tools return `(response, reward, metrics)`, or less of it. Raises TypeError or ValueError."""
    reward: object = 0.0
    if returns_reward and isinstance(value, tuple):
        if not value:
            raise ValueError("it is an empty tuple")
        value, reward = (*value, 0.0)[:2]
    if getattr(value, "image", None) or getattr(value, "video", None):
        raise TypeError("it is an image or a video, and the policy reads texts")
    if hasattr(value, "text"):  # verl's ToolResponse
        value = value.text or ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    earned = float(cast("float", reward or 0.0))
    if not math.isfinite(earned):
        raise ValueError(f"its reward is {earned}")
    return ToolResult(text, earned)


def shortened(text: str, max_chars: int) -> str:
    """The beginning and the end of a text, with a line between them that says how much is left out."""
    cut = len(text) - max_chars
    if cut <= 0:
        return text
    head = (max_chars + 1) // 2
    tail = text[len(text) - (max_chars - head) :]
    return f"{text[:head]}\n[{cut} of {len(text)} characters left out]\n{tail}"
