"""Loads the tools that a recipe names: Python functions, verl's YAML files, MCP servers, the sandbox. Faults are
ContractErrors.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import cast

from tandem.protos.contracts import JsonObject
from tandem.rollout.environments.config import PYTHON
from tandem.rollout.environments.loading import ContractError, described, load_module
from tandem.rollout.environments.tools.effects import KEY, declared_effect
from tandem.rollout.environments.tools.function_schema import FunctionArguments
from tandem.rollout.environments.tools.mcp_servers import load_mcp_tools
from tandem.rollout.environments.tools.python_tool import PythonConfig, load_python_tool
from tandem.rollout.environments.tools.schema_arguments import SchemaArguments
from tandem.rollout.environments.tools.tool import ClassTool, FunctionTool, Tool, VerlTool
from tandem.rollout.environments.tools.verl_interface import offer_verl_interface

_METHODS = ("create", "execute", "calc_reward", "release")


@lru_cache(maxsize=1)
def load_tools(sources: tuple[str, ...], python: PythonConfig | None = None) -> Mapping[str, Tool]:
    """The tools of all sources, by name. `python`: settings of that tool. Raises ContractError."""
    offer_verl_interface()
    tools = [tool for source in sources for tool in _load_source(source, python or PythonConfig())]
    doubled = [name for name, number in Counter(tool.name for tool in tools).items() if number > 1]
    if doubled:
        raise ContractError(f"{', '.join(sources)}: two tools have the name {doubled[0]}; rename one of them")
    return {tool.name: tool for tool in tools}


def _load_source(source: str, python: PythonConfig) -> list[Tool]:
    if source == PYTHON:
        return [load_python_tool(python)]
    if source.endswith((".yaml", ".yml")):
        return _load_yaml(source)
    if source.endswith(".json") or ".json:" in source:
        return load_mcp_tools(source)
    place, _, name = source.rpartition(":")
    if not place and source.endswith(".py"):
        return _load_registered(source)
    if not place or not name:
        raise ContractError(
            f"{source!r} names no tool; write python, file.py:function, module.path:function, a YAML or a JSON file"
        )
    function = getattr(load_module(place, source), name, None)
    if not inspect.isroutine(function):
        raise ContractError(f"{source}: {place} has no function {name}")
    return [_function_tool(function, source)]


def _load_registered(source: str) -> list[Tool]:
    """All functions of a file that `@function_tool` declares."""
    module = load_module(source, source)
    functions = [one for one in vars(module).values() if inspect.isroutine(one) and _registration(one) is not None]
    if not functions:
        raise ContractError(f"{source}: no function there has @function_tool; write {source}:function")
    return [_function_tool(function, source) for function in functions]


def _registration(function: Callable[..., object]) -> tuple[str, object] | None:
    """Name and schema of a function with `@function_tool`. The schema is None where it follows from the function."""
    module = sys.modules.get("verl.tools.function_tool")
    registry = module.FUNCTION_TOOL_REGISTRY if module is not None else {}
    for name, entry in registry.items():
        if entry.fn is function:
            return name, entry.tool_schema
    return None


def _function_tool(function: Callable[..., object], source: str) -> Tool:
    registered = _registration(function)
    name, explicit = registered or (function.__name__, None)
    effect = declared_effect(getattr(function, "effect", "idempotent"), source)
    if explicit is None:
        arguments = FunctionArguments(function, source)
        return FunctionTool(function, arguments.schema(name), arguments, effect, returns_reward=registered is not None)
    schema = _as_object(explicit)
    given = SchemaArguments(schema, source)
    parameters = inspect.signature(function).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        needed = {one.name for one in parameters.values() if one.default is one.empty} - {KEY}
        if wrong := sorted(given.properties - set(parameters)) or sorted(needed - given.properties):
            raise ContractError(f"{source}: schema and function differ in the parameter {wrong[0]}")
    return FunctionTool(function, schema, given, effect, returns_reward=True)


def _load_yaml(source: str) -> list[Tool]:
    import yaml  # PyYAML comes with transformers

    try:
        content = yaml.safe_load(Path(source).read_text("utf-8"))
    except FileNotFoundError:
        raise ContractError(f"{source}: no such file (looked in {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ContractError(f"{source} cannot be read: {' '.join(str(error).split())}") from None
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ContractError(f"{source} has no list `tools`")
    return [_class_tool(entry, f"{source}: tools[{number}]") for number, entry in enumerate(entries)]


def _class_tool(entry: object, path: str) -> Tool:
    """A tool of `class_name`, `config` and `tool_schema`."""
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ContractError(f"{path} has no class_name")
    config = entry.get("config") or {}
    if config.get("type", "native") != "native":
        raise ContractError(f'{path}: config.type is {config["type"]!r}; only "native" tools are known')
    place, _, name = entry["class_name"].rpartition(".")
    try:
        kind = getattr(load_module(place, path), name, None)
        if not isinstance(kind, type):
            raise ContractError(f"{path}: {place} has no class {name}")
        tool = kind(config=config, tool_schema=_verl_schema(entry.get("tool_schema")))
    except ContractError:
        raise
    except Exception as error:  # user code
        raise ContractError(f"{path}: {described(error)}") from error
    if missing := [method for method in _METHODS if not callable(getattr(tool, method, None))]:
        raise ContractError(f"{path}: {name} has no method {' and no '.join(missing)}")
    schema = _as_object(tool.tool_schema)
    effect = declared_effect(config.get("effect", getattr(tool, "effect", "idempotent")), path)
    return ClassTool(cast("VerlTool", tool), schema, SchemaArguments(schema, path), effect)


def _verl_schema(schema: object) -> object:
    """The schema as the object that verl's tools expect."""
    module: ModuleType = importlib.import_module("verl.tools.schemas")
    return None if schema is None else module.OpenAIFunctionToolSchema.model_validate(schema)


def _as_object(schema: object) -> JsonObject:
    if isinstance(schema, Mapping):
        return dict(schema)
    dumped: JsonObject = schema.model_dump(exclude_unset=True, exclude_none=True)  # type: ignore[attr-defined]
    return dumped
