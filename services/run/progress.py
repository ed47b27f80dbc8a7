"""Live progress of a run: one picture, drawn as a table on a terminal and as a line every few seconds elsewhere (a CI
log).
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tandem.protos.errors import TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe

SAMPLE_SECONDS = 1.0
PLAIN_SECONDS = 10.0
WINDOW_LINES = 20
"""Rates are over the last so many batches: long enough to be calm, short enough to show a change."""
IDLE_FRACTION = 0.2
"""Past it a side counts as waiting."""
HUNG_SECONDS = 30.0

States = Callable[[], Mapping[str, tuple[str, int, int]]]
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """What is shown at one moment; None where nothing was measured yet."""

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
    seconds_left: float | None = None
    groups: Mapping[str, int] = field(default_factory=dict)
    hung: tuple[str, ...] = ()

    @property
    def waiting(self) -> str:
        """Who waits for whom."""
        trainer, sampler = self.trainer_idle or 0.0, self.sampler_idle or 0.0
        if self.trainer_idle is None and self.sampler_idle is None:
            return ""
        if trainer >= max(sampler, IDLE_FRACTION):
            return f"trainer waits for samplers ({trainer:.0%})"
        if sampler >= IDLE_FRACTION:
            return f"samplers wait for trainer ({sampler:.0%})"
        return "nobody waits long"


class JsonTail:
    """The new whole lines of a file of JSON objects; starts over when the file was replaced or cut (a rewound run)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The lines since the last call, and whether they start from the beginning again."""
        try:
            with open(self._path, "rb") as file:
                status = self._path.stat()
                fresh = status.st_ino != self._inode or status.st_size < self._offset
                if fresh:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return [], False
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()], fresh


def snapshot_of(
    lines: Sequence[Line], evaluation: Line | None, counts: Mapping[str, int], total: int, hung: Sequence[str] = ()
) -> ProgressSnapshot:
    """The picture that the last lines of metrics.jsonl, the last evaluation and the ledger's counts make."""
    evaluated = {"accuracy": evaluation["accuracy"], "accuracy_step": evaluation["version"]} if evaluation else {}
    if not lines:
        return ProgressSnapshot(total=total, groups=counts, hung=tuple(hung), **evaluated)
    last, first = lines[-1], lines[0]
    seconds = sum(float(line["seconds_total"]) for line in lines)
    busy, idle = (_difference(first, last, f"sampler_{kind}_seconds") for kind in ("busy", "idle"))
    per_step = seconds / len(lines)
    return ProgressSnapshot(
        step=int(last["step"]),
        total=total,
        reward=sum(float(line["reward_mean"]) for line in lines) / len(lines),
        staleness_mean=sum(float(line["staleness_mean"]) for line in lines) / len(lines),
        staleness_max=max(int(line["staleness_max"]) for line in lines),
        sampler_tokens_per_second=_ratio(
            _difference(first, last, "sampler_tokens"), float(last["time"]) - float(first["time"])
        ),
        trainer_tokens_per_second=_ratio(sum(float(line["num_tokens"]) for line in lines), seconds),
        sampler_idle=_ratio(idle, busy + idle),
        trainer_idle=_ratio(sum(float(line["trainer_idle_seconds"]) for line in lines), seconds),
        seconds_left=per_step * max(total - int(last["step"]), 0),
        groups=counts,
        hung=tuple(hung),
        **evaluated,
    )


class RunWatch:
    """Reads what a run writes, in a thread of its own: a Redis that hangs must not hang the supervisor."""

    def __init__(self, recipe: Recipe, buffer: Buffer) -> None:
        self._buffer = buffer
        self._total = recipe.run.total_batches
        self._metrics = JsonTail(recipe.folder / "metrics.jsonl")
        self._evaluations = JsonTail(recipe.folder / "evaluations.jsonl")
        self._lines: deque[dict[str, Any]] = deque(maxlen=WINDOW_LINES)
        self._evaluation: dict[str, Any] | None = None
        self._counts: Mapping[str, int] = {}
        self._mark = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.picture = ProgressSnapshot(total=self._total)
        self.last_beats: Mapping[str, float] = {}
        """Monotonic time of the last sign of life of every service and sampler."""

    def __enter__(self) -> RunWatch:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)

    def progress_mark(self) -> int:
        """The last trained version: grows while the run gets on."""
        return self._mark

    def sample(self) -> ProgressSnapshot:
        """Reads what is new in the files and draws a new picture; asks nobody, so it never waits."""
        with self._lock:
            lines, fresh = self._metrics.read()
            if fresh:
                self._lines.clear()
            for line in lines:
                while self._lines and self._lines[-1]["step"] >= line["step"]:
                    self._lines.pop()
                self._lines.append(line)
            evaluations, _ = self._evaluations.read()
            if evaluations:
                self._evaluation = evaluations[-1]
            now = time.monotonic()
            hung = sorted(name for name, beat in self.last_beats.items() if now - beat > HUNG_SECONDS)
            self.picture = snapshot_of(list(self._lines), self._evaluation, self._counts, self._total, hung)
            self._mark = max(self._mark, self.picture.step)
        return self.picture

    def ask_redis(self) -> None:
        """Fetches the counts of the ledger and the last signs of life."""
        try:
            self._counts, silences = self._buffer.counts(), self._buffer.silences()
        except TandemError:  # Redis is being restarted: the figures of before stay
            return
        now = time.monotonic()
        self.last_beats = {name: now - silence for name, silence in silences.items() if name != "controller"}

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.ask_redis()
            self.sample()


class Progress:
    """Draws the picture while it is open: twice a second on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, watch: RunWatch, states: States, console: Console) -> None:
        self._watch = watch
        self._states = states
        self._console = console
        self._started_at = time.monotonic()
        self._stop = threading.Event()
        self._live: Live | None = None
        self._printer: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=2, transient=False)
            self._live.start()
        else:
            self._printer = threading.Thread(target=self._print, name="progress", daemon=True)
            self._printer.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._watch.sample()  # the last batch belongs into the last picture
        if self._live is not None:
            self._live.stop()
        if self._printer is not None:
            self._printer.join(timeout=2.0)
            self._print_line()

    def _table(self) -> Table:
        return table(self._watch.picture, self._states(), time.monotonic() - self._started_at)

    def _print(self) -> None:
        while not self._stop.wait(PLAIN_SECONDS):
            self._print_line()

    def _print_line(self) -> None:
        line = plain_line(self._watch.picture, self._states(), time.monotonic() - self._started_at)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def plain_line(picture: ProgressSnapshot, states: Mapping[str, tuple[str, int, int]], elapsed_seconds: float) -> str:
    """The picture on one line."""
    parts = [f"{_clock(elapsed_seconds)} step {picture.step}/{picture.total}"]
    parts += [value if name == "waiting" else f"{name} {value}" for name, value in _figures(picture) if value]
    return " · ".join([*parts, *_troubles(picture, states)])


def table(picture: ProgressSnapshot, states: Mapping[str, tuple[str, int, int]], elapsed_seconds: float) -> Table:
    """The picture as a small table."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    filled = round(30 * picture.step / picture.total) if picture.total else 0
    grid.add_row(
        "step",
        f"{picture.step}/{picture.total} [green]{'━' * filled}[/][dim]{'━' * (30 - filled)}[/] "
        f"{_clock(elapsed_seconds)}",
    )
    for name, value in _figures(picture):
        grid.add_row(name, value or "[dim]–[/]")
    for trouble in _troubles(picture, states):
        grid.add_row("", f"[yellow]{trouble}[/]")
    return grid


def _figures(picture: ProgressSnapshot) -> list[tuple[str, str]]:
    groups = picture.groups
    stages = [
        (stage, sum(groups.get(f"{stage}_{state}", 0) for state in ("waiting", "leased", "claimed")))
        for stage in ("prompts", "generated", "scored")
    ]
    return [
        ("reward", _number(picture.reward, "{:.3f}")),
        (
            "accuracy",
            f"{picture.accuracy:.3f} (version {picture.accuracy_step})" if picture.accuracy is not None else "",
        ),
        (
            "staleness",
            f"mean {picture.staleness_mean:.2f}, max {picture.staleness_max}"
            if picture.staleness_mean is not None
            else "",
        ),
        ("sampler tokens/s", _number(picture.sampler_tokens_per_second, "{:,.0f}")),
        ("trainer tokens/s", _number(picture.trainer_tokens_per_second, "{:,.0f}")),
        ("waiting", picture.waiting),
        ("groups", ", ".join(f"{count} {stage}" for stage, count in stages) if groups else ""),
        ("time left", _clock(picture.seconds_left) if picture.seconds_left is not None else ""),
    ]


def _troubles(picture: ProgressSnapshot, states: Mapping[str, tuple[str, int, int]]) -> list[str]:
    """What is not as it should be: services that start, restart or have fallen silent."""
    by_state: dict[str, list[str]] = {}
    for name, (state, _pid, restarts) in states.items():
        if state in ("restarting", "failed") or (state == "starting" and picture.step == 0):
            by_state.setdefault(state, []).append(f"{name} (restart {restarts})" if restarts else name)
    troubles = [f"{state}: {', '.join(names)}" for state, names in by_state.items()]
    silent = [name for name in picture.hung if name in states and states[name][0] == "running"]
    if silent:
        troubles.append(f"no sign of life for {HUNG_SECONDS:.0f} s: {', '.join(silent)}")
    return troubles


def _number(value: float | None, form: str) -> str:
    return form.format(value) if value is not None else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _difference(first: Line, last: Line, key: str) -> float:
    return float(last.get(key, 0.0)) - float(first.get(key, 0.0))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
