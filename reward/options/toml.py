"""Values written as TOML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping


def toml_value(value: object) -> str:
    """A value as TOML text. Keys without a value are left out, since TOML cannot express them."""
    if isinstance(value, Mapping):
        items = (f"{_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key, re.ASCII) else _text(key)


def _text(text: str) -> str:
    """A JSON string is a TOML basic string, except for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
