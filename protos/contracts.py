"""What is judged, and what comes of it: a score, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

# Here and not beside the other nouns: a scoring process has no use for their arrays, nor for numpy's threads.
UnscoredReason = Literal["timeout", "crashed", "infrastructure", "invalid_input", "limit"]


class ScoreItem(NamedTuple):
    """One answer to be judged, in the words of verl's `compute_score`. A tuple: a service makes some 100,000 of them a second."""

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = MappingProxyType({})
    group: str = ""
    """Items of one call with the same group are compared with one another by group-relative judges; empty: with none."""


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
