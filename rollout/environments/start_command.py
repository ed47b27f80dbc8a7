"""The command that starts a process of environments, in the sandbox or without."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

from tandem.protos.errors import ConfigError
from tandem.rollout.environments import other_interpreter
from tandem.rollout.environments.config import TOOL_ENVIRONMENT, EnvironmentConfig

_INSIDE = (sys.executable, "-m", "tandem.rollout.environments.inside")
_SANDBOX = (sys.executable, "-m", "tandem.reward.sandbox.command")
_PACKAGES = ("tandem", "tandem.protos", "tandem.rollout")


def start_command(config: EnvironmentConfig) -> tuple[str, ...]:
    """Raises ConfigError if `interpreter` or one of `sandbox_files` does not exist."""
    if config.interpreter:
        if not os.access(config.interpreter, os.X_OK) or os.path.isdir(config.interpreter):
            raise ConfigError(f"environment.interpreter: {config.interpreter} is no program")
        return config.interpreter, other_interpreter.__file__
    if not config.sandbox:
        return _INSIDE
    if missing := [path for path in config.sandbox_files if not os.path.exists(path)]:
        raise ConfigError(f"environment.sandbox_files: {missing[0]} does not exist (looked in {os.getcwd()})")
    places = [config.path, *config.tools] if config.path != TOOL_ENVIRONMENT else config.tools
    shown = [path for name in _PACKAGES for path in _folders_of(name)]
    shown += [path for place in places for path in _shown_for(place)]
    return (*_SANDBOX, *shown, *config.sandbox_files, "--", *_INSIDE)


def _shown_for(place: str) -> Iterator[str]:
    """The folder of `file.py:name`, `tools.yaml` or `mcp.json:server`; what `module.path:name` is imported from. What
    does not exist is left to the process, which says so.
    """
    name = place.partition(":")[0]
    if name.endswith((".py", ".yaml", ".yml", ".json")):
        if os.path.exists(name):
            yield os.path.dirname(os.path.abspath(name))
    else:
        yield from _folders_of(name.partition(".")[0])


def _folders_of(module: str) -> list[str]:
    """Where a module or package is, unless it is installed with this Python."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin in ("built-in", "frozen"):
        return []
    found = [*(spec.submodule_search_locations or [])] or [str(spec.origin)]
    return [path for path in found if not path.startswith((f"{sys.prefix}/", f"{sys.base_prefix}/"))]
