"""An episode of a class that is checked: its calls have a time limit, and its results are read as in training."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from tandem.protos.contracts import Environment, JsonObject, Observation, StepResult
from tandem.rollout.environments.inside import MAX_LINE_BYTES, checked_messages, is_agent, load_class, result_fields
from tandem.rollout.environments.loading import ContractError, described

Returned = TypeVar("Returned")
_AGENT = "the class is an agent: it has `run`, and no steps that can be checked"
_NOT_COMPARED = ("info", "tool_outcomes")  # they may have times


class CheckError(Exception):
    """A check found a fault."""


def first_difference(one: Sequence[JsonObject], other: Sequence[JsonObject]) -> str:
    """The first observation in which two episodes differ, and how; empty if they are equal."""
    for number, (left, right) in enumerate(itertools.zip_longest(one, other)):
        place = f"step {number}" if number else "reset"
        if left is None or right is None:
            return f"{place}, which only one of them has"
        for name in left:
            if left[name] != right[name]:
                return f"{place}, {name}: {_shortened(left[name])} and {_shortened(right[name])}"
    return ""


def _shortened(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}…"


class CheckedClass:
    """The class to check. `say` is told what is called next."""

    def __init__(self, request: JsonObject, say: Callable[[str], None]) -> None:
        """Raises CheckError if the class cannot be loaded."""
        self.actions: Sequence[str] = request["actions"]
        self.seconds: float = request["step_seconds"]
        self.task = json.dumps(request["task"])
        self._arguments: Mapping[str, object] = request["arguments"]
        self.say = say
        say("the import")
        try:
            self._class = load_class(request["path"])
        except Exception as error:
            raise CheckError(described(error)) from None
        if is_agent(self._class):
            raise CheckError(_AGENT)

    def create(self) -> Environment:
        """An object of the class."""
        self.say("the constructor")
        try:
            made = self._class(**self._arguments)
        except Exception as error:
            raise CheckError(f"the constructor: {described(error)}") from None
        if is_agent(type(made)):  # of another library
            raise CheckError(_AGENT)
        return made

    async def call(self, what: str, begin: Callable[[], Awaitable[Returned]]) -> Returned:
        """The result of a method. Raises CheckError if it raises or takes too long."""
        self.say(what)
        limit = asyncio.timeout(self.seconds)
        try:
            async with limit:
                result = begin()
                if not inspect.isawaitable(result):
                    raise ContractError(f"it returned {type(result).__name__} at once; write `async def`")
                return await result
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise CheckError(f"{what} has not ended after {self.seconds:.3g} s") from None
            raise CheckError(f"{what}: {described(error)}") from None


class Episode:
    """An episode of the class, with its observations: first that of `reset`, then one a step, without what may
    differ.

    Its actions begin with the one at `first_action`, and go round.
    """

    def __init__(self, checked: CheckedClass, seed: int = 0, first_action: int = 0) -> None:
        self._checked = checked
        self._seed = seed
        self._first_action = first_action
        self._id = f"check/{seed}/{uuid.uuid4().hex}"
        self.environment = checked.create()
        self.observations: list[JsonObject] = []

    @property
    def has_ended(self) -> bool:
        last = self.observations[-1]
        over = last.get("terminated") or last.get("truncated")
        return bool(over) or len(self.observations) > len(self._checked.actions)

    def begin_reset(self) -> Awaitable[Observation]:
        return self.environment.reset(json.loads(self._checked.task), seed=self._seed, episode_id=self._id)

    def begin_step(self) -> Awaitable[StepResult]:
        turn = len(self.observations) - 1
        text = self._checked.actions[(self._first_action + turn) % len(self._checked.actions)]
        return self.environment.step(
            {"role": "assistant", "content": text},
            deadline=time.time() + self._checked.seconds,
            idempotency_key=f"{self._id}/{turn}",
        )

    async def reset(self) -> None:
        result = await self._checked.call("reset", self.begin_reset)
        self._add("reset", lambda: {"messages": checked_messages(result, Observation)})

    async def step(self) -> None:
        what = f"step {len(self.observations)}"
        result = await self._checked.call(what, self.begin_step)
        self._add(what, lambda: result_fields(result))

    async def play(self) -> None:
        """Goes on to the end. Other episodes have their turns between two steps."""
        if not self.observations:
            await self.reset()
        while not self.has_ended:
            await asyncio.sleep(0)
            await self.step()

    async def close(self, what: str = "close") -> None:
        await self._checked.call(what, self.environment.close)

    def _add(self, what: str, fields: Callable[[], JsonObject]) -> None:
        try:
            text = json.dumps(fields(), allow_nan=False)
            if len(text) > MAX_LINE_BYTES:
                raise ContractError(f"{what} returned more than {MAX_LINE_BYTES >> 10} KiB")
        except Exception as error:
            raise CheckError(f"the result of {what}: {described(error)}") from None
        self.observations.append({name: value for name, value in json.loads(text).items() if name not in _NOT_COMPARED})


async def played(checked: CheckedClass, seed: int = 0, first_action: int = 0) -> list[JsonObject]:
    """The observations of a whole episode."""
    episode = Episode(checked, seed, first_action)
    await episode.play()
    await episode.close()
    return episode.observations
