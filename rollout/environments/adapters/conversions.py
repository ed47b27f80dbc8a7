"""What other libraries' environments take and return, from and to what `tandem.Environment` has."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from typing import SupportsFloat

from tandem.protos.contracts import JsonObject, Message
from tandem.rollout.environments.loading import ContractError


def columns_of(task: JsonObject) -> dict[str, object]:
    """The task as the row of a data set: with each key of `extra_info` as a column of its own, too."""
    return {**task["extra_info"], **task}


def accepted(function: Callable[..., object], given: Mapping[str, object]) -> dict[str, object]:
    """Those arguments that the function takes by name."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


async def finished(result: object) -> object:
    """The result of a method that may be a coroutine."""
    return await result if inspect.isawaitable(result) else result


def messages_of(observation: object, method: str) -> list[Message]:
    """The messages of an observation: of the environment, if it is a text. Raises ContractError if it is neither a text
    nor messages.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, list) and all(isinstance(one, Mapping) and "role" in one for one in observation):
        return [dict(one) for one in observation]
    raise ContractError(f"{method} returned the observation {observation!r:.80}; the policy reads texts")


def number(value: object, source: str) -> float:
    """A reward. Raises ContractError if it is no finite number."""
    if not isinstance(value, SupportsFloat) or not math.isfinite(value):
        raise ContractError(f"{source} is {value!r:.80}, which is no finite number")
    return float(value)


def plain(info: object) -> JsonObject:
    """What of `info` can be stored as JSON; other values as texts."""
    text = json.dumps(info if isinstance(info, Mapping) else {}, default=str, skipkeys=True)
    kept: JsonObject = json.loads(text, parse_constant=str)  # NaN and infinities are no JSON
    return kept
