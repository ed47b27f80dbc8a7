"""Values as plain data, for calls between a test and an answer. Plain data carries no behaviour; nothing is pickled.

Values that JSON supports are sent as JSON. Every JSON object is a tag: {"tuple": […]}, {"set": […]},
{"frozenset": […]}, {"dict": [[key, value], …]}, {"bytes": text}, {"complex": [real, imaginary]}, {"int": hexadecimal}
(for long integers), {"object": number, "type": name}, for one that is not data and stays in its process. Subclasses
become their base class.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_LONG_INT_BITS = 4096  # Python refuses to convert much longer integers to decimals


def dumps(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def encode(value: object, keep: Callable[[object], dict[str, object]]) -> object:
    """Converts the value to JSON types. `keep` returns the tag of an object that is not data, or raises TypeError.
    Raises RecursionError for a value that is nested too deeply, or contains itself.
    """
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _LONG_INT_BITS else {"int": hex(value)}
    if isinstance(value, list):
        return [encode(one, keep) for one in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(one, keep)] for key, one in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(one, keep) for one in value]}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep)
    return keep(value)


def decode(value: Any, find: Callable[[dict[str, Any]], Any]) -> Any:
    """Decodes the output of `encode`; raises ValueError, TypeError, KeyError or RecursionError for anything else.
    `find` returns the object for a tag.
    """
    if isinstance(value, list):
        return [decode(one, find) for one in value]
    if not isinstance(value, dict):
        return value
    if "object" in value:
        return find(value)
    ((tag, inner),) = value.items()
    if tag == "dict":
        return {decode(key, find): decode(one, find) for key, one in inner}
    if tag == "bytes":
        return inner.encode("latin-1")
    if tag == "complex":
        return complex(*inner)
    if tag == "int":
        return int(inner, 16)
    kinds: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[tag](decode(inner, find))
