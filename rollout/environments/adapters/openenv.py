"""OpenEnv's clients, which speak to an environment's server, and its environments themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Protocol, cast, get_args

from pydantic import BaseModel, ValidationError

from tandem.protos.contracts import JsonObject, Message, Observation, StepResult
from tandem.rollout.environments.adapters.conversions import accepted, finished, number
from tandem.rollout.environments.loading import ContractError

_COMMON_FIELDS = {"done", "reward", "metadata"}


class _OpenEnv(Protocol):
    def reset(self, *, seed: int, episode_id: str) -> object: ...
    def step(self, action: object, /) -> object: ...


class OpenEnvEnvironment:
    """One episode of an object that `make` returns. `action_of` makes an action from the policy's text."""

    def __init__(self, make: Callable[[], object], action_of: Callable[[str], object]) -> None:
        self._make = make
        self._action_of = action_of
        self._made: _OpenEnv | None = None

    async def reset(self, task: JsonObject, *, seed: int, episode_id: str) -> Observation:
        self._made = made = cast("_OpenEnv", self._make())
        given = accepted(made.reset, {"seed": seed, "episode_id": episode_id})
        return Observation(_messages(await finished(made.reset(**given))))  # type: ignore[arg-type]

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        assert self._made is not None, "reset comes before step"
        try:
            chosen = self._action_of(action["content"])
        except ValidationError as error:  # caused by the policy
            faults = "; ".join(one["msg"] for one in error.errors())
            return StepResult([{"role": "user", "content": f"error: the action is invalid: {faults}"}])
        result = await finished(self._made.step(chosen))
        earned, done = getattr(result, "reward", None), getattr(result, "done", False)
        reward = 0.0 if earned is None else number(earned, "the reward of step")
        return StepResult(_messages(result), reward, terminated=bool(done))

    async def close(self) -> None:
        if callable(close := getattr(self._made, "close", None)):
            await finished(close())


def _messages(result: object) -> list[Message]:
    """The observation of a client's result, or the observation itself: its text if it has nothing else, or JSON."""
    observation = getattr(result, "observation", result)
    if isinstance(observation, BaseModel):
        observation = observation.model_dump(mode="json")
    if isinstance(observation, Mapping):
        own = {name: value for name, value in observation.items() if name not in _COMMON_FIELDS}
        (first, *others) = own.values() or ("",)
        is_text = isinstance(first, str) and not others
        observation = first if is_text else json.dumps(own, ensure_ascii=False, default=str)
    if not isinstance(observation, str):
        raise ContractError(f"the observation {observation!r:.80} is neither a text nor has fields")
    return [{"role": "user", "content": observation}]


def action_maker(kind: type, field: object, path: str) -> Callable[[str], object]:
    """Makes an action of the class's action type: with the policy's text in `field`, or in its only text field.

    Raises ContractError if there is no such field.
    """
    action = _action_type(kind)
    if action is None:
        if not isinstance(field, str):
            raise ContractError(
                f"{path}: {kind.__name__} does not say what its actions are; set arguments.action_field to the field "
                "that gets the policy's text"
            )
        return lambda text: {field: text}
    fields = {name: one for name, one in action.model_fields.items() if name not in _COMMON_FIELDS}
    texts = [name for name, one in fields.items() if one.annotation is str]
    name = field if field is not None else texts[0] if len(texts) == 1 else None
    if not isinstance(name, str) or name not in fields:
        raise ContractError(
            f"{path}: {action.__name__} has the fields {', '.join(fields)}; set arguments.action_field to the one that "
            "gets the policy's text"
        )
    if others := [other for other, one in fields.items() if one.is_required() and other != name]:
        raise ContractError(f"{path}: {action.__name__} needs {', '.join(others)}, too, and the policy gives one text")
    return lambda text: action(**{name: text})


def _action_type(kind: type) -> type[BaseModel] | None:
    """The first type argument of `EnvClient[Action, Observation, State]`."""
    for base in kind.__mro__:
        for generic in vars(base).get("__orig_bases__", ()):
            first = next(iter(get_args(generic)), None)
            if isinstance(first, type) and issubclass(first, BaseModel):
                return first
    return None
