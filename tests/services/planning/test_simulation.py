"""Laws of the simulated ring: what must hold whatever the rates are, and cases that can be computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.services.planning.rates import GroupSize, Rates, Setting
from tandem.services.planning.simulation import HOP_SECONDS, Ring, simulate

GROUPS = [GroupSize(10, (100, 100)), GroupSize(10, (100, 100))]
RATES = Rates(step_seconds=0.1, row_seconds=0.0, batch_seconds=1.0, token_seconds=0.01)
# One batch of two groups: 100 steps of 0.1 s, three hops, and 1 s + 440 tokens · 0.01 s of training.
GENERATION, TRAINING = 10.0 + 3 * HOP_SECONDS, 5.4

rates = st.builds(
    Rates,
    step_seconds=st.floats(1e-3, 0.1),
    row_seconds=st.floats(0.0, 0.01),
    batch_seconds=st.floats(0.0, 5.0),
    token_seconds=st.floats(1e-5, 0.01),
    publish_seconds=st.floats(0.0, 1.0),
    publication_seconds=st.floats(0.0, 2.0),
    stall_seconds=st.floats(0.0, 0.5),
    score_seconds=st.floats(0.0, 1.0),
    evaluation_seconds=st.floats(0.0, 5.0),
    output_seconds=st.floats(0.0, 5.0),
    rejected_fraction=st.floats(0.0, 0.5),
    trainer_processors=st.floats(0.0, 2.0),
    sampler_processors=st.floats(0.0, 2.0),
)
ring_settings = st.builds(
    Setting,
    groups_per_batch=st.integers(1, 6),
    staleness_budget=st.integers(0, 3),
    samplers=st.integers(1, 3),
    groups_in_flight=st.integers(1, 8),
    scorers=st.integers(1, 3),
    evaluate_every=st.integers(0, 3),
    output_every=st.integers(0, 3),
    processors=st.sampled_from([math.inf, 1.0, 2.0]),
)
sizes = st.lists(
    st.builds(GroupSize, st.integers(1, 50), st.lists(st.integers(1, 100), min_size=1, max_size=4).map(tuple)),
    min_size=1,
    max_size=10,
)


def test_a_synchronous_ring_takes_generation_and_training_one_after_the_other() -> None:
    found = simulate(Setting(2, 0), RATES, GROUPS)
    assert found.steps_per_minute == pytest.approx(60.0 / (GENERATION + TRAINING))
    assert found.trainer_idle == pytest.approx(GENERATION / (GENERATION + TRAINING))
    assert found.sampler_idle == pytest.approx(1.0 - 10.0 / (GENERATION + TRAINING))
    assert found.mean_staleness == 0.0


def test_an_asynchronous_ring_takes_the_longer_of_the_two() -> None:
    one_batch_at_once = simulate(Setting(2, 1, groups_in_flight=2), RATES, GROUPS)
    assert one_batch_at_once.steps_per_minute == pytest.approx(60.0 / GENERATION, rel=0.01)
    two_at_once = simulate(Setting(2, 1), RATES, GROUPS)  # each is admitted when the one before last is published
    assert two_at_once.steps_per_minute == pytest.approx(2 * 60.0 / (GENERATION + TRAINING))
    slow_trainer = replace(RATES, batch_seconds=20.0)
    found = simulate(Setting(2, 2), slow_trainer, GROUPS)
    assert found.steps_per_minute == pytest.approx(60.0 / 24.4, rel=1e-6)
    assert (found.trainer_idle, found.mean_staleness) == pytest.approx((0.0, 2.0))


def test_a_publication_beside_training_delays_only_who_waits_for_it() -> None:
    slow_trainer = replace(RATES, batch_seconds=20.0)
    beside = replace(slow_trainer, publication_seconds=5.0)
    found, without = (simulate(Setting(2, 2), one, GROUPS) for one in (beside, slow_trainer))
    assert found.steps_per_minute == pytest.approx(without.steps_per_minute)
    assert (found.trainer_idle, found.mean_staleness) == (0.0, 2.0)
    synchronous = simulate(Setting(2, 0), beside, GROUPS).steps_per_minute
    assert synchronous == pytest.approx(60.0 / (GENERATION + 24.4 + 5.0)), "its credits return with the publication"
    slowest = replace(slow_trainer, publication_seconds=30.0)
    assert simulate(Setting(2, 4), slowest, GROUPS).steps_per_minute == pytest.approx(2.0, rel=0.01)


def test_rows_in_flight_share_a_step() -> None:
    shared = replace(RATES, step_seconds=0.0, row_seconds=0.05)  # four rows: 0.2 s a step
    batch = Ring(Setting(2, 0), shared, GROUPS).run(3)[-1]
    assert (batch.sampler_busy_seconds, batch.sampler_steps, batch.sampled_tokens) == pytest.approx(
        (20.0, 100.0, 400.0)
    )
    two_samplers = Ring(Setting(2, 0, samplers=2, groups_in_flight=1), shared, GROUPS).run(3)[-1]
    assert two_samplers.seconds == pytest.approx(batch.seconds - 10.0)


def test_processors_that_both_want_slow_both_down() -> None:
    wanted = replace(RATES, trainer_processors=1.0, sampler_processors=1.5)
    alone, shared = Setting(2, 0), Setting(2, 0, processors=2.0)
    assert simulate(shared, wanted, GROUPS) == simulate(alone, wanted, GROUPS), "they never work at once"
    overlapped = Setting(2, 2, groups_in_flight=2, processors=2.0)
    # The sampler never rests. While the trainer works, both have 2 of 2.5 processors: 80 % of their speed.
    slower = GENERATION + TRAINING / 0.8 * (1.0 - 0.8)
    found = simulate(overlapped, wanted, GROUPS)
    assert 60.0 / found.steps_per_minute == pytest.approx(slower, rel=0.01)
    two = Setting(2, 0, samplers=2, groups_in_flight=1, processors=1.5)
    rows = replace(wanted, step_seconds=0.0, row_seconds=0.05)
    one_sampler = simulate(replace(two, samplers=1, groups_in_flight=2), rows, GROUPS).steps_per_minute
    assert simulate(two, rows, GROUPS).steps_per_minute == pytest.approx(one_sampler, rel=0.01)


@pytest.mark.parametrize("rejected_fraction", [0.0, 0.5])
def test_a_run_that_ends_samples_the_groups_of_its_batches_and_no_more(rejected_fraction: float) -> None:
    slow = replace(RATES, token_seconds=1.0, rejected_fraction=rejected_fraction)
    endless = Ring(Setting(2, 2, groups_in_flight=2), slow, GROUPS).run(4)
    ending = Ring(Setting(2, 2, groups_in_flight=2, total_groups=8), slow, GROUPS).run(4)
    trained, others = ({number for batch in run for number in batch.groups} for run in (ending, endless))
    assert trained == others
    assert ending[-1].outstanding == 2 and (ending[-1].unsampled, ending[-1].sampling) == (0, 0)
    assert sum(batch.sampled_tokens for batch in ending) < sum(batch.sampled_tokens for batch in endless)


def test_a_long_answer_holds_its_sampler_and_a_stall_delays_it() -> None:
    uneven = [GroupSize(10, (50, 100))]
    assert Ring(Setting(1, 0), RATES, uneven).run(2)[1].sampler_steps == pytest.approx(100.0)
    running = Setting(1, 1, groups_in_flight=2)  # the second group is sampled while the first one is trained
    slow = replace(RATES, token_seconds=0.0)
    stalled = replace(slow, stall_seconds=3.0)
    assert simulate(running, stalled, uneven).steps_per_minute < simulate(running, slow, uneven).steps_per_minute


def test_scoring_evaluations_outputs_and_rejections_take_their_time() -> None:
    base = simulate(Setting(2, 0), RATES, GROUPS).steps_per_minute
    seconds = 60.0 / base
    scored = simulate(Setting(2, 0), replace(RATES, score_seconds=2.0), GROUPS)
    assert 60.0 / scored.steps_per_minute == pytest.approx(seconds + 4.0)
    two_scorers = simulate(Setting(2, 0, scorers=2), replace(RATES, score_seconds=2.0), GROUPS)
    assert 60.0 / two_scorers.steps_per_minute == pytest.approx(seconds + 2.0)
    paused = Setting(2, 0, evaluate_every=2, output_every=4)
    with_pauses = simulate(paused, replace(RATES, evaluation_seconds=3.0, output_seconds=30.0), GROUPS, num_batches=80)
    assert seconds + 1.5 < 60.0 / with_pauses.steps_per_minute < seconds + 1.5 + 7.5
    dropped = simulate(Setting(2, 0), replace(RATES, rejected_fraction=0.5), GROUPS)
    assert dropped.steps_per_minute < 0.8 * base


@settings(max_examples=60, deadline=None)
@given(ring_settings, rates, sizes, st.integers(0, 3))
def test_every_ring_goes_on_and_keeps_its_bounds(
    setting: Setting, rate: Rates, groups: list[GroupSize], seed: int
) -> None:
    found = simulate(setting, rate, groups, num_batches=20, seed=seed)
    assert found == simulate(setting, rate, groups, num_batches=20, seed=seed), "the same seed gives the same run"
    assert 0.0 <= found.trainer_idle <= 1.0 and 0.0 <= found.sampler_idle <= 1.0 + 1e-9
    assert found.steps_per_minute > 0.0
    # Admission bounds the mean age of what is trained, as the limiter does.
    assert found.mean_staleness <= setting.staleness_budget + setting.credits / (20 * setting.groups_per_batch)


@settings(max_examples=40, deadline=None)
@given(rates, sizes, st.integers(1, 5))
def test_a_larger_staleness_budget_is_not_slower(rate: Rates, groups: list[GroupSize], groups_per_batch: int) -> None:
    steady = replace(rate, rejected_fraction=0.0, row_seconds=0.0, stall_seconds=0.0)
    setting = Setting(groups_per_batch, 0, groups_in_flight=1000)
    speeds = [
        simulate(replace(setting, staleness_budget=budget), steady, groups, num_batches=60).steps_per_minute
        for budget in (0, 1, 3)
    ]
    assert speeds[1] >= 0.95 * speeds[0] and speeds[2] >= 0.95 * speeds[1]


@settings(max_examples=40, deadline=None)
@given(ring_settings, rates, sizes, st.floats(1.1, 3.0))
def test_a_faster_trainer_is_not_slower(setting: Setting, rate: Rates, groups: list[GroupSize], factor: float) -> None:
    fast = replace(rate, batch_seconds=rate.batch_seconds / factor, token_seconds=rate.token_seconds / factor)
    slow_run = simulate(replace(setting, staleness_budget=0), rate, groups[:1], num_batches=30)
    fast_run = simulate(replace(setting, staleness_budget=0), fast, groups[:1], num_batches=30)
    assert fast_run.steps_per_minute >= 0.99 * slow_run.steps_per_minute
