"""Makes `tandem.Environment`s, or `tandem.Agent`s, of environments of other libraries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from tandem.protos.contracts import Environment, Resume
from tandem.rollout.environments.adapters.forked import ForkedEnvironment
from tandem.rollout.environments.adapters.gym import GymEnvironment
from tandem.rollout.environments.adapters.openenv import OpenEnvEnvironment, action_maker
from tandem.rollout.environments.adapters.recognition import (
    has_methods,
    is_gym,
    is_native,
    is_openenv,
    is_verifiers,
    is_verifiers_tasks,
)
from tandem.rollout.environments.adapters.skyrl import SkyRLEnvironment
from tandem.rollout.environments.adapters.textarena import TextArenaEnvironment
from tandem.rollout.environments.adapters.trl import TrlEnvironment, method_names, methods_of
from tandem.rollout.environments.adapters.verifiers import PlayedEnvironment, VerifiersAgent, check_environment
from tandem.rollout.environments.adapters.verifiers_tasks import TaskAgent, TaskEnvironment, configured, is_loader
from tandem.rollout.environments.loading import ContractError

Creator = Callable[[], Environment]
"""Makes the object of one episode. Those of verifiers are agents; `is_agent` of their class says so."""


class ForeignClass:
    """A class of another library, or a function that returns environments, called like a class of environments."""

    def __init__(self, path: str, make: Callable[..., object]) -> None:
        self.resume: Resume = "replay" if getattr(make, "resume", "") == "replay" else "restart"
        self._path = path
        self._make = make
        self._create: Creator | None = None

    def __call__(self, **arguments: object) -> Environment:
        """An environment of one episode. Raises ContractError if the objects are none. All have the same arguments."""
        if self._create is None:
            self._create = _creator(self._path, self._make, arguments)
        return self._create()


def _creator(path: str, make: Callable[..., object], arguments: Mapping[str, object]) -> Creator:
    if isinstance(make, type) and has_methods(make, "init", "step"):  # its objects are made of a row
        return partial(ForkedEnvironment, partial(SkyRLEnvironment, make, arguments))
    given = dict(arguments)
    field = given.pop("action_field", None) if is_openenv(make) else None
    renderer = given.pop("renderer", None) if is_loader(make) else None
    make_one = configured(make, given) if is_loader(make) else partial(make, **given)
    made = make_one()
    kind = type(made)
    if is_verifiers(kind):
        check_environment(made, path)
        return cast("Creator", partial(VerifiersAgent, cast("PlayedEnvironment", made)))
    if is_verifiers_tasks(kind):
        return cast("Creator", partial(TaskAgent, cast("Callable[[], TaskEnvironment]", make_one), renderer))
    if is_native(kind):
        return cast("Creator", make_one)
    if is_openenv(kind):
        create = partial(OpenEnvEnvironment, make_one, action_maker(kind, field, path))
        is_async = inspect.iscoroutinefunction(getattr(kind, "step", None))
        return create if is_async else partial(ForkedEnvironment, create)
    if has_methods(kind, "reset", "step", "get_observation"):
        return partial(ForkedEnvironment, partial(TextArenaEnvironment, make_one))
    if is_gym(kind):
        return partial(ForkedEnvironment, partial(GymEnvironment, make_one))
    if has_methods(kind, "reset") and method_names(kind):
        methods = methods_of(made, path)
        schemas = [method.schema for method in methods.values()]
        return partial(ForkedEnvironment, partial(TrlEnvironment, make_one, methods), schemas)
    missing = "step, and none that could be a tool" if has_methods(kind, "reset") else "reset"
    raise ContractError(f"{path}: {kind.__name__} has no method {missing} (see docs/environments.md)")
