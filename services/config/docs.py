"""Generates the text of docs/configuration.md and `tandem config` from the configuration models.

python -m tandem.services.config.docs            writes docs/configuration.md
python -m tandem.services.config.docs --check    exits 1 if the file is not what would be written
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from tandem.reward.options.tree import Table, attribute_docs, default_of, shape_of, summary, tables, toml_of, type_words
from tandem.services.config import Recipe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m tandem.services.config.docs` from the configuration models.
     Do not edit; `make check` compares. -->

A recipe is one TOML file. The command line overrides its keys:

```
tandem run recipe.toml trainer.learning_rate=2e-6 run.staleness_budget=4
```

A table that is chosen by name may be written as that name alone: `loss = "gspo"` is short for
`loss = { name = "gspo" }`, and `trainer.loss=gspo trainer.loss.clip_low=3e-4` on the command line is the table with two
keys. Another name starts a new table. `none` on the command line removes an optional table or key.

An unknown key is an error that names the nearest known one. `tandem config recipe.toml` prints a recipe with every
default filled in and marks what differs. Every run saves the same as JSON in `config.json`, which is accepted wherever
a recipe is. There `trainer.zero_stage` and `num_threads` are what `auto` chose: with other ranks, another dtype,
backend or machine, set them to `auto` again.
"""

NO_DEFAULT = "none"
"""Shown as the default of an optional key that is absent by default."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a recipe. `section` is the heading of its table; `default` is JSON text, "" if the key is required."""

    section: str
    name: str
    type: str
    default: str
    doc: str
    choice: str = ""
    """The name that selects the table of this key, for tables chosen by name."""


def keys(root: type[BaseModel] = Recipe) -> Iterator[Key]:
    """All keys of a recipe in the order of the models. The key that selects a table comes first in it, once."""
    seen = set()
    for table in tables(root):
        if table.shape.chooser and table.path not in seen:
            seen.add(table.path)
            names = " or ".join(f"`{json.dumps(name)}`" for name in table.shape.models)
            default = json.dumps(table.default_choice) if table.default_choice else ""
            yield Key(table.path, table.shape.chooser, names, default, "Which of them.")
        yield from keys_of(table)


def keys_of(table: Table) -> Iterator[Key]:
    """The keys of one table, without the key that selects it."""
    docs = attribute_docs(table.model)
    for name, info in table.fields():
        yield Key(table.path, name, type_words(shape_of(info)), default_text(info), docs[name], table.choice)


def explained(root: type[BaseModel] = Recipe) -> Iterator[str]:
    """Two lines for each key: its type and default, and its purpose."""
    for key in keys(root):
        default = f"default {key.default}" if key.default else "must be given"
        choice = f" of {key.choice}" if key.choice else ""
        yield f"{key.section}.{key.name}{choice} ({key.type}; {default})\n    {key.doc}"


def default_text(info: FieldInfo) -> str:
    """A field's default as JSON text; for a table chosen by name, the name. "" if there is no default."""
    if info.is_required():
        return ""
    default = default_of(info)
    if default is None:
        return NO_DEFAULT
    shape = shape_of(info)
    if shape.is_table:
        return json.dumps(getattr(default, shape.naming_key)) if shape.naming_key else "{}"
    return _json(default)


def page(root: type[BaseModel] = Recipe) -> str:
    """The text of docs/configuration.md."""
    parts = [_INTRODUCTION]
    headed = set()
    for table in tables(root):
        if table.path not in headed:
            headed.add(table.path)
            head = f"[{table.path[:-2]}]" if table.path.endswith("[]") else table.path
            parts.append(f"## `[{head}]`\n")
            if table.shape.chooser:
                parts.append(_choice_words(table))
        if table.choice:
            parts.append(f"### `{table.shape.chooser} = {json.dumps(table.choice)}`\n")
        parts.append(_filled(purpose(table.model)) + "\n")
        for key in keys_of(table):
            default = f"default `{key.default}`" if key.default else "required"
            parts.append(_filled(f"- `{key.name}` ({key.type}; {default}): {key.doc}", "  "))
        if parts[-1].startswith("- "):
            parts.append("")
    return "\n".join(parts)


def purpose(model: type[BaseModel]) -> str:
    """The first paragraph of a model's docstring, without a leading `[section]:`."""
    paragraph = summary(model)
    words = paragraph.partition(": ")[2] if paragraph.startswith("`[") else paragraph
    return words[:1].upper() + words[1:]


def _choice_words(table: Table) -> str:
    section, _, name = table.path.removesuffix("[]").rpartition(".")
    default = f"; `{json.dumps(table.default_choice)}` if none is named" if table.default_choice else ""
    words = f"One of these, chosen by `{table.shape.chooser}`{default}."
    if table.shape.bare is not None:
        short = f"`{name} = {json.dumps(table.choice)}` under `[{section}]`"
        words += f" {short} is short for a table with nothing else in it."
    return _filled(words) + "\n"


def as_toml(recipe: BaseModel) -> str:
    """The resolved recipe as TOML, with changed values marked and without absent optional keys (TOML has no null)."""
    lines: list[str] = []
    values = recipe.model_dump(mode="json")
    for name, info in type(recipe).model_fields.items():
        if values[name] is not None:
            _toml_table(lines, name, info, values[name])
    return "\n".join(lines)


def _toml_table(lines: list[str], path: str, info: FieldInfo, values: Mapping[str, Any]) -> None:
    shape = shape_of(info)
    model = shape.models[str(values[shape.chooser]) if shape.chooser else ""]
    lines.append(f"[{path}]  # default: {NO_DEFAULT}" if shape.optional else f"[{path}]")
    inner = []
    for name, field in model.model_fields.items():
        value = values[name]
        if value is None:
            continue
        if shape_of(field).is_table:
            inner.append((f"{path}.{name}", field, value))
            continue
        default = default_text(field)
        if name == shape.chooser:
            default = default_text(info) if default_of(info) is not None else _json(value)
        note = "" if _json(value) == default else f"  # default: {default or 'none, must be given'}"
        lines.append(f"{name} = {toml_of(value)}{note}")
    lines.append("")
    for place, field, value in inner:
        _toml_table(lines, place, field, value)


def _json(value: object) -> str:
    return json.dumps(to_jsonable_python(value), ensure_ascii=False)


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main(arguments: list[str]) -> int:
    """Writes the page, or with `--check` compares it with the file."""
    if arguments == ["--check"]:
        fresh = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
        if not fresh:
            print(f"{PAGE.name} is not what the models say; run python -m tandem.services.config.docs", file=sys.stderr)
        return 0 if fresh else 1
    if arguments:
        print("usage: python -m tandem.services.config.docs [--check]", file=sys.stderr)
        return 2
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
