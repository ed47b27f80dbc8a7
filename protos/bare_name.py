"""A table of options that may be written as a bare name: `loss = "gspo"` for `loss = { name = "gspo" }`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BareName:
    """What a bare string stands for: the value of `key`, which is `default` in a table that lacks it."""

    key: str
    default: str
    guess: Callable[[str], str | None] | None = None
    """Unknown name → the known one that is meant, or None."""

    def __call__(self, value: object) -> object:
        if isinstance(value, str):
            return {self.key: value}
        if isinstance(value, dict) and self.key not in value:
            return {self.key: self.default, **value}
        return value
