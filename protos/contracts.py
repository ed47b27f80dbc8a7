"""The protocols that `services` injects into the rooms: a scorer into the reward service, a tool into an agent loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

# Here and not beside the other nouns: a scoring process has no use for their arrays, nor for numpy's threads.
UnscoredReason = Literal["timeout", "crashed", "infrastructure", "invalid_input", "limit"]


class ScoreItem(NamedTuple):
    """One answer to be judged, in the words of verl's `compute_score`. A tuple: a service makes some 100,000 of them a
    second.
    """

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = MappingProxyType({})
    group: str = ""
    """Items of one call with the same group are compared with one another by group-relative judges; empty: with none.
    """


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward and the components it is made of."""

    value: float
    breakdown: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unscored:
    """Why there is no reward. Never a number in place of a reason."""

    reason: UnscoredReason
    detail: str = ""


Score = Scored | Unscored


class Scorer(Protocol):
    """Judges answers. `score` returns one result an item, in order, and raises nothing for a bad item."""

    name: str

    def score(self, items: Sequence[ScoreItem]) -> list[Score]: ...


class Tool(Protocol):
    """Something an agent may call between two turns."""

    name: str

    async def call(self, arguments: Mapping[str, Any], *, timeout_seconds: float) -> str: ...
