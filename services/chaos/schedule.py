"""Which fault comes when: drawn from a seed, before the run starts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from tandem.services.config import Recipe

Kind = Literal["kill", "stop", "cut", "slow", "disk", "redis-loss"]
KINDS: tuple[Kind, ...] = get_args(Kind)

REDIS, DISK, SUPERVISOR = "redis", "disk", "supervisor"
"""What is hit besides the services: the run's own Redis, the disk of its folder, and `tandem run` itself."""

_BELOW_SHARE = 0.5
"""Fraction of the kills of samplers, environment services and trainer that hit a process below them, if they have one.
"""
_WITH_BELOW = ("rollout", "environments", "trainer")
_HIT_SHARE = 0.75
"""Fraction of the batches over which the faults come. The rest is for those that had to wait."""
_SECONDS: dict[Kind, tuple[float, float]] = {
    "kill": (0.0, 0.0),
    "stop": (5.0, 20.0),
    "cut": (1.0, 10.0),
    "slow": (5.0, 20.0),
    "disk": (3.0, 10.0),
    "redis-loss": (0.0, 0.0),
}
"""The shortest and the longest duration."""

Card = TypeVar("Card")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that is to come."""

    number: int
    """Counted from 1."""
    kind: Kind
    target: str
    """A service, e.g. `rollout-0`; `redis`, `disk` or `supervisor`."""
    seconds: float
    """How long it lasts; 0: it is over at once."""
    version: int
    """It does not come before this version is published."""
    below: bool = False
    """A kill hits the largest process that the service has started, e.g. its engine, if there is one."""


def services_of(recipe: Recipe) -> list[str]:
    """The services of a run on this machine."""
    samplers = (f"rollout-{number}" for number in range(recipe.rollout.num_replicas))
    environments = (f"environments-{number}" for number in range(recipe.environment.num_services))
    return ["feed", *samplers, *environments, "reward", "trainer"]


def schedule(recipe: Recipe, count: int, seed: int, kinds: Sequence[Kind], *, own_redis: bool) -> list[Fault]:
    """The faults of a run, evenly over most of its batches. Every kind comes equally often, and every target of a kind.

    `own_redis`: whether Redis itself may be killed and stopped.
    """
    dice = random.Random(seed)
    services = services_of(recipe)
    redis = [REDIS] if own_redis else []
    targets = {
        "kill": [*services, *redis, SUPERVISOR],
        "stop": [*services, *redis],
        "cut": services,
        "slow": services,
        "disk": [DISK],
        "redis-loss": [REDIS],
    }
    kinds_dealt = _dealt(kinds, dice)
    targets_dealt = {kind: _dealt(targets[kind], dice) for kind in kinds}
    last = max(1, int(_HIT_SHARE * recipe.run.total_batches))
    faults = []
    for index in range(count):
        kind = next(kinds_dealt)
        seconds = round(dice.uniform(*_SECONDS[kind]), 1)
        target = next(targets_dealt[kind])
        has_below = kind == "kill" and target.startswith(_WITH_BELOW)
        below = has_below and dice.random() < _BELOW_SHARE
        version = 1 + index * (last - 1) // max(1, count - 1)
        faults.append(Fault(index + 1, kind, target, seconds, version, below))
    return faults


def _dealt(cards: Sequence[Card], dice: random.Random) -> Iterator[Card]:
    """The cards in random order, again and again."""
    while True:
        yield from dice.sample(cards, len(cards))
