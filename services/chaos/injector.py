"""Brings the faults of a schedule over a run, and checks meanwhile that nothing is lost.

A fault comes once its version is published and what it hits works. Faults of different services, and of Redis, overlap.
Those of the disk and the supervisor, which may end the run, wait until everything works, and the next fault waits for
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.protos.errors import TandemError, UnavailableError
from tandem.services.buffer.buffer import Buffer
from tandem.services.chaos.checks import check_finished, check_running
from tandem.services.chaos.faults import EFFECTS, Effect, Run
from tandem.services.chaos.recovery import Observation, observe, works_again
from tandem.services.chaos.schedule import DISK, REDIS, SUPERVISOR, Fault, services_of
from tandem.services.config import Recipe
from tandem.services.launchers.children import describe_exit

CHECK_SECONDS = 5.0
RECOVERY_SECONDS = 300.0
"""What does not work again after this time has failed."""
STALL_SECONDS = 900.0
"""A run that publishes nothing for this time has failed. Engines of large models take minutes to start."""
LAST_LINES = 20
"""What is read and shown of the lines that a run has printed when it ends."""
_POLL_SECONDS = 0.2
_ALONE = (DISK, SUPERVISOR)


@dataclass(slots=True, eq=False)
class Made:
    """A fault that has come."""

    effect: Effect
    before: Observation
    published: int
    """The highest version that was published when it came."""
    began_at: float
    """Seconds since the start of the run."""
    ended_at: float | None = None
    """Monotonic time of its end, or of the start of the resumed run."""
    recovery_seconds: float | None = None
    """From its end until what it hit worked again; None: the run ended first."""
    exit_code: int | None = None
    """Of the run that it has ended and that was resumed; None: the run went on."""
    resumed_at_version: int = -1
    """The highest version that was published when the run was resumed."""

    @property
    def fault(self) -> Fault:
        return self.effect.fault

    @property
    def resumed(self) -> bool:
        return self.exit_code is not None


@dataclass(slots=True)
class Result:
    """What has come of a run under faults."""

    exit_code: int | None = None
    """Of the run; None: it was stopped, because something was wrong or the user interrupted it."""
    interrupted: bool = False
    made: list[Made] = field(default_factory=list)
    num_checks: int = 0
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    groups: dict[str, int] = field(default_factory=dict)
    """The ledger's counts at the end."""


class Injector:
    """`report` prints a line for each fault that is over and each violation. `buffer` reaches Redis without a proxy."""

    def __init__(
        self, faults: Sequence[Fault], run: Run, buffer: Buffer, recipe: Recipe, report: Callable[[str], None]
    ) -> None:
        self._coming = list(faults)
        self._count = len(faults)
        self._run = run
        self._buffer = buffer
        self._recipe = recipe
        self._services = services_of(recipe)
        self._folder: Path = recipe.folder
        self._report = report
        self._open: list[Made] = []
        self._started_at = self._progress_at = self._checked_at = time.monotonic()
        self._published = -1
        self.result = Result()

    def run(self, interrupted: Callable[[], bool] = lambda: False) -> Result:
        """Returns when the run has ended, does not recover, or `interrupted` says so."""
        try:
            self._follow(interrupted)
            if self._run.redis is not None:
                self._run.redis.restart_if_dead()
            if self.result.exit_code == 0:
                for made in self.result.made:
                    self.result.violations += _left_behind(made, self._count)
                self._add(check_finished(self._buffer, self._folder, self._recipe.run.groups_per_batch))
            self.result.groups = dict(self._buffer.counts())
        except TandemError as error:  # e.g. Redis does not start again
            self.result.violations.append(f"{type(error).__name__}: {error}")
        self.result.seconds = time.monotonic() - self._started_at
        return self.result

    def _follow(self, interrupted: Callable[[], bool]) -> None:
        try:
            while self.result.exit_code is None and not self.result.violations:
                if interrupted():
                    self.result.interrupted = True
                    return
                self._step()
                time.sleep(_POLL_SECONDS)
        finally:
            for made in self._open:
                if made.ended_at is None:
                    made.effect.end()

    def _step(self) -> None:
        self._end_faults()
        if not any(made.ended_at is None and made.fault.target in (REDIS, DISK) for made in self._open):
            self._look()
        self._check_deadlines()
        self._check_supervisor()

    def _look(self) -> None:
        """Sees how the run is, and begins the next fault if it is due."""
        if self._run.redis is not None:
            self._run.redis.restart_if_dead()
            self._run.redis.note_size()
        try:
            seen = observe(self._buffer)
            self._check()
        except UnavailableError:  # an external Redis, whose outages are none of our faults: look again later
            return
        if seen.published > self._published:
            self._published, self._progress_at = seen.published, time.monotonic()
        self._note_recoveries(seen)
        self._begin_fault(seen)

    def _begin_fault(self, seen: Observation) -> None:
        if not self._coming or self._published < self._coming[0].version:
            return
        fault, hit = self._coming[0], {made.fault.target for made in self._open}
        if fault.target in hit or hit.intersection(_ALONE) or (hit and fault.target in _ALONE):
            return
        if fault.target in self._services and not self._run.supervisor.processes_of(fault.target):
            return  # it has died by itself; its supervisor restarts it
        effect = EFFECTS[fault.kind](self._coming.pop(0), self._run)
        made = Made(effect, seen, self._published, time.monotonic() - self._started_at)
        self.result.made.append(made)
        self._open.append(made)
        effect.begin()

    def _end_faults(self) -> None:
        for made in self._open:
            over_at = self._started_at + made.began_at + made.fault.seconds
            if made.ended_at is None and time.monotonic() >= over_at:
                made.effect.end()
                made.ended_at = time.monotonic()

    def _note_recoveries(self, seen: Observation) -> None:
        for made in list(self._open):
            if made.ended_at is None:
                continue
            published = max(made.published, made.resumed_at_version)
            if works_again(made.fault, made.ended_at, made.before, seen, self._services, published):
                made.recovery_seconds = time.monotonic() - made.ended_at
                self._open.remove(made)
                self.result.violations += _left_behind(made, self._count)
                self._progress_at = time.monotonic()
                self._report(described(made, self._count))

    def _check(self) -> None:
        if time.monotonic() >= self._checked_at + CHECK_SECONDS and self._published >= 0:
            self._add(check_running(self._buffer, self._folder, self._recipe.run.groups_per_batch))
            self._checked_at = time.monotonic()

    def _add(self, violations: Sequence[str]) -> None:
        self.result.num_checks += 1
        self.result.violations += violations

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for made in self._open:
            if made.ended_at is not None and now > made.ended_at + RECOVERY_SECONDS:
                late = f"it does not work again after {RECOVERY_SECONDS:.0f} s"
                self.result.violations.append(f"{_name(made, self._count)}: {late}")
        if not self._open and now > self._progress_at + STALL_SECONDS:
            self.result.violations.append(f"the run has published no version for {STALL_SECONDS:.0f} s")

    def _check_supervisor(self) -> None:
        """Resumes a run that a fault has ended, once that fault is over."""
        code = self._run.supervisor.exit_code()
        if code is None:
            return
        cause = self._cause_of_end(code) if code else None
        if cause is None:
            self.result.exit_code = code
        elif cause.ended_at is not None:
            cause.exit_code, cause.recovery_seconds = code, None
            cause.ended_at, cause.resumed_at_version = time.monotonic(), self._published
            if cause not in self._open:
                self._open.append(cause)
            self._run.supervisor.resume()

    def _cause_of_end(self, code: int) -> Made | None:
        """The fault that can have ended the run so. The trainer may find later that it could not write on a full disk,
        but a fault ends a run once.
        """
        said = self._run.supervisor.last_lines(LAST_LINES)
        for made in reversed(self.result.made):
            is_old = made.ended_at is not None and time.monotonic() > made.ended_at + RECOVERY_SECONDS
            if not made.resumed and not is_old and made.effect.may_end_run(code, said):
                return made
        return None


def described(made: Made, count: int) -> str:
    """One line about a fault that is over."""
    lasted = f" for {made.fault.seconds:g} s" if made.fault.seconds else ""
    ended = "" if made.exit_code is None else f"; it ended the run ({describe_exit(made.exit_code)}), which was resumed"
    if made.recovery_seconds is None:
        return f"{_name(made, count)}{lasted}: the run ended before it worked again{ended}"
    return f"{_name(made, count)}{lasted}: works again after {made.recovery_seconds:.1f} s{ended}"


def _left_behind(made: Made, count: int) -> list[str]:
    name = _name(made, count)
    return [f"{name}: process {process.pid}, which had to end with it, lives" for process in made.effect.left_behind()]


def _name(made: Made, count: int) -> str:
    fault = made.fault
    hit = "" if fault.kind in ("disk", "redis-loss") else f" {fault.target}"  # they hit one thing only
    return f"fault {fault.number} of {count}, version {made.published}: {fault.kind}{hit}{made.effect.note}"
