"""A discrete-event simulation of a run's ring: credits, samplers, reward services, trainer, updates and pauses.

It is what `tandem plan` compares settings with. Samplers and the trainer share the groups that travel between them and,
on one machine, its processors: while they want more of them than there are, all of them work more slowly.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.services.planning.rates import GroupSize, Rates, Setting

HOP_SECONDS = 0.02
"""Assumed delay between two services: from the end of one's work on a group to the start of the next one's."""


@dataclass(frozen=True, slots=True)
class SimulatedBatch:
    """One batch, as the ring's line in metrics.jsonl would show it. Sampler figures are sums over all samplers."""

    seconds: float
    idle_seconds: float
    sampler_busy_seconds: float
    sampler_steps: float
    sampled_tokens: float
    staleness: float
    groups: tuple[int, ...] = ()
    """Numbers of the trained groups, in the order in which the feed admitted them."""
    unsampled: int = 0
    """Groups that wait for a sampler when the batch ends."""
    sampling: int = 0
    """Groups that samplers hold then."""
    unscored: int = 0
    """Groups that wait for a reward service then, or are held by one."""
    outstanding: int = 0
    """Groups that held a credit just before."""


@dataclass(slots=True)
class _Sampler:
    """Rows progress together: `steps` counts engine steps, and a row ends when `steps` reaches its end."""

    ends: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (step at which a row ends, its group)."""
    groups: int = 0
    steps: float = 0.0
    since: float = 0.0
    """Until this time `steps` is up to date; in the future while an update stalls the sampler."""
    event: int = 0
    """Number of its newest event in the calendar; earlier ones are void."""


@dataclass(slots=True)
class _Training:
    """The batch that is being trained: at full speed it takes `left` more seconds from `since` on."""

    left: float
    since: float
    ends: Callable[[], None]
    event: int = 0


class Ring:
    """One simulated run. The same seed and arguments give the same batches."""

    def __init__(self, setting: Setting, rates: Rates, groups: Sequence[GroupSize], seed: int = 0) -> None:
        self._setting = setting
        self._rates = rates
        self._groups = groups
        self._random = random.Random(seed)
        self._now = 0.0
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._events = self._admitted = self._rejected = self._outstanding = 0
        self._prompts: deque[int] = deque()
        self._samplers = [_Sampler() for _ in range(setting.samplers)]
        self._rows_left: dict[int, int] = {}
        self._version_of: dict[int, int] = {}
        self._unscored: deque[int] = deque()
        self._free_scorers = setting.scorers
        self._scored: deque[int] = deque()
        self._published_version = self._trained_version = 0
        self._waiting: tuple[tuple[int, ...], float, float] | None = None
        """The arguments of the next `_publish`, which waits until the version before is published."""
        self._trainer_busy = False
        self._training: _Training | None = None
        self._speed = 1.0
        self._idle_since = 0.0
        self._busy_seconds = self._steps = self._tokens = 0.0
        self._last = SimulatedBatch(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self.batches: list[SimulatedBatch] = []

    def run(self, num_batches: int) -> list[SimulatedBatch]:
        """Trains so many batches and returns them."""
        self._admit()
        while len(self.batches) < num_batches:
            self._now, _, action = heapq.heappop(self._calendar)
            action()
        return self.batches

    def _after(self, seconds: float, action: Callable[[], None]) -> int:
        self._events += 1
        heapq.heappush(self._calendar, (self._now + seconds, self._events, action))
        return self._events

    # ---- feed and samplers ----

    def _admit(self) -> None:
        most = self._setting.total_groups + self._rejected
        while self._outstanding < self._setting.credits and self._admitted < most:
            self._prompts.append(self._admitted)
            self._admitted += 1
            self._outstanding += 1
        self._claim_prompts()

    def _claim_prompts(self) -> None:
        """Samplers with room claim in a random order, each as many groups as it can hold, as the services do."""
        order = self._random.sample(self._samplers, len(self._samplers)) if self._prompts else []
        for sampler in order:
            room = self._setting.groups_in_flight - sampler.groups
            claimed = [self._prompts.popleft() for _ in range(min(room, len(self._prompts)))]
            if claimed:
                self._advance(sampler)
                for group in claimed:
                    lengths = self._size(group).answer_tokens
                    self._rows_left[group], self._version_of[group] = len(lengths), self._published_version
                    sampler.groups += 1
                    for length in lengths:
                        heapq.heappush(sampler.ends, (sampler.steps + length, group))
                self._schedule(sampler)
        self._share_processors()

    def _step_time(self, sampler: _Sampler) -> float:
        return max(1e-9, self._rates.step_seconds + self._rates.row_seconds * len(sampler.ends))

    def _advance(self, sampler: _Sampler) -> None:
        """Brings the sampler's steps up to now."""
        elapsed = self._now - sampler.since
        if elapsed <= 0.0:
            return
        if sampler.ends:
            steps = self._speed * elapsed / self._step_time(sampler)
            sampler.steps += steps
            self._busy_seconds += elapsed
            self._steps += steps
            self._tokens += steps * len(sampler.ends)
        sampler.since = self._now

    def _schedule(self, sampler: _Sampler) -> None:
        """Puts the end of the sampler's next row into the calendar."""
        if not sampler.ends:
            sampler.event = 0
            return
        left = max(0.0, sampler.ends[0][0] - sampler.steps) * self._step_time(sampler) / self._speed
        seconds = max(0.0, sampler.since - self._now) + left
        number = self._events + 1
        sampler.event = self._after(seconds, lambda: self._row_ends(sampler, number))

    def _row_ends(self, sampler: _Sampler, event: int) -> None:
        if event != sampler.event:
            return
        self._advance(sampler)
        sampler.steps = max(sampler.steps, sampler.ends[0][0])  # without rounding errors
        while sampler.ends and sampler.ends[0][0] <= sampler.steps:
            _, group = heapq.heappop(sampler.ends)
            self._rows_left[group] -= 1
            if not self._rows_left[group]:
                del self._rows_left[group]
                sampler.groups -= 1
                self._after(HOP_SECONDS, lambda group=group: self._generated(group))  # type: ignore[misc]
        self._schedule(sampler)
        self._claim_prompts()

    # ---- processors ----

    def _share_processors(self) -> None:
        """Slows everybody down, or lets them go on, when the processors that they want exceed those that there are."""
        sampling = sum(bool(sampler.ends) for sampler in self._samplers)
        wanted = sampling * self._rates.sampler_processors + bool(self._training) * self._rates.trainer_processors
        speed = min(1.0, self._setting.processors / wanted) if wanted else 1.0
        if speed == self._speed:
            return
        for sampler in self._samplers:
            self._advance(sampler)
        if self._training:
            self._training.left -= self._speed * (self._now - self._training.since)
            self._training.since = self._now
        self._speed = speed
        for sampler in self._samplers:
            self._schedule(sampler)
        self._schedule_training()

    def _schedule_training(self) -> None:
        training = self._training
        if training:
            number = self._events + 1
            seconds = max(0.0, training.left) / self._speed
            training.event = self._after(seconds, lambda: self._training_ends(training, number))

    def _training_ends(self, training: _Training, event: int) -> None:
        if event == training.event:
            self._training = None
            self._share_processors()
            training.ends()

    # ---- reward services ----

    def _generated(self, group: int) -> None:
        self._unscored.append(group)
        self._score()

    def _score(self) -> None:
        while self._free_scorers and self._unscored:
            group = self._unscored.popleft()
            self._free_scorers -= 1
            self._after(self._rates.score_seconds, lambda group=group: self._score_ends(group))  # type: ignore[misc]

    def _score_ends(self, group: int) -> None:
        self._free_scorers += 1
        self._score()
        self._after(HOP_SECONDS, lambda: self._is_scored(group))

    def _is_scored(self, group: int) -> None:
        if self._random.random() < self._rates.rejected_fraction:
            del self._version_of[group]
            self._rejected += 1
            self._outstanding -= 1
            self._after(HOP_SECONDS, self._admit)
            return
        self._scored.append(group)
        self._train()

    # ---- trainer ----

    def _train(self) -> None:
        if self._trainer_busy or len(self._scored) < self._setting.groups_per_batch:
            return
        self._trainer_busy = True
        batch = [self._scored.popleft() for _ in range(self._setting.groups_per_batch)]
        idle = self._now - self._idle_since
        staleness = sum(self._trained_version - self._version_of.pop(group) for group in batch) / len(batch)
        tokens = sum(self._size(group).trained_tokens for group in batch)
        seconds = self._rates.batch_seconds + self._rates.token_seconds * tokens + self._rates.publish_seconds
        if self._is_due(self._setting.evaluate_every):
            seconds += self._rates.evaluation_seconds
        self._training = _Training(seconds, self._now, lambda: self._publish(tuple(batch), idle, staleness))
        self._schedule_training()
        self._share_processors()

    def _publish(self, batch: tuple[int, ...], idle_seconds: float, staleness: float) -> None:
        """The batch is trained. Its version goes to the samplers once the one before is there."""
        if self._trained_version > self._published_version:
            self._waiting = batch, idle_seconds, staleness
            return
        self._trained_version += 1
        for sampler in self._samplers:
            self._advance(sampler)
        self._write_line(batch, idle_seconds, staleness)
        seconds = self._rates.publication_seconds
        self._after(seconds, lambda: self._is_published(len(batch)))
        outputs = self._rates.output_seconds if self._is_due(self._setting.output_every) else 0.0
        waits = outputs or self._is_due(self._setting.evaluate_every)  # what is due needs the published version
        self._after(outputs + seconds if waits else 0.0, self._is_free)

    def _is_published(self, num_groups: int) -> None:
        self._published_version += 1
        for sampler in self._samplers:
            self._advance(sampler)
            if sampler.ends and self._rates.stall_seconds:
                self._busy_seconds += self._rates.stall_seconds
                sampler.since = max(sampler.since, self._now) + self._rates.stall_seconds
                self._schedule(sampler)
        self._outstanding -= num_groups
        self._after(HOP_SECONDS, self._admit)
        waiting, self._waiting = self._waiting, None
        if waiting:
            self._publish(*waiting)

    def _is_due(self, every: int) -> bool:
        return bool(every and self._trained_version) and self._trained_version % every == 0

    def _is_free(self) -> None:
        self._trainer_busy = False
        self._idle_since = self._now
        self._train()

    def _write_line(self, groups: tuple[int, ...], idle_seconds: float, staleness: float) -> None:
        before = self._last
        self._last = SimulatedBatch(self._now, 0.0, self._busy_seconds, self._steps, self._tokens, 0.0)
        line = SimulatedBatch(
            *(self._now - before.seconds, idle_seconds, self._busy_seconds - before.sampler_busy_seconds),
            *(self._steps - before.sampler_steps, self._tokens - before.sampled_tokens, staleness),
            groups=groups,
            unsampled=len(self._prompts),
            sampling=sum(sampler.groups for sampler in self._samplers),
            unscored=len(self._unscored) + self._setting.scorers - self._free_scorers,
            outstanding=self._outstanding,
        )
        self.batches.append(line)

    def _size(self, group: int) -> GroupSize:
        return self._groups[group % len(self._groups)]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The steady state of a simulated ring."""

    steps_per_minute: float
    trainer_idle: float
    sampler_idle: float
    mean_staleness: float


def simulate(
    setting: Setting,
    rates: Rates,
    groups: Sequence[GroupSize],
    *,
    num_batches: int = 100,
    warm_up: int = 5,
    seed: int = 0,
) -> Prediction:
    """The figures of a ring after `warm_up` batches. Groups are used in the given order, again and again."""
    batches = Ring(setting, rates, groups, seed).run(warm_up + num_batches)[warm_up:]
    seconds = sum(batch.seconds for batch in batches)
    busy = sum(batch.sampler_busy_seconds for batch in batches)
    return Prediction(
        steps_per_minute=60.0 * len(batches) / seconds,
        trainer_idle=sum(batch.idle_seconds for batch in batches) / seconds,
        sampler_idle=max(0.0, 1.0 - busy / (seconds * setting.samplers)),
        mean_staleness=sum(batch.staleness for batch in batches) / len(batches),
    )
