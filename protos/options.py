"""The base class of configuration models, and tables that may be written as a bare name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

MAX_TOP_K = 512
"""Largest top-k under which samplers record sampling masks: each has at most so many tokens."""


class Options(BaseModel):
    """A table of a recipe. Unknown keys and numbers that are not finite are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, eq=False)
class BareName:
    """Reads a bare string as the value of `key`: `loss = "gspo"` for `loss = { name = "gspo" }`. A table without that
    key has the value `default`.
    """

    key: str
    default: str
    elsewhere: Mapping[str, str]
    """Lower-case names in other programs → ours, which an error suggests."""

    def __call__(self, value: object) -> object:
        if isinstance(value, str):
            return {self.key: value}
        if isinstance(value, dict) and self.key not in value:
            return {self.key: self.default, **value}
        return value
