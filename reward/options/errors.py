"""A ValidationError in one line: the place as the user writes it, the fault, and the remedy where there is one."""

from __future__ import annotations

import json

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tandem.protos.error_text import did_you_mean, nearest, printable, shown
from tandem.reward.options.tree import Location, Shape, fields_of, known_keys, locate, type_words

_OWN_MESSAGE = {"value_error", "assertion_error", "json_invalid"}


def explain(root: type[BaseModel], error: ValidationError, place: str = "") -> str:
    """The first fault of `error` in one line. `place` is where the values of `root` stand, e.g. `reward.arguments`."""
    fault = first_fault(error)
    location = locate(root, fault["loc"])
    where, kind, shape = _joined(place, location.place), fault["type"], location.shape
    given = shown(fault["input"], where.rpartition(".")[2])
    if kind == "extra_forbidden":
        return _unknown_key(root, location, str(fault["loc"][-1]), place)
    if kind == "missing" and not location.inside:
        return f"{where} is missing"
    if shape is not None and shape.models:
        if kind == "union_tag_invalid":
            return _unknown_name(where, shape, str(fault["ctx"]["tag"]))
        if kind == "union_tag_not_found":
            return f"{where}.{shape.chooser} is missing; there are {', '.join(shape.models)}"
    if kind == "literal_error" and isinstance(fault["input"], str) and not (shape is not None and shape.is_union):
        choices = [word.strip(" '") for word in fault["ctx"]["expected"].replace(" or ", ", ").split(",")]
        return f"{where}: there is no {shown(fault['input'])}{did_you_mean(fault['input'], choices)}"
    message = fault["msg"].removeprefix("Value error, ")
    if kind in _OWN_MESSAGE:
        about_table = isinstance(fault["input"], dict | BaseModel) or kind == "json_invalid"
        got = "" if about_table or not where else f" (got {given})"
        return f"{where}: {message}{got}" if where else message
    if kind == "finite_number":
        message = "should be a finite number"
    elif shape is not None:
        message = f"should be {_with_article(type_words(shape).replace('`', ''))}"
    got = f"{given} in it" if location.inside and kind != "missing" else given
    return f"{where}: {message} (got {got}){_how_to_write(where, shape, fault)}"


def first_fault(error: ValidationError) -> ErrorDetails:
    """The fault to report. An unknown key comes before a missing one beside it, which may be the same key misspelt."""
    faults = error.errors()
    if faults[0]["type"] != "missing":
        return faults[0]
    beside = (fault for fault in faults if fault["loc"][:-1] == faults[0]["loc"][:-1])
    return next((fault for fault in beside if fault["type"] == "extra_forbidden"), faults[0])


def _unknown_key(root: type[BaseModel], location: Location, word: str, place: str) -> str:
    """Names the key that was probably meant: of the same table, of a table inside it, else all keys of the table."""
    table, where = location.table, _joined(place, location.place)
    owners = [name for name, model in table.shape.models.items() if word in fields_of(model)]
    if owners:
        return f"unknown key {where}: it belongs to {' and '.join(owners)}, not to {table.choice}"
    inside = [key for key in known_keys(root) if key.startswith(table.key("")) and key.endswith(f".{word}")]
    if 1 <= len(inside) <= 3:
        return f"unknown key {where}; did you mean {' or '.join(_joined(place, key) for key in inside)}?"
    known = list(fields_of(table.model))
    if near := nearest(word, known):
        return f"unknown key {where}; did you mean {_joined(place, table.key(near))}?"
    return f"unknown key {where}{did_you_mean('', known)}"


def _unknown_name(place: str, shape: Shape, name: str) -> str:
    guessed = shape.bare.elsewhere.get(name.lower()) if shape.bare is not None else None
    meant = f"; did you mean {guessed}?" if guessed else did_you_mean(name, shape.models)
    return f"{place}: there is no {name!r}{meant}"


def _how_to_write(place: str, shape: Shape | None, fault: ErrorDetails) -> str:
    if shape is None or shape.annotation != tuple[str, ...] or not isinstance(fault["input"], str):
        return ""
    return f"; write {place.rpartition('.')[2]} = [{json.dumps(fault['input'], ensure_ascii=False)}]"


def _joined(place: str, key: str) -> str:
    key = printable(key) if key else ""
    return f"{place}.{key}" if place and key else place or key


_ARTICLES = {"integer": "an ", "number": "a ", "list": "a ", "table": "a ", "name": "a ", "preset": "a "}


def _with_article(words: str) -> str:
    return _ARTICLES.get(words.split(" ")[0], "") + words
