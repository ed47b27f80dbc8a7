"""Overrides on the command line: `section.key=value`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from tandem.protos.errors import ConfigError
from tandem.protos.secret_values import masked_override
from tandem.reward.options.tree import Shape, default_of, shape_at
from tandem.services.config.other_names import explain_other_name

_NONE = "none"


def apply_overrides(values: dict[str, object], overrides: Sequence[str], root: type[BaseModel]) -> None:
    """Applies `section.key=value` texts to the nested values of a configuration, in place.

    A table is set before the keys inside it, and the key that selects a table before its other keys. Selecting another
    table discards the old table's keys. The bare name of a table becomes that table when a key inside it is set.
    `key=none` removes an optional key. Raises ConfigError for a malformed override, a key below a value that is no
    table, and a required key that is `none`.
    """
    parted = [(override, *_part(override)) for override in overrides]
    for override, keys, value in sorted(parted, key=lambda one: (len(one[1]), not _names_a_table(root, one[1]))):
        node = values
        for depth, key in enumerate(keys[:-1], start=1):
            below = as_table(node.get(key, {}), shape_at(root, keys[:depth]))
            if not isinstance(below, dict):
                raise ConfigError(f"override {masked_override(override)!r}: {key} is a value, not a section")
            node[key] = below
            node = below
        table, shape, last = shape_at(root, keys[:-1]), shape_at(root, keys), keys[-1]
        if table is not None and last == table.naming_key and selects_another(node, table, value):
            node.clear()
        if value != _NONE or shape is None or not (shape.optional or shape.annotation is str):
            node[last] = value
        elif shape.optional:
            node[last] = None
        elif _default(root, keys) == "":
            node.pop(last, None)
        else:
            raise ConfigError(
                f"override {masked_override(override)!r}: {'.'.join(keys)} needs a value and cannot be none"
            )


def as_table(value: object, shape: Shape | None) -> object:
    """What stands in a table's place as a table: an empty one for nothing, the named one for a bare name."""
    if shape is None or not shape.is_table:
        return value
    if isinstance(value, str) and shape.bare is not None:
        return {shape.bare.key: value}
    return {} if value is None else value


def selects_another(table: Mapping[str, object], shape: Shape, name: object) -> bool:
    """Whether `name` selects another table than the one whose values these are."""
    return table.get(shape.naming_key, shape.bare.default if shape.bare is not None else "") != name


def _default(root: type[BaseModel], keys: Sequence[str]) -> object:
    shape = shape_at(root, keys[:-1])
    assert shape is not None, "the key itself is known"
    fields = (model.model_fields.get(keys[-1]) for model in shape.models.values())
    return next(default_of(field) for field in fields if field is not None)


def _names_a_table(root: type[BaseModel], keys: Sequence[str]) -> bool:
    table = shape_at(root, keys[:-1])
    return table is not None and keys[-1] == table.naming_key


def _part(override: str) -> tuple[list[str], object]:
    """The parts of the key and the value."""
    key, sign, text = override.partition("=")
    parts = key.strip().split(".")
    if not sign or len(parts) < 2 or not all(parts):
        known = explain_other_name(key.strip()) if sign else ""
        example = "write section.key=value, e.g. trainer.learning_rate=2e-6"
        raise ConfigError(f"override {masked_override(override)!r}: {f'{known}; ' if known else ''}{example}")
    try:
        return parts, tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return parts, text  # bare words are strings, as in other trainers' overrides
