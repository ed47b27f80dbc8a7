"""TRL's environments: the policy calls their methods as tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, cast

from tandem.protos.contracts import JsonObject, Message, Observation, StepResult
from tandem.rollout.environments.adapters.conversions import accepted, columns_of, finished, messages_of, number
from tandem.rollout.environments.loading import described
from tandem.rollout.environments.tools.environment import ToolEnvironment
from tandem.rollout.environments.tools.forked_call import RaisedError
from tandem.rollout.environments.tools.function_schema import FunctionArguments
from tandem.rollout.environments.tools.tool import Instance, Tool, ToolResult, shortened

_NO_TOOLS = ("reset", "get_reward")


class Method(NamedTuple):
    """A method that is a tool: its schema in OpenAI's form and its arguments."""

    schema: JsonObject
    arguments: FunctionArguments


def method_names(kind: type) -> list[str]:
    """The methods that TRL takes as tools."""
    names = (name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction))
    return [name for name in names if name not in _NO_TOOLS and not name.startswith("_")]


def methods_of(made: object, path: str) -> Mapping[str, Method]:
    """The tools of an object, by name. Raises ContractError if one has no type hints or no docstring."""
    methods = {}
    for name in method_names(type(made)):
        arguments = FunctionArguments(getattr(made, name), f"{path}: {name}")
        methods[name] = Method(arguments.schema(name), arguments)
    return methods


class _MethodTool(Tool):
    """A method. It changes its object, so it is not called in a process of its own."""

    def __init__(self, bound: Callable[..., object], method: Method) -> None:
        super().__init__(method.schema, method.arguments, parallel=False)
        self._bound = bound

    async def execute(
        self, instance: Instance, arguments: Mapping[str, object], *, seconds: float, max_chars: int
    ) -> ToolResult:
        try:
            value = await finished(self._bound(**arguments))
        except Exception as error:  # user code
            raise RaisedError(described(error)) from None
        return ToolResult(shortened(str(value), max_chars))


class TrlEnvironment:
    """One episode of an object that `make` returns, with its tools `methods`.

    It ends with an answer that calls no tool. It earns what `get_reward` returns at the end or, without that method,
    what each turn adds to the attribute `reward`.
    """

    def __init__(self, make: Callable[[], object], methods: Mapping[str, Method]) -> None:
        self._make = make
        self._methods = methods
        self._made: object = None
        self._tools: ToolEnvironment | None = None
        self._earned = 0.0

    async def reset(self, task: JsonObject, *, seed: int, episode_id: str) -> Observation:
        self._made = made = self._make()
        tools = {name: _MethodTool(getattr(made, name), method) for name, method in self._methods.items()}
        self._tools = ToolEnvironment(tools)
        await self._tools.reset(task, seed=seed, episode_id=episode_id)
        reset = cast("Callable[..., object]", getattr(made, "reset", None))
        observation = await finished(reset(**accepted(reset, columns_of(task))))
        return Observation([] if observation is None else messages_of(observation, "reset"))

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        assert self._tools is not None, "reset comes before step"
        result = await self._tools.step(action, deadline=deadline, idempotency_key=idempotency_key)
        return replace(result, reward=await self._reward(result.terminated))

    async def final_reward(self) -> float:
        return await self._reward(has_ended=True)

    async def close(self) -> None:
        """TRL has no method for it."""

    async def _reward(self, has_ended: bool) -> float:
        if callable(get_reward := getattr(self._made, "get_reward", None)):
            return number(await finished(get_reward()), "the result of get_reward") if has_ended else 0.0
        before, self._earned = self._earned, number(getattr(self._made, "reward", 0.0), "the attribute reward")
        return self._earned - before
