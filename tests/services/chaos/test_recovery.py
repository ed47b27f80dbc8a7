"""When a sampler counts as working again after a fault."""

from __future__ import annotations

import pytest

from tandem.services.buffer.types import Sampler
from tandem.services.chaos.recovery import Observation, works_again
from tandem.services.chaos.schedule import REDIS, Fault, Kind

SERVICES = ["feed", "rollout-0", "reward", "trainer"]


def seen(at: float, sampler: Sampler | None) -> Observation:
    samplers = {} if sampler is None else {sampler.id: sampler}
    return Observation(dict.fromkeys(SERVICES, at), samplers, trainer_version=9, published=9)


def sampler(generation: int) -> Sampler:
    return Sampler("rollout-0", "127.0.0.1:1", "LIVE", 9, 1, 1, alive=True, generation=generation)


@pytest.mark.parametrize(("kind", "target"), [("kill", "rollout-0"), ("redis-loss", REDIS)])
def test_a_sampler_that_redis_has_forgotten_does_not_work_yet(kind: Kind, target: str) -> None:
    fault, before = Fault(1, kind, target, 0.0, 1), seen(0.0, sampler(1))
    assert not works_again(fault, 10.0, before, seen(20.0, None), SERVICES, 8)
    assert works_again(fault, 10.0, before, seen(20.0, sampler(2)), SERVICES, 8)
