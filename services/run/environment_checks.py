"""Checks of a recipe's environments, those of its evaluation sets among them, before a run starts."""

from __future__ import annotations

import asyncio

from tandem.protos.errors import ConfigError
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import check_class
from tandem.services.config import Recipe
from tandem.services.config.eval_sets import NO_ENVIRONMENT
from tandem.services.run.tool_formats import check_tool_format

_UNSAVED = "evaluations do not save their episodes"


def check_environment_service(recipe: Recipe) -> None:
    """Checks that the recipe has an environment for a service. The service itself checks the class."""
    if not recipe.environment.path:
        raise ConfigError("the recipe has no environment to serve; set environment.path or environment.tools")
    if not recipe.environment.service:
        raise ConfigError("environment.service is false; set environment.service=true for all services of the run")


def check_environment(recipe: Recipe) -> None:
    """Checks the format of calls, the class, and that its unsafe tools are never called without a saved intent; then
    the classes of evaluation sets.
    """
    check_tool_format(recipe.environment)
    unsafe = _unsafe_tools(recipe.environment)
    if unsafe and not recipe.rollout.partial_rollout:
        fault = "rollout.partial_rollout is false, and only saved episodes may call it"
        raise ConfigError(f"environment.tools: {unsafe[0]} is unsafe, but {fault}; set it to true")
    if unsafe and recipe.eval_sets:
        fault = f"{_UNSAVED}; leave the evaluation sets out"
        raise ConfigError(f"environment.tools: {unsafe[0]} is unsafe, and {fault}")
    checked = {"", NO_ENVIRONMENT}
    for one in recipe.eval_sets:
        if (key := one.environment.key(recipe.environment)) in checked:
            continue
        checked.add(key)
        try:
            if unsafe := _unsafe_tools(one.environment.over(recipe.environment)):
                raise ConfigError(f"{unsafe[0]} is unsafe, and {_UNSAVED}")
        except ConfigError as error:
            raise ConfigError(f"evaluation set {one.name}: {error}") from None


def _unsafe_tools(config: EnvironmentConfig) -> list[str]:
    """In order of their names. Raises ConfigError if the class cannot be used."""
    return sorted(asyncio.run(check_class(config))) if config.path else []
