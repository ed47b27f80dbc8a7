"""A table of options that may be written as a bare name: `loss = "gspo"` for `loss = { name = "gspo" }`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BareName:
    """Reads a bare string as the value of `key`. A table without that key has the value `default`."""

    key: str
    default: str
    guess: Callable[[str], str | None] | None = None
    """Maps an unknown name to the known name that was probably meant, or to None."""

    def __call__(self, value: object) -> object:
        if isinstance(value, str):
            return {self.key: value}
        if isinstance(value, dict) and self.key not in value:
            return {self.key: self.default, **value}
        return value
