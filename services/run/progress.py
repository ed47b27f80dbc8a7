"""Live progress of a run: a table on a terminal; elsewhere, e.g. in a CI log, one line per step."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from tandem.protos.errors import TandemError, UnavailableError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.starvation import Observation, Verdict, diagnose
from tandem.services.command_line import cell, print_line
from tandem.services.config import Recipe
from tandem.services.process import Repeated
from tandem.services.run.json_files import EVALUATIONS_FILE, METRICS_FILE, JsonTail
from tandem.services.run.watchdog import STARVED_SECONDS, observe, said

SAMPLE_SECONDS = 1.0
PRINT_SECONDS = 0.5
STATUS_SECONDS = 10.0
"""Without a terminal, a status line is printed if no step has ended for this long."""
WINDOW_LINES = 20
"""Number of last batches over which rates are computed."""
_MOST_SET_ASIDE = 10  # prompts that a console lists
_SURELY_NEW_SECONDS = 2.0  # a heartbeat comes every second
HUNG_SECONDS = 30.0
_BAR_COLUMNS = 30  # fewer on a narrow terminal

States = Callable[[], Mapping[str, tuple[str, int, int]]]
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """The figures shown at one moment; None for those not measured yet."""

    step: int = 0
    total: int = 0
    reward: float | None = None
    accuracy: float | None = None
    accuracy_step: int = 0
    staleness_mean: float | None = None
    staleness_max: int | None = None
    sampler_tokens_per_second: float | None = None
    trainer_tokens_per_second: float | None = None
    sampler_idle: float | None = None
    trainer_idle: float | None = None
    waiting: Verdict = field(default_factory=Verdict)
    """What is starved now, or who waited for whom over the last batches."""
    seconds_left: float | None = None
    groups: Mapping[str, int] = field(default_factory=dict)
    hung: tuple[str, ...] = ()
    equal_rewards: float | None = None
    """The reward of all answers of the last batch, if they were equal and the gradient was therefore 0."""


def snapshot_of(
    lines: Sequence[Line], evaluation: Line | None, seen: Observation, total: int, hung: Sequence[str] = ()
) -> ProgressSnapshot:
    """A snapshot from the last lines of metrics.jsonl, the last evaluation and what Redis knows."""
    evaluated = {"accuracy": evaluation["accuracy"], "accuracy_step": evaluation["version"]} if evaluation else {}
    if not lines:
        waiting = diagnose(seen)
        return ProgressSnapshot(total=total, groups=seen.counts, hung=tuple(hung), waiting=waiting, **evaluated)
    last, first = lines[-1], lines[0]

    def summed(name: str) -> float:
        return sum(float(line[name]) for line in lines)

    def sampled(name: str) -> float:
        return float(last.get(name, 0.0)) - float(first.get(name, 0.0))

    seconds = summed("seconds_total")
    busy, idle = sampled("sampler_busy_seconds"), sampled("sampler_idle_seconds")
    later_seconds = seconds - float(first["seconds_total"])  # not wall time, which includes the pause before a resume
    trainer_idle, sampler_idle = _ratio(summed("trainer_idle_seconds"), seconds), _ratio(idle, busy + idle)
    return ProgressSnapshot(
        step=int(last["step"]),
        total=total,
        reward=summed("reward_mean") / len(lines),
        staleness_mean=summed("staleness_mean") / len(lines),
        staleness_max=max(int(line["staleness_max"]) for line in lines),
        sampler_tokens_per_second=_ratio(sampled("sampler_tokens"), later_seconds),
        trainer_tokens_per_second=_ratio(summed("num_tokens"), seconds),
        seconds_left=seconds / len(lines) * max(total - int(last["step"]), 0),
        sampler_idle=sampler_idle,
        trainer_idle=trainer_idle,
        waiting=diagnose(replace(seen, trainer_idle=trainer_idle, sampler_idle=sampler_idle)),
        groups=seen.counts,
        hung=tuple(hung),
        equal_rewards=_equal_rewards(last),
        **evaluated,
    )


def _equal_rewards(line: Line) -> float | None:
    """The reward shared by all answers of a batch if its gradient is 0 for that reason, else None."""
    no_gradient = line.get("grad_norm") == 0.0 and not line.get("skipped_steps")
    return line["reward_mean"] if no_gradient and line.get("equal_reward_groups") == line.get("num_groups") else None


class RunWatch(Repeated):
    """Reads metrics, evaluations and ledger in its own thread: a hanging Redis does not block the supervisor."""

    def __init__(self, recipe: Recipe, buffer: Buffer) -> None:
        super().__init__("watch", SAMPLE_SECONDS, self._look)
        self._buffer = buffer
        self._recipe = recipe
        self._total = recipe.run.total_batches
        self._metrics = JsonTail(recipe.folder / METRICS_FILE)
        self._evaluations = JsonTail(recipe.folder / EVALUATIONS_FILE)
        self._lines: deque[dict[str, Any]] = deque(maxlen=WINDOW_LINES)
        self._evaluation: dict[str, Any] | None = None
        self._seen = Observation()
        self._starved_threshold = STARVED_SECONDS
        self._steps: list[Line] = []
        self._printed_until = time.time()
        self._drop_errors: dict[str, str] = {}
        self._set_aside: dict[str, str] = {}
        self._reported: set[str] = set()
        self._lock = threading.Lock()
        self.snapshot = ProgressSnapshot(total=self._total)
        self.last_version = 0
        """The highest trained version so far."""
        self._own_progress: dict[str, tuple[int, int]] = {}
        """By name: groups completed over all lives, and those of the present one."""
        self._answered_at = time.monotonic()
        self.last_heartbeats: Mapping[str, float] = {}
        """Monotonic time of the last heartbeat of every service and sampler."""
        self.silences: Mapping[str, float] = {}
        """Seconds since these heartbeats when Redis last answered: those that an outage holds up do not count."""

    @property
    def redis_silence(self) -> float:
        """Seconds since Redis last answered."""
        return time.monotonic() - self._answered_at

    def progress_of(self, name: str) -> int:
        """The groups that a service has completed over all its lives; the last version where it counts none."""
        return self._own_progress[name][0] if name in self._own_progress else self.last_version

    def take_steps(self) -> list[Line]:
        """The lines written to metrics.jsonl since the last call."""
        with self._lock:
            steps, self._steps = self._steps, []
        return steps

    def take_warnings(self) -> list[str]:
        """New warnings: the first error of each reason for dropped groups, the first prompts that are set aside, who
        is starved, and a batch without a gradient.
        """
        found = {
            f"drop:{reason}": f"warning: a group was dropped ({reason}): {detail}"
            for reason, detail in list(self._drop_errors.items())
        }
        for group_id, why in list(self._set_aside.items())[:_MOST_SET_ASIDE]:
            words = f"warning: the prompt of group {group_id} failed in every attempt ({why})"
            found[f"set aside:{group_id}"] = f"{words}; no later epoch admits it, see `tandem ledger RUN --dropped`"
        reward = self.snapshot.equal_rewards
        if reward is not None:
            found["equal rewards"] = (
                f"warning: every answer in the groups of step {self.snapshot.step} has the same reward ({reward:g}), "
                "so there is no gradient; check the scorer, the difficulty of the prompts and rollout.temperature"
            )
        new = [name for name in found if name not in self._reported]
        self._reported.update(new)
        starved: list[str] = []
        if self.snapshot.step and (waiting := self.snapshot.waiting).cause != "redis_away":  # that is said elsewhere
            self._starved_threshold = said(waiting, self._starved_threshold, starved.append)
        return [found[name] for name in new] + [f"warning: {line}" for line in starved]

    def sample(self) -> ProgressSnapshot:
        """Reads new lines from the files and makes a snapshot. It does not block."""
        with self._lock:
            lines, fresh = self._metrics.read()
            if fresh:
                self._lines.clear()
            for line in lines:
                while self._lines and self._lines[-1]["step"] >= line["step"]:
                    self._lines.pop()
                self._lines.append(line)
                if line["time"] > self._printed_until:  # skips lines from before a resume and those of a rewound file
                    self._printed_until = line["time"]
                    self._steps.append(line)
            evaluations, _ = self._evaluations.read()
            for line in evaluations:
                if line["accuracy"] is not None:
                    self._evaluation = line
            now = time.monotonic()
            hung = sorted(name for name, beat in self.last_heartbeats.items() if now - beat > HUNG_SECONDS)
            seen = replace(self._seen, redis_silence=self.redis_silence)
            self.snapshot = snapshot_of(list(self._lines), self._evaluation, seen, self._total, hung)
            self.last_version = max(self.last_version, self.snapshot.step)
        return self.snapshot

    def ask_redis(self) -> None:
        """Fetches what Redis knows, and the errors of dropped groups."""
        try:
            self._seen = observe(self._buffer, self._recipe)
            if self._seen.counts.get("dropped"):
                self._drop_errors = self._buffer.drop_errors()
            if self._seen.counts.get("set_aside", 0) > len(self._set_aside) < _MOST_SET_ASIDE:
                self._set_aside |= self._buffer.set_aside()
        except TandemError as error:  # Redis is restarting or full; keep the previous figures
            if not isinstance(error, UnavailableError):
                self._answered_at = time.monotonic()
            return
        self._answered_at = now = time.monotonic()
        silences = self._seen.silences
        for name, of_service in self._seen.figures.items():
            if "groups_completed" in of_service:
                completed = int(of_service["groups_completed"])
                total, before = self._own_progress.get(name, (0, 0))
                grown = completed - before if completed >= before else completed  # of a new life
                self._own_progress[name] = (total + grown, completed)
        # Redis' clock stands still while Redis is away, so after an outage an old heartbeat would look like a new one.
        came = {
            name: now - silence
            for name, silence in silences.items()
            if name != "controller" and (silence < _SURELY_NEW_SECONDS or silence < self.silences.get(name, math.inf))
        }
        self.last_heartbeats = {**self.last_heartbeats, **came}
        self.silences = silences

    def _look(self) -> None:
        self.ask_redis()
        self.sample()


class Progress:
    """Context manager that shows progress: a table drawn twice a second on a terminal, elsewhere a line per step."""

    def __init__(self, watch: RunWatch, states: States, console: Console) -> None:
        self._watch = watch
        self._states = states
        self._console = console
        self._started_at = self._silent_since = time.monotonic()
        self._shown: Live | Repeated
        if console.is_terminal and not console.is_dumb_terminal:
            self._shown = Live(get_renderable=self._table, console=console, refresh_per_second=2, transient=False)
        else:
            self._shown = Repeated("progress", PRINT_SECONDS, self._print)

    def __enter__(self) -> Progress:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, leaving: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.sample()  # for the last batch
        self._shown.__exit__(kind, leaving, traceback)
        if isinstance(self._shown, Repeated):
            self._print_steps()
            self._print_status()

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._started_at

    def _table(self) -> Table:
        return table(self._watch.snapshot, self._states(), self._elapsed)

    def _print(self) -> None:
        if not self._print_steps():
            if time.monotonic() - self._silent_since < STATUS_SECONDS:
                return
            self._print_status()
        self._silent_since = time.monotonic()

    def _print_steps(self) -> bool:
        steps = self._watch.take_steps()
        for line in steps:
            print_line(self._console, step_line(line, self._watch.snapshot, self._elapsed))
        return bool(steps)

    def _print_status(self) -> None:
        print_line(self._console, plain_line(self._watch.snapshot, self._states(), self._elapsed))


def step_line(line: Line, snapshot: ProgressSnapshot, elapsed_seconds: float) -> str:
    """A trained batch in one line."""
    parts = [
        f"{_clock(elapsed_seconds)} step {line['step']}/{snapshot.total}",
        f"reward {line['reward_mean']:.3f}",
        f"from {line['reward_min']:.3g} to {line['reward_max']:.3g}",
        f"staleness {line['staleness_mean']:.2f}",
        f"{line['num_tokens']:,} tokens in {line['seconds_total']:.1f} s",
    ]
    if drops := drop_reasons(snapshot.groups):
        parts.append(f"dropped: {drops}")
    return " · ".join(parts)


def plain_line(snapshot: ProgressSnapshot, states: Mapping[str, tuple[str, int, int]], elapsed_seconds: float) -> str:
    """The snapshot in one line."""
    parts = [f"{_clock(elapsed_seconds)} step {snapshot.step}/{snapshot.total}"]
    parts += [value if name == "waiting" else f"{name} {value}" for name, value in _figures(snapshot) if value]
    return " · ".join([*parts, *_troubles(snapshot, states)])


def table(snapshot: ProgressSnapshot, states: Mapping[str, tuple[str, int, int]], elapsed_seconds: float) -> Table:
    """The snapshot as a small table."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    bar, count, elapsed = Table.grid(padding=(0, 1)), f"{snapshot.step}/{snapshot.total}", _clock(elapsed_seconds)
    bar.add_column(no_wrap=True)
    bar.add_column(max_width=_BAR_COLUMNS)
    bar.add_column(no_wrap=True)
    bar.add_row(count, ProgressBar(total=max(snapshot.total, 1), completed=snapshot.step), elapsed)
    grid.add_row("step", bar)
    for name, value in _figures(snapshot):
        grid.add_row(name, cell(value) if value else "[dim]–[/]")
    for trouble in _troubles(snapshot, states):
        grid.add_row("", f"[yellow]{cell(trouble)}[/]")
    return grid


def _figures(snapshot: ProgressSnapshot) -> list[tuple[str, str]]:
    def shown(form: str, value: float | None) -> str:
        return form.format(value) if value is not None else ""

    groups, left = snapshot.groups, snapshot.seconds_left
    stages = [
        f"{sum(groups.get(f'{stage}_{state}', 0) for state in ('waiting', 'leased', 'claimed'))} {stage}"
        for stage in ("prompts", "generated", "scored")
    ]
    return [
        ("reward", shown("{:.3f}", snapshot.reward)),
        ("accuracy", shown(f"{{:.3f}} (version {snapshot.accuracy_step})", snapshot.accuracy)),
        ("staleness", shown(f"mean {{:.2f}}, max {snapshot.staleness_max}", snapshot.staleness_mean)),
        ("sampler tokens/s", shown("{:,.0f}", snapshot.sampler_tokens_per_second)),
        ("trainer tokens/s", shown("{:,.0f}", snapshot.trainer_tokens_per_second)),
        ("waiting", snapshot.waiting.line),
        ("groups", ", ".join(stages) if groups else ""),
        ("dropped", drop_reasons(groups)),
        ("time left", _clock(left) if left is not None else ""),
    ]


def drop_reasons(counts: Mapping[str, int]) -> str:
    """`crashed 3, zero_variance 1` from the counts of a ledger, the most frequent reason first; "" without drops."""
    found = {name.removeprefix("dropped:"): number for name, number in counts.items() if name.startswith("dropped:")}
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {number}" for reason, number in ordered if number)


def _troubles(snapshot: ProgressSnapshot, states: Mapping[str, tuple[str, int, int]]) -> list[str]:
    """Services that are starting, restarting or not responding, and a batch without a gradient."""
    by_state: dict[str, list[str]] = {}
    for name, (state, _pid, restarts) in states.items():
        if state in ("restarting", "failed") or (state == "starting" and snapshot.step == 0):
            by_state.setdefault(state, []).append(f"{name} (restart {restarts})" if restarts else name)
    troubles = [f"{state}: {', '.join(names)}" for state, names in by_state.items()]
    silent = [name for name in snapshot.hung if name in states and states[name][0] == "running"]
    if silent:
        troubles.append(f"no heartbeat for {HUNG_SECONDS:.0f} s: {', '.join(silent)}")
    if snapshot.equal_rewards is not None:
        troubles.append(f"no gradient: every reward is {snapshot.equal_rewards:g}")
    return troubles


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
