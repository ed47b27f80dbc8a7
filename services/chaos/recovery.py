"""Whether a service works again after a fault, by what Redis knows of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import Sampler
from tandem.services.chaos.schedule import DISK, REDIS, SUPERVISOR, Fault

_GRACE_SECONDS = 1.0
"""A report that a killed process sent through a slow connection may arrive so late. None starts in this time."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A run at one moment."""

    heartbeats: Mapping[str, float]
    """Monotonic time of each service's last heartbeat."""
    samplers: Mapping[str, Sampler]
    trainer_version: int
    """The version that the trainer's process has published itself; -1: none yet."""
    published: int
    """The version that Redis has as published."""


def observe(buffer: Buffer) -> Observation:
    now = time.monotonic()
    return Observation(
        {name: now - silence for name, silence in buffer.silences().items()},
        {sampler.id: sampler for sampler in buffer.samplers()},
        int(buffer.figures().get("trainer", {}).get("policy_version", -1)),
        buffer.published_version(),
    )


def works_again(
    fault: Fault, ended_at: float, before: Observation, now: Observation, services: Sequence[str], published: int
) -> bool:
    """Whether what the fault has hit works: it has sent a heartbeat since. `before` is how the run was when the fault
    began, with `published` as its highest version. A sampler also has the published weights, and the trainer has
    published all that was published before. Redis, disk and supervisor work once all services do and a further version
    is published.
    """
    since = ended_at + (_GRACE_SECONDS if fault.kind == "kill" else 0.0)
    if fault.target in (REDIS, DISK, SUPERVISOR):
        return now.published > published and all(_works(name, since, now, published) for name in services)
    killed = before.samplers.get(fault.target) if fault.kind == "kill" else None
    current = now.samplers.get(fault.target)
    if killed is not None and current is not None and current.generation == killed.generation:
        return False  # its engine is dead, and it does not know that yet
    return _works(fault.target, since, now, published)


def _works(service: str, since: float, now: Observation, published: int) -> bool:
    if now.heartbeats.get(service, -math.inf) < since:
        return False
    if service.startswith("rollout"):  # a Redis that has lost its last second may not know it
        sampler = now.samplers.get(service)
        return sampler is not None and sampler.alive and sampler.state == "LIVE"
    return service != "trainer" or now.trainer_version >= published
