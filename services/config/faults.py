"""What is wrong with a configuration, in one line: the place as a user writes it, the fault, and the remedy where there
is one.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tandem.services.config.tree import Location, Shape, known_keys, locate, nearest, shape_words

_NO_TABLE = {"model_type", "model_attributes_type", "dict_type"}


def explain(root: type[BaseModel], error: ValidationError) -> str:
    """The first fault of `error`, in one line. A missing key comes after an unknown one beside it, which may be it with
    a slip.
    """
    fault = _first(error)
    location = locate(root, fault["loc"])
    place, kind = _printable(location.place), fault["type"]
    if kind == "extra_forbidden":
        return _unknown_key(root, location, str(fault["loc"][-1]))
    if kind == "missing":
        return f"{place} is missing"
    if location.shape is not None and location.shape.models:
        if kind == "union_tag_invalid":
            return _unknown_name(place, location.shape, str(fault["ctx"]["tag"]))
        if kind == "union_tag_not_found":
            return f"{place}.{location.shape.chooser} is missing; there are {', '.join(location.shape.models)}"
        if kind in _NO_TABLE:
            return f"{place}: should be a {shape_words(location.shape)} (got {fault['input']!r})"
    message = fault["msg"].removeprefix("Value error, ")
    if location.shape is not None and location.shape.is_union:  # there is a fault for each type it might have had
        message = f"Input should be {shape_words(location.shape)}"
    elif kind == "literal_error" and isinstance(fault["input"], str):
        return _unknown_word(place, fault)
    if not place:
        return message
    if kind == "value_error" and isinstance(fault["input"], dict | BaseModel):
        return f"{place}: {message}"
    return f"{place}: {message} (got {fault['input']!r})"


def _first(error: ValidationError) -> ErrorDetails:
    faults = error.errors()
    if faults[0]["type"] != "missing":
        return faults[0]
    beside = (fault for fault in faults if fault["loc"][:-1] == faults[0]["loc"][:-1])
    return next((fault for fault in beside if fault["type"] == "extra_forbidden"), faults[0])


def _unknown_key(root: type[BaseModel], location: Location, word: str) -> str:
    """Names the key that was probably meant: of the same table, of a table inside it, else all keys of the table."""
    table, place = location.table, _printable(location.place)
    owners = [name for name, model in table.shape.models.items() if word in model.model_fields]
    if owners:
        return f"unknown key {place}: it belongs to {' and '.join(owners)}, not to {table.choice}"
    inside = [key for key in known_keys(root) if key.startswith(table.key("")) and key.endswith(f".{word}")]
    if 1 <= len(inside) <= 3:
        return f"unknown key {place}; did you mean {' or '.join(inside)}?"
    known = list(table.model.model_fields)
    near = nearest(word, known)
    return f"unknown key {place}{_meant(table.key(near) if near else '', known)}"


def _unknown_name(place: str, shape: Shape, name: str) -> str:
    guessed = shape.bare.guess(name) if shape.bare is not None and shape.bare.guess is not None else None
    return f"{place}: there is no {name!r}{_meant(guessed or nearest(name, shape.models), shape.models)}"


def _unknown_word(place: str, fault: ErrorDetails) -> str:
    """For a word that is none of the allowed ones."""
    words = [word.strip(" '") for word in fault["ctx"]["expected"].replace(" or ", ", ").split(",")]
    return f"{place}: there is no {fault['input']!r}{_meant(nearest(fault['input'], words), words)}"


def _meant(near: str, known: Iterable[str]) -> str:
    return f"; did you mean {near}?" if near else f"; there are {', '.join(known)}"


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)
