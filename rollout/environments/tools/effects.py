"""What tools declare of their calls: their effect, and whether they take the call's idempotency key."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast, get_args

from tandem.protos.contracts import ToolEffect
from tandem.rollout.environments.loading import ContractError

KEY = "idempotency_key"
"""A parameter of this name is not shown to the policy. It gets the same text in each attempt at the same call."""


def declared_effect(declared: object, source: str) -> ToolEffect:
    """Raises ContractError, which begins with `source`, if there is no such effect."""
    if declared not in get_args(ToolEffect):
        expected = " or ".join(f"'{effect}'" for effect in get_args(ToolEffect))
        raise ContractError(f"{source}: the tool's effect is {declared!r:.80}; it must be {expected}")
    return cast("ToolEffect", declared)


def takes_key(function: Callable[..., object]) -> bool:
    return KEY in inspect.signature(function).parameters
