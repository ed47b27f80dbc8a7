"""Recognises environments of other libraries by their methods. Loads nothing heavy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeGuard


def is_foreign(found: object) -> TypeGuard[Callable[..., object]]:
    """Whether this is a function that makes environments, or a class with methods of another library's environments."""
    if not isinstance(found, type):
        return callable(found)
    if is_verifiers(found) or is_verifiers_tasks(found):
        return True
    return has_methods(found, "init", "step") or (has_methods(found, "reset") and not is_native(found))


def has_methods(kind: object, *methods: str) -> bool:
    return all(callable(getattr(kind, method, None)) for method in methods)


def is_native(kind: type) -> bool:
    """Whether `reset` is meant to be that of `tandem.Environment`."""
    if not has_methods(kind, "reset"):
        return False
    reset: Callable[..., object] = getattr(kind, "reset")  # noqa: B009
    signature = inspect.signature(reset)
    if inspect.iscoroutinefunction(reset) and {"task", "episode_id"} & signature.parameters.keys():
        return not is_openenv(kind)
    try:
        signature.bind(None, {}, seed=0, episode_id="")
    except TypeError:
        return False
    return inspect.iscoroutinefunction(reset) or "episode_id" in signature.parameters


def is_verifiers(kind: object) -> bool:
    """Up to 0.3: an environment with a data set and a rubric, which plays its episodes itself."""
    return has_methods(kind, "run_rollout", "get_dataset")


def is_verifiers_tasks(kind: object) -> bool:
    """Since 0.4: an environment with a set of tasks and agents."""
    return has_methods(kind, "run_episode", "serving")


def is_openenv(kind: object) -> bool:
    """`state` is a method of clients, and a property of environments."""
    return (
        has_methods(kind, "reset", "step", "close") and hasattr(kind, "state") and not has_methods(kind, "get_reward")
    )


def is_gym(kind: type) -> bool:
    """With a method `step` that is no tool: the `reset` of TRL takes all columns of a row."""
    if not has_methods(kind, "reset", "step") or has_methods(kind, "get_reward"):
        return False
    parameters = inspect.signature(getattr(kind, "reset")).parameters  # noqa: B009
    return "seed" in parameters or not any(one.kind is one.VAR_KEYWORD for one in parameters.values())
