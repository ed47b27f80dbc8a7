"""What the autoscaler sees of a run: its last batches, and where its groups are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tandem.services.buffer.types import ALIVE_SECONDS, Sampler
from tandem.services.config import Recipe

_PAUSED_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Batch:
    """Where the time of one trained batch went. The seconds of samplers and scorers are sums over all of them."""

    step: int
    ended: float
    """Time in seconds since 1970."""
    seconds: float
    """From the end of the batch before."""
    idle_seconds: float
    """The trainer waited for scored groups."""
    paused_seconds: float
    """The trainer waited for an evaluation, or wrote a checkpoint or an export."""
    evaluated: bool
    """The samplers also answered an evaluation meanwhile."""
    samplers: int
    """Samplers that received the batch's version."""
    sampler_busy_seconds: float
    sampler_idle_seconds: float
    scorer_busy_seconds: float
    staleness: float
    trainer_cpu_seconds: float = 0.0
    """CPU time of rank 0."""
    serving_cpu_seconds: float = 0.0
    """CPU time of samplers and reward services."""

    @property
    def work_seconds(self) -> float:
        """The trainer trained and published."""
        return max(0.0, self.seconds - self.idle_seconds - self.paused_seconds)

    @property
    def disturbed(self) -> bool:
        """Whether a pause explains that somebody was idle."""
        return self.evaluated or self.paused_seconds > _PAUSED_FRACTION * self.seconds


@dataclass(frozen=True, slots=True)
class Queues:
    """Where the groups of a run are at one moment, and how many replicas work on them."""

    time: float
    samplers: int
    """Samplers that are LIVE at the published version."""
    scorers: int
    credits: int
    """(S + 1)·P."""
    outstanding: int
    unsampled: int
    """Groups that wait for a sampler."""
    sampling: int
    """Groups that samplers hold."""
    unscored: int
    """Groups that wait for a reward service, or are held by one."""


def batches_of(lines: Sequence[Mapping[str, object]], recipe: Recipe) -> list[Batch]:
    """The batches of consecutive lines of metrics.jsonl, without the first line and without retrained batches."""
    return [
        _batch(before, line, recipe.trainer.evaluate_every)
        for before, line in pairwise(lines)
        if not before.get("replayed") and not line.get("replayed")
    ]


def queues_of(
    now: float,
    recipe: Recipe,
    *,
    counts: Mapping[str, int],
    samplers: Iterable[Sampler],
    silences: Mapping[str, float],
) -> Queues:
    """The queues from what the buffer tells: `counts()`, `samplers()` and `silences()`."""
    scorers = [name for name, seconds in silences.items() if name.startswith("reward") and seconds <= ALIVE_SECONDS]
    return Queues(
        time=now,
        samplers=sum(sampler.alive and sampler.state == "LIVE" for sampler in samplers),
        scorers=len(scorers),
        credits=recipe.credits,
        outstanding=counts["outstanding"],
        unsampled=counts["prompts_waiting"],
        sampling=counts["prompts_leased"],
        unscored=counts["generated_waiting"] + counts["generated_leased"],
    )


def _batch(before: Mapping[str, object], line: Mapping[str, object], evaluate_every: int) -> Batch:
    def figure(name: str) -> float:
        value = line.get(name, 0.0)
        return float(value) if isinstance(value, int | float) else 0.0

    def grown(name: str) -> float:
        then = before.get(name, 0.0)
        return max(0.0, figure(name) - (float(then) if isinstance(then, int | float) else 0.0))

    seconds, step = figure("seconds_total"), int(figure("step"))
    phases = sum(figure(name) for name in line if name.startswith("seconds_") and name != "seconds_total")
    outputs = max(0.0, seconds - phases)  # what is in no phase: checkpoint and export of the batch before
    return Batch(
        step=step,
        ended=figure("time"),
        seconds=seconds,
        idle_seconds=figure("trainer_idle_seconds"),
        paused_seconds=outputs + figure("seconds_evaluate"),
        evaluated=evaluate_every > 1 and (step - 1) % evaluate_every == 0,
        samplers=int(figure("samplers_acknowledged")),
        sampler_busy_seconds=grown("sampler_busy_seconds"),
        sampler_idle_seconds=grown("sampler_idle_seconds"),
        scorer_busy_seconds=grown("scorer_busy_seconds"),
        trainer_cpu_seconds=grown("trainer_cpu_seconds"),
        serving_cpu_seconds=grown("sampler_cpu_seconds") + grown("scorer_cpu_seconds"),
        staleness=figure("staleness_mean"),
    )
