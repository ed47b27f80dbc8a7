"""Tables of a recipe that may be written as a bare name: `loss = "gspo"` for `loss = { name = "gspo" }`. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BeforeValidator

Guess = Callable[[str], str | None]
"""Unknown name → the known one that is meant, or None."""


@dataclass(frozen=True, slots=True)
class BareName:
    """What a bare string stands for: the value of `key`, which is `default` in a table that lacks it."""

    key: str
    default: str
    guess: Guess | None = None

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            return {self.key: value}
        if isinstance(value, dict) and self.key not in value:
            return {self.key: self.default, **value}
        return value


def named(default: str, *, key: str = "name", guess: Guess | None = None) -> BeforeValidator:
    """For `Annotated[OneOfSeveral, named("rloo")]`: a string is a name, and a table without one is called `default`."""
    return BeforeValidator(BareName(key, default, guess))
