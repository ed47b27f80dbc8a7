"""Samplers that end do not change how long the answers are that a run gets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from tests.support.timed_engine import CALM, EndingSamplers, Lengths, Scenario, critical_distance, distance

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

Runs = dict[str, tuple[EndingSamplers, Lengths]]

# Leases that do not expire on a busy machine: an answer would go on from an older save, as after a kill.
LEAVE = Scenario(end="leave", changes_weights=True, lease_seconds=60.0)
SCENARIOS = {
    "calm": CALM,
    "killed": Scenario(),
    "killed, unfinished answers dropped": Scenario(drops_unfinished=True),
    "left, other weights": LEAVE,
    "left, other weights, anew": replace(LEAVE, partial_rollout=False),
}


@pytest.fixture(scope="module")
def runs(redis_url: str) -> Iterator[Runs]:
    """All scenarios at the same time, because they wait rather than compute."""
    samplers = {name: EndingSamplers(redis_url, scenario) for name, scenario in SCENARIOS.items()}
    with ThreadPoolExecutor(len(samplers)) as threads:
        lengths = threads.map(lambda one: one.lengths(), samplers.values())
        yield dict(zip(samplers, zip(samplers.values(), lengths, strict=True), strict=True))


def test_lengths_of_answers_of_killed_samplers_are_those_of_a_calm_run(runs: Runs) -> None:
    _, calm = runs["calm"]
    killed, lengths = runs["killed"]
    assert killed.num_ended >= 3 and len(lengths) == len(calm)
    assert distance(lengths, calm) < critical_distance(lengths, calm)
    assert np.array_equal(lengths, calm), "with the same weights, every answer is the same"


def test_a_run_that_drops_unfinished_answers_gets_shorter_ones(runs: Runs) -> None:
    _, calm = runs["calm"]
    _, lengths = runs["killed, unfinished answers dropped"]
    assert len(lengths) < len(calm)
    assert distance(lengths, calm) > critical_distance(lengths, calm)


def test_answers_that_other_weights_continue_are_as_long_and_those_sampled_anew_are_shorter(runs: Runs) -> None:
    _, calm = runs["calm"]
    left, lengths = runs["left, other weights"]
    assert left.num_mixed > 50 and len(lengths) == len(calm)
    assert distance(lengths, calm) < critical_distance(lengths, calm)
    anew, shorter = runs["left, other weights, anew"]
    assert anew.num_mixed == 0 and len(shorter) == len(calm)
    assert distance(shorter, calm) > critical_distance(shorter, calm) and shorter.mean() < calm.mean()
