"""The schema of a Python function in OpenAI's form, from its type hints and its docstring in Google's style."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from tandem.protos.contracts import JsonObject
from tandem.rollout.environments.loading import ContractError
from tandem.rollout.environments.tools.effects import KEY

_SECTION = re.compile(r"(\w+):")
_ARGUMENT_SECTIONS = ("Args", "Arguments", "Parameters")
_DESCRIBED = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NAMED_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ArgumentError(Exception):
    """Arguments that do not fit a tool's schema; the message says why."""


class FunctionArguments:
    """The parameters of a function: their schema, and the conversion of what the policy gives.

    Raises ContractError, which begins with `path`, if the function does not describe them.
    """

    def __init__(self, function: Callable[..., object], path: str) -> None:
        self._names: list[str] = []
        documented = read_docstring(function)
        if not documented.summary:
            raise ContractError(f"{path}: the function has no docstring, by which the policy knows what the tool does")
        hints = typing.get_type_hints(function, include_extras=True)
        fields: dict[str, tuple[object, object]] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if name == KEY:
                continue
            if parameter.kind not in _NAMED_KINDS:
                raise ContractError(f"{path}: the parameter {name} cannot be given by its name")
            if name not in hints:
                raise ContractError(f"{path}: the parameter {name} has no type hint")
            default = ... if parameter.default is parameter.empty else parameter.default
            # Numbered, because a field may not be called `schema` or `_x`, and a parameter may.
            field = Field(default, alias=name, description=documented.parameters.get(name))
            fields[f"p{len(self._names)}"] = (hints[name], field)
            self._names.append(name)
        if unknown := [name for name in documented.parameters if name not in (*self._names, KEY)]:
            raise ContractError(f"{path}: the docstring describes {', '.join(unknown)}, which is no parameter")
        self._model: type[BaseModel] = create_model(  # type: ignore[call-overload]
            "arguments", __config__=ConfigDict(extra="forbid"), **fields
        )
        self.description = documented.summary

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def schema(self, name: str) -> JsonObject:
        """The tool in OpenAI's form."""
        parameters = _without_titles(self._model.model_json_schema(by_alias=True))
        assert isinstance(parameters, dict), "the schema of a model is an object"
        function = {"name": name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def convert(self, given: JsonObject) -> Mapping[str, object]:
        """Keyword arguments of the function. Raises ArgumentError if they do not fit."""
        try:
            values = self._model.model_validate(given)
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))
            raise ArgumentError("; ".join(faults)) from None
        return {self._names[int(field[1:])]: getattr(values, field) for field in values.model_fields_set}


def _without_titles(schema: object) -> object:
    """pydantic's titles repeat the names."""
    if isinstance(schema, list):
        return [_without_titles(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(one) for name, one in value.items()}
        if key in ("properties", "$defs") and isinstance(value, dict)
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title"
    }


class Docstring(NamedTuple):
    """What stands before the first section, and the descriptions of the parameters."""

    summary: str
    parameters: Mapping[str, str]


def read_docstring(function: Callable[..., object]) -> Docstring:
    """The docstring of a function, in Google's style."""
    summary: list[str] = []
    described: dict[str, list[str]] = {}
    section, margin, last = "", 0, ""
    for line in (inspect.getdoc(function) or "").splitlines():
        words, indent = line.strip(), len(line) - len(line.lstrip())
        if words and not indent and (header := _SECTION.fullmatch(words)):
            section, margin, last = header[1], 0, ""
        elif not section:
            summary.append(words)
        elif section in _ARGUMENT_SECTIONS and words:
            margin = margin or indent
            found = _DESCRIBED.fullmatch(words) if indent == margin else None
            if found:
                last = found[1]
                described[last] = [found[2]]
            elif last:
                described[last].append(words)
    joined = {name: " ".join(lines).strip() for name, lines in described.items()}
    return Docstring("\n".join(summary).strip(), joined)
