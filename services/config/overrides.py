"""Overrides on the command line: `section.key=value`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

from pydantic import BaseModel

from tandem.protos.errors import ConfigError
from tandem.reward.options.tree import Shape, shape_at
from tandem.services.config.other_names import explain_other_name

_NONE = "none"


def apply_overrides(root: type[BaseModel], values: dict[str, object], overrides: Sequence[str]) -> None:
    """Applies `section.key=value` texts to the nested values of a configuration, in place.

    A table is set before the keys inside it, and the key that selects a table before its other keys. Selecting another
    table discards the old table's keys. The bare name of a table becomes that table when a key inside it is set.
    `key=none` removes an optional key.

    Raises:
        ConfigError: an override is malformed, its key goes through a value that is no table, or a required key is
            `none`.
    """
    parted = [(override, *_part(override)) for override in overrides]
    for override, keys, value in sorted(parted, key=lambda one: (len(one[1]), not _names_a_table(root, one[1]))):
        node = values
        for depth, key in enumerate(keys[:-1], start=1):
            node = _table_below(node, key, shape_at(root, keys[:depth]), override)
        table, shape, last = shape_at(root, keys[:-1]), shape_at(root, keys), keys[-1]
        if table is not None and last == table.naming_key:
            named = node.get(last, table.bare.default if table.bare is not None else "")
            if named != value:
                node.clear()
        if value != _NONE or shape is None:
            node[last] = value
        elif shape.optional:
            node[last] = None
        elif shape.annotation is not str:
            node[last] = value
        elif _default(root, keys) == "":
            node.pop(last, None)
        else:
            raise ConfigError(f"override {override!r}: {'.'.join(keys)} needs a value and cannot be none")


def _default(root: type[BaseModel], keys: Sequence[str]) -> object:
    """The default of a dotted key, None if the key is required."""
    shape = shape_at(root, keys[:-1])
    assert shape is not None, "the key itself is known"
    found = [model.model_fields[keys[-1]] for model in shape.models.values() if keys[-1] in model.model_fields]
    return None if found[0].is_required() else found[0].get_default(call_default_factory=True)


def _names_a_table(root: type[BaseModel], keys: Sequence[str]) -> bool:
    table = shape_at(root, keys[:-1])
    return table is not None and keys[-1] == table.naming_key


def _table_below(node: dict[str, object], key: str, shape: Shape | None, override: str) -> dict[str, object]:
    """The table at a key, created if missing."""
    below = node.setdefault(key, {})
    if shape is not None and shape.is_table and not isinstance(below, dict):
        if below is None:
            below = node[key] = {}
        elif isinstance(below, str) and shape.bare is not None:
            below = node[key] = {shape.bare.key: below}
    if not isinstance(below, dict):
        raise ConfigError(f"override {override!r}: {key} is a value, not a section")
    return below


def _part(override: str) -> tuple[list[str], object]:
    """The parts of the key and the value."""
    key, sign, text = override.partition("=")
    parts = key.strip().split(".")
    if not sign or len(parts) < 2 or not all(parts):
        known = explain_other_name(key.strip()) if sign else ""
        raise ConfigError(
            f"override {override!r}: {f'{known}; ' if known else ''}"
            "write section.key=value, e.g. trainer.learning_rate=2e-6"
        )
    try:
        return parts, tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return parts, text  # bare words are strings, as in other trainers' overrides
