"""The configuration, explained: docs/configuration.md, `tandem config`. Generated from the models, so it cannot fall behind.

python -m services.config_docs            writes docs/configuration.md
python -m services.config_docs --check    exits 1 if the file is not what would be written
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from services.config import Recipe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m services.config_docs` from the configuration models. Do not edit; `make check` compares. -->

A recipe is one TOML file. Every key may also be given on the command line, which wins:

```
tandem run recipe.toml trainer.learning_rate=2e-6 run.staleness_budget=4
```

An unknown key is an error that names the nearest known one. `tandem config recipe.toml` prints a recipe with every default filled
in and marks what differs; the same, as JSON, is saved with every run as `config.json`, which may stand wherever a recipe may.
"""

_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a recipe. `default` is JSON text, "" if the key must be given."""

    section: str
    name: str
    type: str
    default: str
    doc: str


def keys() -> Iterator[Key]:
    """Every key of a recipe, in the order of the models."""
    for section, model in sections().items():
        docs = attribute_docs(model)
        for name, info in model.model_fields.items():
            default = (
                ""
                if info.is_required()
                else json.dumps(_plain(info.get_default(call_default_factory=True)), ensure_ascii=False)
            )
            yield Key(section, name, type_words(info), default, docs[name])


def sections() -> dict[str, type[BaseModel]]:
    """Section name → its model."""
    return {name: info.annotation for name, info in Recipe.model_fields.items() if isinstance(info.annotation, type)}


@cache
def attribute_docs(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field, in one line. A field without one is a KeyError for its reader: every key is explained."""
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[field.target.id] = " ".join(after.value.value.split())
    return docs


def type_words(info: FieldInfo) -> str:
    """A field's type and limits in words: `integer ≥ 1`, `"grpo" or "dr_grpo"`."""
    words = _type_words(info.annotation)
    limits = []
    for rule in info.metadata:
        if isinstance(rule, annotated_types.Ge):
            limits.append(f"≥ {rule.ge}")
        elif isinstance(rule, annotated_types.Gt):
            limits.append(f"> {rule.gt}")
        elif isinstance(rule, annotated_types.Le):
            limits.append(f"≤ {rule.le}")
        elif isinstance(rule, annotated_types.Lt):
            limits.append(f"< {rule.lt}")
        elif getattr(rule, "pattern", None):
            limits.append(f"like `{rule.pattern}`")
    return " ".join([words, ", ".join(limits)]).strip()


def page() -> str:
    """docs/configuration.md."""
    parts = [_INTRODUCTION]
    for section, model in sections().items():
        purpose = " ".join(inspect.getdoc(model).split()).partition(": ")[2]  # type: ignore[union-attr]
        parts.append(
            f"## `[{section}]`\n\n{purpose[:1].upper()}{purpose[1:]}\n\n| key | type | default | |\n|---|---|---|---|"
        )
        for key in keys():
            if key.section == section:
                default = f"`{key.default}`" if key.default else "must be given"
                parts.append(
                    "| " + " | ".join(_cell(text) for text in (f"`{key.name}`", key.type, default, key.doc)) + " |"
                )
        parts.append("")
    return "\n".join(parts)


def as_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML that `tandem run` reads; what differs from the default is marked."""
    defaults = {(key.section, key.name): key.default for key in keys()}
    lines = []
    for section, values in recipe.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        for name, value in values.items():
            default = defaults[section, name]
            note = (
                ""
                if json.dumps(value, ensure_ascii=False) == default
                else f"  # default: {default or 'none, must be given'}"
            )
            lines.append(f"{name} = {toml_value(value)}{note}")
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """A value as TOML text."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_text(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return _toml_text(value) if isinstance(value, str) else json.dumps(value)


def _toml_text(text: str) -> str:
    """A JSON string is a TOML basic string, save for DEL, which TOML wants escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _type_words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type_words(argument) for argument in arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"list of {len(arguments)} {_NAMES[arguments[0]]}s"
    if origin in (tuple, list):
        return f"list of {_NAMES[arguments[0]]}"
    if origin is dict:
        return "table"
    return _NAMES[annotation]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Writes the page, or with `--check` compares it."""
    if arguments == ["--check"]:
        fresh = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
        if not fresh:
            print(f"{PAGE.name} is not what the models say; run python -m services.config_docs", file=sys.stderr)
        return 0 if fresh else 1
    if arguments:
        print("usage: python -m services.config_docs [--check]", file=sys.stderr)
        return 2
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
