"""Which names and texts hold secrets, and how they are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "***"

_NOT_SECRET = ("items_key", "results_key", "score_key")  # parameters of the scorers `remote` and `judge`

_SECRET_NAME = re.compile(
    r"[_-](keys?|token|secrets?)$|^(token|secret)$|apikey$|password|passwd|credential", re.IGNORECASE
)
_PARAMETER = re.compile(r"([?&][\w.-]*(?:key|token|secret|password|passwd)=)[^&\s]+", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether the value of a variable or key of this name is a secret: `OPENAI_API_KEY`, `hf_token`, `password`."""
    return _SECRET_NAME.search(name) is not None and name not in _NOT_SECRET


def without_passwords(text: str) -> str:
    """The text with the passwords of URLs masked: `redis://user:***@host`. In a URL that is not quoted correctly a
    password may hold any character, so everything up to the last @ is masked.
    """
    credentials, sign, place = text.rpartition("@")
    scheme, mark, user = credentials.partition("://")
    name, colon, _ = user.partition(":")
    if colon:
        text = f"{scheme}{mark}{name}:{MASK}{sign}{place}"
    return _PARAMETER.sub(rf"\1{MASK}", text)


def masked(value: object, name: str = "") -> object:
    """The value of a key of this name, as JSON has it, without secrets: passwords in URLs, and texts under secret names
    at any depth.
    """
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    if isinstance(value, str) and value:
        return MASK if is_secret_name(name) else without_passwords(value)
    return value


def masked_override(override: str) -> str:
    """`section.key=value` without secrets."""
    key, sign, value = override.partition("=")
    secret = any(is_secret_name(part.strip()) for part in key.split("."))
    return f"{key}{sign}{MASK if secret else without_passwords(value)}"
