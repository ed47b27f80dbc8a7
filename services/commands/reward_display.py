"""The output of `tandem reward`: scores, totals, tables, and the progress of jobs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Self

from rich.progress import BarColumn, Progress, TimeElapsedColumn

from tandem.protos.contracts import Score, Scored, Unscored
from tandem.protos.error_text import escaped
from tandem.services.clients.messages import Job
from tandem.services.command_line import console, print_error, print_line
from tandem.services.data.completions import CompletionFile

PLAIN_SECONDS = 10.0
"""Interval between lines of progress without a terminal."""
_MOST_FAULTS_TOLD = 20


def score_line(index: int, score: Score) -> str:
    """A result in one line: its index and either its reward with the breakdown or its reason."""
    if isinstance(score, Scored):
        parts = [f"{plain(name)}={number(value)}" for name, value in sorted(score.breakdown.items())]
        return "  ".join([str(index), number(score.value), *parts])
    return f"{index}  –  {score.reason}: {plain(score.detail)}"


def plain(text: str) -> str:
    """Untrusted text in one line, with control characters escaped."""
    return escaped(" ".join(text.split()))


def number(value: float) -> str:
    """An integer without decimals; any other number with six significant digits."""
    return f"{value:,.0f}" if abs(value) < 1e15 and value.is_integer() else f"{value:.6g}"


def counted(how_many: int, what: str) -> str:
    """`1 item`, `2,000 items`."""
    return f"{how_many:,} {what}" + ("" if how_many == 1 else "s")


def sum_line(num_scored: int, mean: float, num_unscored: Mapping[str, int], num_waiting: int = 0) -> str:
    """The number of scored items, their mean, and why the others have no score."""
    unscored = sum(num_unscored.values())
    parts = [f"{num_scored:,} scored" + (f" (mean {number(mean)})" if num_scored else "")]
    if unscored:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(num_unscored.items()))
        parts.append(f"{unscored:,} not scored ({reasons})")
    if num_waiting:
        parts.append(f"{num_waiting:,} waiting")
    return f"{counted(num_scored + unscored + num_waiting, 'item')}: {', '.join(parts)}"


def job_line(job: Job) -> str:
    items = sum_line(job.num_scored, job.mean_value, job.num_unscored, job.num_waiting)
    return f"job {job.job_id} {job.state}: {items}"


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns. The last column is not padded."""
    table = [head, *rows]
    widths = [max(len(row[n]) for row in table) for n in range(len(head) - 1)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] for row in table)
    return ["  ".join([*cells, row[-1]]) for cells, row in zip(padded, table, strict=True)]


class Faults:
    """Reports the rows of a file that cannot be scored: the first twenty singly, then their number."""

    def __init__(self, completions: CompletionFile) -> None:
        self._completions = completions
        self.number = 0

    def tell(self, index: int, fault: Unscored) -> None:
        """Reports file, row and field of a row that is not scored."""
        self.number += 1
        if self.number <= _MOST_FAULTS_TOLD:
            row = "" if fault.detail.startswith(f"row {index}:") else f"row {index}: "
            print_error(f"{self._completions.name} {row}{fault.detail}")

    def close(self) -> None:
        """Reports the remaining rows in one line, and rows without a ground truth."""
        completions = self._completions
        if self.number > _MOST_FAULTS_TOLD:
            print_error(f"{completions.name}: and {self.number - _MOST_FAULTS_TOLD:,} rows more that cannot be scored")
        if completions.num_without_truth:
            lack = f"{counted(completions.num_without_truth, 'row')} without reward_model.ground_truth"
            first = f"the first is row {completions.first_without_truth}"
            print_error(f"{completions.name}: {lack}, {first}; a scorer that needs it gives no score there")


class JobProgress:
    """Context manager that shows progress: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, doing: str) -> None:
        self._doing, self._console = doing, console()
        self._told_at = time.monotonic()
        parts = ("{task.description}", BarColumn(), "{task.fields[done]}", TimeElapsedColumn())
        self._bar = Progress(*parts, console=self._console, transient=True)
        self._task = self._bar.add_task(doing, total=None, done="")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def show(self, done: int, total: int | None, more: str = "") -> None:
        """Shows that `done` of `total` items are done. None: the total is unknown."""
        words = f"{done:,}/{total:,}" if total is not None else f"{done:,}"
        words = f"{words}  {more}" if more else words
        self._bar.update(self._task, completed=done, total=total, done=words)
        if not self._console.is_terminal and time.monotonic() - self._told_at >= PLAIN_SECONDS:
            self._told_at = time.monotonic()
            print_line(self._console, f"{self._doing} {words}")
