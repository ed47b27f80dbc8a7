"""The autoscaler's policy steers a simulated ring: the number of samplers comes to rest."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.services.config.recipe import AutoscaleConfig
from tandem.services.planning.autoscale import Decision, Replicas, State, Window, decide
from tandem.services.planning.observation import Batch, Queues
from tandem.services.planning.rates import GroupSize, Rates, Setting
from tandem.services.planning.simulation import Ring, simulate

OPTIONS = AutoscaleConfig(mode="on", max_samplers=12, cooldown_seconds=60.0)
DICE = random.Random(0)
GROUPS = [GroupSize(20, tuple(round(DICE.lognormvariate(4.0, 0.6)) for _ in range(8))) for _ in range(500)]
SETTING = Setting(groups_per_batch=8, staleness_budget=2, groups_in_flight=4)
RATES = Rates(step_seconds=0.02, row_seconds=0.0005, batch_seconds=0.2, token_seconds=0.0005)


def window(setting: Setting, rates: Rates, now: float, seed: int) -> Window:
    """The last batches of a ring whose latest batch ends now."""
    simulated = Ring(setting, rates, GROUPS, seed).run(20)[8:]
    ended = now - sum(batch.seconds for batch in simulated)
    batches, queues = [], []
    for step, batch in enumerate(simulated, 1):
        ended += batch.seconds
        busy = batch.sampler_busy_seconds
        idle = max(0.0, batch.seconds * setting.samplers - busy)
        batches.append(
            Batch(
                *(step, ended, batch.seconds, batch.idle_seconds, 0.0, False, setting.samplers),
                *(busy, idle, 8 * rates.score_seconds, batch.staleness),
            )
        )
        counts = (setting.credits, batch.outstanding, batch.unsampled, batch.sampling, batch.unscored)
        queues.append(Queues(ended, setting.samplers, 1, *counts))
    return Window(batches, queues, setting.staleness_budget)


def steer(setting: Setting, rates: Rates, *, rounds: int = 10) -> list[Decision]:
    state, now, found = State(), 0.0, []
    for seed in range(rounds):
        now += 10_000.0  # longer than the cool-down and the window
        seen = window(setting, rates, now, seed)
        state, decision = decide(OPTIONS, state, Replicas(setting.samplers), seen, now)
        found.append(decision)
        assert state.replicas is not None
        setting = replace(setting, samplers=state.replicas.samplers)
    return found


@pytest.mark.parametrize("samplers", [1, 12])
@pytest.mark.parametrize("token_seconds", [0.0002, 0.0005, 0.002])
def test_the_trainer_is_kept_busy_without_idle_samplers(samplers: int, token_seconds: float) -> None:
    rates = replace(RATES, token_seconds=token_seconds)
    decisions = steer(replace(SETTING, samplers=samplers), rates)
    assert not any(one.is_change for one in decisions[6:]), [one.reason for one in decisions if one.is_change]
    final = simulate(replace(SETTING, samplers=decisions[-1].wanted), rates, GROUPS)
    best = max(simulate(replace(SETTING, samplers=number), rates, GROUPS).steps_per_minute for number in range(1, 13))
    assert final.steps_per_minute >= 0.75 * best, decisions[-1].reason


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 12), st.integers(0, 3), st.floats(1e-4, 5e-3), st.floats(0.0, 2e-3), st.integers(1, 8))
def test_a_simulated_ring_comes_to_rest(
    samplers: int, budget: int, token_seconds: float, row_seconds: float, groups_in_flight: int
) -> None:
    setting = replace(SETTING, samplers=samplers, staleness_budget=budget, groups_in_flight=groups_in_flight)
    decisions = steer(setting, replace(RATES, token_seconds=token_seconds, row_seconds=row_seconds))
    changed = [one.wanted > one.current for one in decisions if one.is_change]
    turns = sum(before != after for before, after in pairwise(changed))
    assert turns <= 1 and not any(one.is_change for one in decisions[-3:]), [one.reason for one in decisions]
