"""The autoscaler's policy: a pure function from what a run shows to how many replicas it should have, and why.

The trainer is the most expensive part of a run, so samplers are added while it waits for scored groups, and removed
while they wait for its credits. The number comes from measured seconds, not from the use of processors: a batch takes
the samplers `sampler_busy_seconds` together and the trainer `work_seconds`, so their ratio is the number of samplers
that keeps the trainer busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from tandem.services.config.recipe import AutoscaleConfig
from tandem.services.planning.observation import Batch, Queues

LEAST_BATCHES = 5
"""Batches without a pause that a decision needs, all trained with the present number of samplers."""
LEAST_QUEUES = 5
"""Observations of the queues that a decision needs."""
STALE_SECONDS = 30.0
"""Older observations of the queues decide nothing."""
HEADROOM = 1.1
"""Samplers are removed only down to this multiple of the number that keeps the trainer busy."""
LEAST_GAIN = 0.25
"""An addition of samplers is useful if batches become faster by this share of what was expected."""
LEAST_GROWTH = 1.25
"""So many times as many samplers are wanted if the trainer waits although their number should keep it busy."""
_IDLE_SCORERS, _BUSY_SCORERS = 0.3, 0.6  # reward services busier less than the one are removed down to the other


@dataclass(frozen=True, slots=True)
class Replicas:
    """Wanted numbers of samplers and reward services."""

    samplers: int
    scorers: int = 1


@dataclass(frozen=True, slots=True)
class Window:
    """The last batches and queues of a run, oldest first."""

    batches: Sequence[Batch]
    queues: Sequence[Queues]
    staleness_budget: int


@dataclass(frozen=True, slots=True)
class Trial:
    """An addition of samplers whose gain is not measured yet, or was too small."""

    samplers: int
    """Their number before."""
    batch_seconds: float
    """Seconds per batch before."""


@dataclass(frozen=True, slots=True)
class State:
    """What the policy remembers between two decisions."""

    replicas: Replicas | None = None
    changed_at: float = -math.inf
    trial: Trial | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The wanted number of replicas, and one sentence that says why. It may be the present number."""

    time: float
    service: Literal["rollout", "reward"]
    current: int
    wanted: int
    reason: str

    @property
    def is_change(self) -> bool:
        return self.wanted != self.current


@dataclass(frozen=True, slots=True)
class _Rates:
    """Means over the undisturbed batches of a window, and over its queues."""

    batch_seconds: float
    work_seconds: float
    sampler_seconds: float
    """Busy seconds of all samplers per batch."""
    trainer_idle: float
    sampler_idle: float
    scorer_busy: float
    """Seconds in which reward services held groups, per second."""
    staleness: float
    credits_out: float
    """Share of the observations in which no group waits for a sampler and no credit is free."""
    sampling: float
    """Groups that wait for samplers or are held by them."""
    unscored: float
    """Groups that wait for reward services or are held by them."""

    @property
    def load(self) -> float:
        """Samplers that keep the trainer busy."""
        return self.sampler_seconds / max(self.work_seconds, 1e-9)


def decide(
    options: AutoscaleConfig, state: State, current: Replicas, window: Window, now: float
) -> tuple[State, Decision]:
    """The next state, and the wanted number of one service's replicas. At most one service changes at a time.

    `current` is what was last ordered, by this policy or by anybody else. The caller carries the decision out, or not.
    """
    assert options.min_samplers <= options.max_samplers, "the autoscaler is off"
    if state.replicas != current:  # the first call, or somebody else has changed them
        state = State(current, -math.inf if state.replicas is None else now)
    left = state.changed_at + options.cooldown_seconds - now
    if left > 0:
        since = f"the last change was {now - state.changed_at:.0f} s ago, the next may come in {left:.0f} s"
        return state, _no_change(current, since, now)
    if clamped := _into_bounds(options, current, now):
        return _after(state, clamped), clamped
    window = _since_change(state, current, window)
    if missing := _missing(current, window, now):
        return state, _no_change(current, missing, now)
    rates = _rates(window)
    decision = _judge(options, state, current, rates, window.staleness_budget, now)
    if rates.trainer_idle <= options.trainer_idle:
        state = replace(state, trial=None)
    elif decision.is_change and decision.service == "rollout":
        state = replace(state, trial=Trial(current.samplers, rates.batch_seconds))
    return _after(state, decision), decision


def _after(state: State, decision: Decision) -> State:
    """The state once the decision is ordered."""
    assert state.replicas is not None
    if not decision.is_change:
        return state
    if decision.service == "rollout":
        ordered = replace(state.replicas, samplers=decision.wanted)
    else:
        ordered = replace(state.replicas, scorers=decision.wanted)
    return replace(state, replicas=ordered, changed_at=decision.time)


def _judge(
    options: AutoscaleConfig, state: State, current: Replicas, rates: _Rates, staleness_budget: int, now: float
) -> Decision:
    trainer = f"the trainer waits for scored groups {rates.trainer_idle:.0%} of its time"
    if rates.trainer_idle > options.trainer_idle:
        if rates.unscored > rates.sampling:
            return _scoring_limits(options, current, rates, trainer, now)
        if rates.sampler_idle > options.sampler_idle:
            return _no_change(
                current,
                f"{trainer} and samplers are idle {rates.sampler_idle:.0%} of theirs: both wait for each other at "
                f"run.staleness_budget = {staleness_budget}, and a larger budget would help, not more samplers",
                now,
            )
        return _more_samplers(options, state, current, rates, trainer, now)
    if rates.trainer_idle >= options.trainer_idle / 2:
        between = f"between {options.trainer_idle / 2:.0%} and {options.trainer_idle:.0%}"
        return _no_change(current, f"{trainer}, which is {between}", now)
    if current.scorers > 1 and rates.scorer_busy / current.scorers < _IDLE_SCORERS:
        wanted = max(math.ceil(current.scorers / 2), math.ceil(rates.scorer_busy / _BUSY_SCORERS), 1)
        if wanted < current.scorers:
            share = rates.scorer_busy / current.scorers
            return Decision(now, "reward", current.scorers, wanted, f"reward services are busy {share:.0%} of the time")
    return _fewer_samplers(options, current, rates, trainer, staleness_budget, now)


def _more_samplers(
    options: AutoscaleConfig, state: State, current: Replicas, rates: _Rates, trainer: str, now: float
) -> Decision:
    number = current.samplers
    busy = f"{trainer} while samplers ({number}) are busy {1 - rates.sampler_idle:.0%} of theirs"
    if number >= options.max_samplers:
        return _no_change(current, f"{busy}, but autoscale.max_samplers = {options.max_samplers}", now)
    if state.trial is not None and state.trial.samplers < number:
        gain = state.trial.batch_seconds / rates.batch_seconds - 1.0
        if gain < LEAST_GAIN * (number / state.trial.samplers - 1.0):
            faster = f"{number} samplers instead of {state.trial.samplers} changed the speed by {gain:+.0%}"
            return _no_change(current, f"{trainer}, but {faster}, so more of them would not help", now)
    enough = number * LEAST_GROWTH if rates.load <= number else rates.load  # the load leaves out the waits of S = 0
    wanted = min(max(number + 1, math.ceil(enough)), 2 * number, options.max_samplers)
    needs = (
        f"a batch takes the samplers {rates.sampler_seconds:.1f} s together and the trainer {rates.work_seconds:.1f} s"
    )
    return Decision(now, "rollout", number, wanted, f"{busy}; {needs}, so {rates.load:.1f} samplers keep it busy")


def _fewer_samplers(
    options: AutoscaleConfig, current: Replicas, rates: _Rates, trainer: str, staleness_budget: int, now: float
) -> Decision:
    number = current.samplers
    idle = f"samplers are idle {rates.sampler_idle:.0%} of theirs"
    staleness = f"mean staleness {rates.staleness:.1f} at run.staleness_budget = {staleness_budget}"
    if rates.sampler_idle <= options.sampler_idle:
        return _no_change(current, f"{trainer} and {idle} ({staleness})", now)
    if rates.credits_out < 0.5:
        taken = f"all credits are taken only {rates.credits_out:.0%} of the time, so the feed is slow or at its end"
        return _no_change(current, f"{idle}, but {taken}", now)
    needed = math.ceil(HEADROOM * rates.load)
    wanted = max(needed, math.ceil(number / 2), options.min_samplers)
    if wanted >= number:
        bound = "the fewest allowed" if needed < number else f"needed for a load of {rates.load:.1f}"
        return _no_change(current, f"{idle}, but {number} is {bound}", now)
    return Decision(
        *(now, "rollout", number, wanted),
        f"{idle} for want of credits while {trainer} ({staleness}); {rates.load:.1f} samplers keep it busy",
    )


def _scoring_limits(options: AutoscaleConfig, current: Replicas, rates: _Rates, trainer: str, now: float) -> Decision:
    number = current.scorers
    held = (
        f"{trainer} while {rates.unscored:.1f} groups wait for their scores and {rates.sampling:.1f} for their answers"
    )
    if number >= options.max_scorers:
        most = f"autoscale.max_scorers = {options.max_scorers}"
        return _no_change(current, f"{held}: scoring is too slow, more samplers would not help, and {most}", now)
    needed = math.ceil(number * rates.batch_seconds / max(rates.work_seconds, 1e-9))
    wanted = min(max(number + 1, needed), 2 * number, options.max_scorers)
    return Decision(now, "reward", number, wanted, f"{held}: scoring is too slow")


def _into_bounds(options: AutoscaleConfig, current: Replicas, now: float) -> Decision | None:
    """A decision for a number outside the bounds, which needs no measurement."""
    number = current.samplers
    if number > options.max_samplers:
        wanted = max(options.max_samplers, math.ceil(number / 2))
        return Decision(now, "rollout", number, wanted, f"autoscale.max_samplers = {options.max_samplers}")
    if number < options.min_samplers:
        wanted = min(options.min_samplers, max(1, 2 * number))
        return Decision(now, "rollout", number, wanted, f"autoscale.min_samplers = {options.min_samplers}")
    if current.scorers > options.max_scorers:
        wanted = max(options.max_scorers, math.ceil(current.scorers / 2))
        return Decision(now, "reward", current.scorers, wanted, f"autoscale.max_scorers = {options.max_scorers}")
    return None


def _since_change(state: State, current: Replicas, window: Window) -> Window:
    """The batches that were trained wholly after the last change with the present samplers, and the queues since."""
    batches = [
        batch
        for batch in window.batches
        if batch.samplers == current.samplers and batch.ended - batch.seconds >= state.changed_at
    ]
    queues = [queues for queues in window.queues if queues.time >= state.changed_at]
    return replace(window, batches=batches, queues=queues)


def _missing(current: Replicas, window: Window, now: float) -> str:
    """Why nothing can be decided yet, or ""."""
    queues = window.queues
    if len(queues) < LEAST_QUEUES:
        return f"{len(queues)} observations of the queues are too few, {LEAST_QUEUES} are needed"
    last = queues[-1]
    if now - last.time > STALE_SECONDS:
        return f"the last observation of the queues is {now - last.time:.0f} s old"
    if last.samplers != current.samplers:
        return f"{last.samplers} of {current.samplers} samplers are live"
    if last.scorers != current.scorers:
        return f"{last.scorers} of {current.scorers} reward services are alive"
    disturbed = sum(batch.disturbed for batch in window.batches)
    usable = len(window.batches) - disturbed
    if usable < LEAST_BATCHES:
        without = f" ({disturbed} with a pause for an evaluation or a checkpoint do not count)" if disturbed else ""
        return f"{usable} batches since the last change{without} are too few, {LEAST_BATCHES} are needed"
    return ""


def _rates(window: Window) -> _Rates:
    batches, queues = [batch for batch in window.batches if not batch.disturbed], window.queues
    work = sum(batch.work_seconds for batch in batches)
    idle = sum(batch.idle_seconds for batch in batches)
    seconds = sum(batch.seconds for batch in batches)
    sampler_busy = sum(batch.sampler_busy_seconds for batch in batches)
    sampler_idle = sum(batch.sampler_idle_seconds for batch in batches)
    return _Rates(
        batch_seconds=seconds / len(batches),
        work_seconds=work / len(batches),
        sampler_seconds=sampler_busy / len(batches),
        trainer_idle=idle / max(work + idle, 1e-9),
        sampler_idle=sampler_idle / max(sampler_busy + sampler_idle, 1e-9),
        scorer_busy=sum(batch.scorer_busy_seconds for batch in batches) / max(seconds, 1e-9),
        staleness=fmean(batch.staleness for batch in batches),
        credits_out=fmean(not one.unsampled and one.outstanding >= one.credits for one in queues),
        sampling=fmean(one.unsampled + one.sampling for one in queues),
        unscored=fmean(one.unscored for one in queues),
    )


def _no_change(current: Replicas, reason: str, now: float) -> Decision:
    number = current.samplers
    return Decision(now, "rollout", number, number, f"no change: {reason}")
