"""The autoscaler's policy on made-up rings: its laws, and its decision and reason in each situation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.services.config.recipe import AutoscaleConfig
from tandem.services.planning.autoscale import LEAST_BATCHES, Decision, Replicas, State, Window, decide
from tandem.services.planning.observation import Batch, Queues

OPTIONS = AutoscaleConfig(mode="on", max_samplers=8)
CREDITS = 12


@dataclass(frozen=True)
class Ring:
    """A ring whose trainer works `work` seconds per batch, and whose samplers are busy `sampling` seconds together."""

    work: float = 1.0
    sampling: float = 1.0
    scoring: float = 0.0
    """Seconds of one reward service per batch."""
    latency: float = 0.0
    """Shortest time of a batch, however many samplers there are."""
    synchronous: bool = False
    feed_is_slow: bool = False

    def seconds(self, replicas: Replicas) -> float:
        generated = max(self.sampling / replicas.samplers, self.latency)
        others = max(generated, self.scoring / replicas.scorers)
        return self.work + others if self.synchronous else max(self.work, others)

    def window(self, replicas: Replicas, until: float, batches: int = 8) -> Window:
        seconds = self.seconds(replicas)
        busy = max(self.sampling, self.latency * replicas.samplers)
        batch = Batch(
            step=0,
            ended=0.0,
            seconds=seconds,
            idle_seconds=seconds - self.work,
            paused_seconds=0.0,
            evaluated=False,
            samplers=replicas.samplers,
            sampler_busy_seconds=busy,
            sampler_idle_seconds=max(0.0, replicas.samplers * seconds - busy),
            scorer_busy_seconds=self.scoring,
            staleness=0.0 if self.synchronous else 2.0,
        )
        scoring_limits = self.scoring / replicas.scorers > max(busy / replicas.samplers, self.work)
        samplers_limit = not scoring_limits and seconds > self.work and not self.feed_is_slow
        queues = Queues(
            time=0.0,
            samplers=replicas.samplers,
            scorers=replicas.scorers,
            credits=CREDITS,
            outstanding=CREDITS // 2 if self.feed_is_slow else CREDITS,
            unsampled=CREDITS // 2 if samplers_limit else 0,
            sampling=CREDITS // 4,
            unscored=CREDITS // 2 if scoring_limits else 0,
        )
        ends = [until - seconds * number for number in reversed(range(batches))]
        times = [until - number for number in reversed(range(10))]
        return Window(
            [replace(batch, step=step, ended=ended) for step, ended in enumerate(ends)],
            [replace(queues, time=time) for time in times],
            staleness_budget=0 if self.synchronous else 2,
        )


def decided(ring: Ring, samplers: int = 1, scorers: int = 1, options: AutoscaleConfig = OPTIONS) -> Decision:
    """The decision of a policy that sees the ring for the first time."""
    replicas = Replicas(samplers, scorers)
    return decide(options, State(), replicas, ring.window(replicas, 1000.0), 1000.0)[1]


def run_policy(ring: Ring, options: AutoscaleConfig, samplers: int, decisions: int = 40) -> list[Decision]:
    """The decisions while the ring obeys them."""
    state, replicas, now, found = State(), Replicas(samplers), 0.0, []
    for _ in range(decisions):
        now += options.cooldown_seconds + 10.0 * ring.seconds(replicas)
        state, decision = decide(options, state, replicas, ring.window(replicas, now), now)
        found.append(decision)
        replicas = state.replicas or replicas
    return found


seconds = st.floats(0.05, 100.0)
rings = st.builds(
    Ring,
    work=seconds,
    sampling=seconds,
    scoring=st.just(0.0) | seconds,
    latency=st.just(0.0) | seconds,
    synchronous=st.booleans(),
    feed_is_slow=st.booleans(),
)
option_sets = st.builds(
    lambda least, more, scorers, trainer, sampler: AutoscaleConfig(
        mode="on",
        min_samplers=least,
        max_samplers=least + more,
        max_scorers=scorers,
        trainer_idle=trainer,
        sampler_idle=sampler,
    ),
    *(st.integers(1, 8), st.integers(0, 32), st.integers(1, 4), st.floats(0.05, 0.9), st.floats(0.05, 0.9)),
)


@given(rings, option_sets, st.integers(1, 64), st.integers(1, 8))
def test_a_decision_is_within_the_bounds_and_at_most_a_factor_of_two(
    ring: Ring, options: AutoscaleConfig, samplers: int, scorers: int
) -> None:
    decision = decided(ring, samplers, scorers, options)
    assert decision.reason
    if not decision.is_change:
        return
    assert decision.current / 2 <= decision.wanted <= 2 * decision.current
    most = options.max_samplers if decision.service == "rollout" else options.max_scorers
    least = options.min_samplers if decision.service == "rollout" else 1
    assert min(least, decision.current) <= decision.wanted <= max(most, decision.current)
    if least <= decision.current <= most:
        assert least <= decision.wanted <= most


@given(rings, option_sets, st.integers(1, 64))
@example(Ring(2.0, 17.0, synchronous=True), OPTIONS.model_copy(update={"max_samplers": 26, "sampler_idle": 0.75}), 1)
def test_a_constant_ring_comes_to_rest(ring: Ring, options: AutoscaleConfig, samplers: int) -> None:
    decisions = run_policy(ring, options, samplers)
    assert not any(decision.is_change for decision in decisions[20:]), [d.reason for d in decisions if d.is_change]
    directions = {one.wanted > one.current for one in decisions if one.is_change and one.service == "rollout"}
    assert len(directions) <= 1, "the number of samplers went up and down"


@given(seconds, seconds, option_sets, st.integers(1, 64))
def test_enough_samplers_and_not_many_more_are_left(
    work: float, sampling: float, options: AutoscaleConfig, samplers: int
) -> None:
    ring = Ring(work=work, sampling=sampling)
    final = run_policy(ring, options, samplers)[-1].wanted
    idle = 1 - work / ring.seconds(Replicas(final))
    assert idle <= options.trainer_idle + 1e-6 or final == options.max_samplers
    unused = 1 - sampling / (final * ring.seconds(Replicas(final)))
    assert unused <= options.sampler_idle + 1e-6 or final <= max(ceil(1.1 * sampling / work), options.min_samplers)


@given(seconds, st.lists(seconds, min_size=2, max_size=2), st.integers(1, 64))
def test_slower_samplers_are_never_answered_with_fewer(work: float, sampling: list[float], samplers: int) -> None:
    options = AutoscaleConfig(mode="on", max_samplers=64)
    less, more = sorted(sampling)
    assert (
        decided(Ring(work, less), samplers, options=options).wanted
        <= decided(Ring(work, more), samplers, options=options).wanted
    )


@given(rings, st.integers(1, 8), st.floats(0.0, 119.9))
def test_the_cool_down_holds(ring: Ring, samplers: int, later: float) -> None:
    replicas = Replicas(samplers)
    state, first = decide(OPTIONS, State(), replicas, ring.window(replicas, 1000.0), 1000.0)
    if not first.is_change:
        return
    assert state.replicas is not None
    now = 1000.0 + later
    _, second = decide(OPTIONS, state, state.replicas, ring.window(state.replicas, now), now)
    assert not second.is_change and "last change" in second.reason


def test_samplers_are_added_by_the_measured_rates() -> None:
    decision = decided(Ring(work=2.0, sampling=5.0))
    assert (decision.service, decision.current, decision.wanted) == ("rollout", 1, 2)  # not 3: at most twice as many
    assert decided(Ring(work=2.0, sampling=5.5), samplers=2).wanted == 3
    assert decision.reason == (
        "the trainer waits for scored groups 60% of its time while samplers (1) are busy 100% of theirs; a batch takes "
        "the samplers 5.0 s together and the trainer 2.0 s, so 2.5 samplers keep it busy"
    )


def test_samplers_without_credits_are_removed() -> None:
    decision = decided(Ring(work=2.0, sampling=2.0), samplers=3)
    assert (decision.current, decision.wanted) == (3, 2)
    assert "samplers are idle 67% of theirs for want of credits" in decision.reason
    assert "mean staleness 2.0 at run.staleness_budget = 2" in decision.reason
    slow_feed = decided(Ring(work=2.0, sampling=2.0, feed_is_slow=True), samplers=3)
    assert not slow_feed.is_change and "the feed is slow or at its end" in slow_feed.reason


def test_slow_scoring_adds_no_samplers() -> None:
    slow = Ring(work=1.0, sampling=1.0, scoring=3.0)
    decision = decided(slow)
    assert not decision.is_change and "more samplers would not help" in decision.reason
    several = AutoscaleConfig(mode="on", max_samplers=8, max_scorers=4)
    decision = decided(slow, options=several)
    assert (decision.service, decision.wanted) == ("reward", 2) and "scoring is too slow" in decision.reason
    idle = decided(Ring(scoring=0.1), scorers=4, options=several)
    assert (idle.service, idle.wanted) == ("reward", 2) and "busy 2% of the time" in idle.reason


def test_a_synchronous_ring_is_told_to_raise_its_budget() -> None:
    decision = decided(Ring(synchronous=True))
    assert not decision.is_change and "run.staleness_budget = 0, and a larger budget would help" in decision.reason


def test_an_addition_that_did_not_help_is_the_last() -> None:
    changes = [one for one in run_policy(Ring(work=1.0, sampling=3.0, latency=3.0), OPTIONS, 1) if one.is_change]
    assert [one.wanted for one in changes] == [2]
    last = run_policy(Ring(work=1.0, sampling=3.0, latency=3.0), OPTIONS, 1)[-1]
    assert "2 samplers instead of 1 changed the speed by +0%" in last.reason


def disturbed(window: Window) -> Window:
    paused = [replace(batch, paused_seconds=0.5 * batch.seconds) for batch in window.batches]
    return replace(window, batches=paused)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: replace(w, batches=w.batches[-4:]), f"4 batches since the last change are too few, {LEAST_BATCHES}"),
        (lambda w: replace(w, queues=w.queues[-4:]), "4 observations of the queues are too few"),
        (lambda w: replace(w, queues=[replace(q, time=q.time - 31) for q in w.queues]), "is 31 s old"),
        (lambda w: replace(w, queues=[replace(q, samplers=0) for q in w.queues]), "0 of 1 samplers are live"),
        (lambda w: replace(w, queues=[replace(q, scorers=0) for q in w.queues]), "0 of 1 reward services are alive"),
        (lambda w: replace(w, batches=[replace(b, samplers=2) for b in w.batches]), "0 batches since"),
        (lambda w: replace(w, batches=[replace(b, evaluated=True) for b in w.batches]), "8 with a pause for an eval"),
        (disturbed, "8 with a pause for an evaluation or a checkpoint do not count"),
    ],
)
def test_too_little_old_or_disturbed_data_decides_nothing(change: Callable[[Window], Window], says: str) -> None:
    ring, replicas = Ring(work=10.0, sampling=50.0), Replicas(1)
    window = ring.window(replicas, 1000.0)
    assert decide(OPTIONS, State(), replicas, window, 1000.0)[1].is_change
    decision = decide(OPTIONS, State(), replicas, change(window), 1000.0)[1]
    assert not decision.is_change and says in decision.reason


def test_a_change_by_somebody_else_begins_a_cool_down() -> None:
    ring = Ring(sampling=5.0)
    state, _ = decide(OPTIONS, State(), Replicas(6), ring.window(Replicas(6), 1000.0), 1000.0)
    state, decision = decide(OPTIONS, state, Replicas(1), ring.window(Replicas(1), 1001.0), 1001.0)
    assert not decision.is_change and "the last change was 0 s ago, the next may come in 120 s" in decision.reason
    assert state.replicas == Replicas(1)


def test_a_number_outside_the_bounds_is_brought_into_them() -> None:
    options = AutoscaleConfig(mode="on", min_samplers=2, max_samplers=3, cooldown_seconds=0.0)
    assert decided(Ring(), 1, options=options).wanted == 2
    assert decided(Ring(), 10, options=options).wanted == 5
    assert decided(Ring(), 5, options=options).wanted == 3
    assert decided(Ring(), 2, scorers=3, options=options).wanted == 2


def test_a_pause_between_the_thresholds_changes_nothing() -> None:
    decision = decided(Ring(work=0.85, sampling=1.0))
    assert not decision.is_change and "15% of its time, which is between 10% and 20%" in decision.reason
