"""Checks `environment.tool_format` against vLLM's parsers of tool calls, whose names are read without loading vLLM."""

from __future__ import annotations

import ast
import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

from tandem.protos.errors import ConfigError
from tandem.rollout.environments.config import EnvironmentConfig

_TABLE = "_TOOL_PARSERS_TO_REGISTER"


def check_tool_format(config: EnvironmentConfig) -> None:
    """Raises ConfigError if vLLM has no parser of the name after `vllm:`. What is not known here, a sampler checks."""
    _, _, name = config.tool_format.partition("vllm:")
    if name and (known := vllm_parsers()) and name not in known:
        told = f"vLLM has no such parser; it has {', '.join(sorted(known))}"
        raise ConfigError(f'environment.tool_format "{config.tool_format}": {told}')


def vllm_parsers() -> frozenset[str]:
    """The names of vLLM's parsers; none if it is not installed, has them elsewhere, or a plugin may add to them."""
    plugins = entry_points(group="vllm.general_plugins")
    spec = importlib.util.find_spec("vllm")
    if spec is None or any(not plugin.value.startswith(("vllm.", "tandem.")) for plugin in plugins):
        return frozenset()
    return frozenset(name for folder in spec.submodule_search_locations or () for name in _names_in(Path(folder)))


def _names_in(folder: Path) -> list[str]:
    """The keys of the table of parsers in vLLM's sources."""
    try:
        module = ast.parse((folder / "tool_parsers" / "__init__.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return []
    tables = [
        one.value
        for one in module.body
        if isinstance(one, ast.Assign) and any(isinstance(to, ast.Name) and to.id == _TABLE for to in one.targets)
    ]
    keys = [key for table in tables if isinstance(table, ast.Dict) for key in table.keys]
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
