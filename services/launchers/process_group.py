"""Runs a group of child processes: starts them, restarts those that die, and stops them together."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from tandem.protos.errors import LINES_ABOVE
from tandem.services.buffer.starvation import REDIS_AWAY_SECONDS
from tandem.services.launchers.children import Child, ChildSpec, LocalChild, describe_exit, kill_marked
from tandem.services.process import in_thread
from tandem.services.run.folder import disk_full
from tandem.services.run.redis_child import SILENT_SECONDS

POLL_SECONDS = 0.1
_OUTAGE_DELAY_SECONDS = 5.0  # before what died meanwhile is restarted
START_SECONDS = 1800.0
"""A child that has not sent a heartbeat by then hangs. Large models take minutes to load."""
SIGKILL_AFTER_SECONDS = 6.0
"""A child that ignores SIGTERM for this long is killed, because all processes must end within 10 s of Ctrl-C."""
DOUBLED_SECONDS = 0.5
"""Requests to stop that come within this time are one."""

FINISHED, FAILED, USER_ERROR, INCOMPLETE, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes of `tandem run`. A child that exits with 2 reports a user's error, too."""

FINAL_CHILD = "trainer"
"""When this child exits with 0, the run is over."""

SCALED_SERVICES = ("rollout", "environments")
"""The services whose numbers of replicas may change during a run."""

SERVICE_ORDER = ("feed", "rollout", "environments", "reward", "trainer")
"""The order of the data flow. Children stop in this order, so that none sends work to one that has stopped."""


class ProcessGroup:
    """The children of one run, until the trainer has finished, a child cannot go on, or a stop is requested.

    `report` prints a line for the user. With `keep_logs` messages name the logs, which remain after the run.
    `make_child` makes a child from its specification and the run's token.
    """

    def __init__(
        self,
        *,
        report: Callable[[str], None],
        keep_logs: bool = True,
        make_child: Callable[[ChildSpec, str], Child] = LocalChild,
    ) -> None:
        self.token = uuid.uuid4().hex
        self._make_child = make_child
        self.children: list[Child] = []
        self.on_poll: list[Callable[[], None]] = []
        """Called at every poll, e.g. to restart Redis. An exception ends the run."""
        self.progress: Callable[[str], int] = lambda name: 0
        """How far a child's own work has come, over all its lives. Progress resets the count of failures in a row."""
        self.redis_silence: Callable[[], float] = lambda: 0.0
        """Seconds since Redis last answered. Nobody's deaths count while it is away."""
        self.last_heartbeat: Callable[[str], float] = lambda name: time.monotonic()
        """Monotonic time of a child's last heartbeat. The first one after its start makes it `running`."""
        self.silence: Callable[[str], float] = lambda name: 0.0
        """Seconds since a child's last heartbeat, as of the last answer of Redis."""
        self.report = report
        self._keep_logs = keep_logs
        self.drain: Callable[[str], None] = lambda name: None
        """Returns once the child has no work left. Called in a thread before a child is stopped that leaves the run."""
        self._replicas: dict[str, Sequence[ChildSpec]] = {}
        """The wanted replicas of the services whose number was ordered."""
        self._stop_requested_at: float | None = None
        self._stops_at_once = False
        self._done = False

    def run(self) -> int:
        """Starts the children and watches them until the run ends. Returns the exit code; all children have ended."""
        try:
            for child in () if self._stop_requested_at is not None else self.children:
                if child.spec.start_after:
                    child.state = "waiting"
                else:
                    child.start()
            return self._watch()
        finally:
            self._stop_children()

    def request_stop(self) -> None:
        """Stops the run as Ctrl-C does. A second request kills the children at once, unless it comes with the first:
        some programs pass on a Ctrl-C that the terminal has sent to the whole process group.
        """
        now = time.monotonic()
        if self._stop_requested_at is None:
            self._stop_requested_at = now
        elif now > self._stop_requested_at + DOUBLED_SECONDS:
            self._stops_at_once = True

    def add(self, specs: Iterable[ChildSpec]) -> None:
        """Adds children, to be started by `run`."""
        self.children = [*self.children, *(self._make_child(spec, self.token) for spec in specs)]

    def set_replicas(self, service: str, specs: Sequence[ChildSpec]) -> None:
        """From now on the run has these replicas of one of `SCALED_SERVICES`. Safe to call from any thread."""
        self._replicas = {**self._replicas, service: specs}

    def finish(self) -> None:
        """Ends the run successfully although no child has exited."""
        self._done = True

    def states(self) -> Mapping[str, tuple[str, int, int]]:
        """State, pid and number of restarts by child. Safe to call from any thread."""
        return {child.name: (child.state, child.pid, child.restarts) for child in self.children}

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turns SIGINT, SIGTERM and SIGHUP into `request_stop`."""

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            self.request_stop()  # takes no lock, which would not be safe in a signal handler

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> int:
        while not self._done:
            if self._stop_requested_at is not None:
                self.report("stopping all services ...")
                return INTERRUPTED
            for service, specs in self._replicas.items():
                self._scale(service, specs)
            for child in self.children:
                if child.drained is not None:
                    self._check_leaving(child)
                elif (outcome := self._check_child(child)) is not None:
                    return outcome
            for function in self.on_poll:
                function()
            time.sleep(POLL_SECONDS)
        return FINISHED

    def _scale(self, service: str, specs: Sequence[ChildSpec]) -> None:
        """Starts the replicas that are missing, and lets those drain that are no longer wanted."""
        wanted = {spec.name: spec for spec in specs}
        replicas = {child.name: child for child in self.children if child.service == service}
        for name, child in replicas.items():
            if name not in wanted and child.drained is None:
                child.state, child.drained = "draining", in_thread(f"drain-{name}", self.drain, name)
        for name in [name for name in wanted if name not in replicas]:
            child = self._make_child(replace(wanted[name], start_after=""), self.token)
            child.joined_late = True
            self.children = [*self.children, child]  # not appended, because other threads read the list
            child.start()
            self.report(f"{name} joins the run")

    def _check_leaving(self, child: Child) -> None:
        """Stops a child that has drained, and forgets it once it has ended, whatever its exit code."""
        assert child.drained is not None
        if child.exit_code() is None and child.alive:
            if child.told_to_stop_at is None and child.drained.done():
                child.drained.result()
                child.terminate()
                child.told_to_stop_at = time.monotonic()
            elif child.told_to_stop_at and time.monotonic() > child.told_to_stop_at + SIGKILL_AFTER_SECONDS:
                child.kill()
            return
        self.children = [one for one in self.children if one is not child]
        self.report(f"{child.name} has left the run")

    def _check_child(self, child: Child) -> int | None:
        """Restarts a child that died. Returns the exit code of the run if the run is over."""
        code = child.exit_code()
        if code is None:
            if self._start_is_due(child):
                child.start()
            elif child.state == "starting" and self.last_heartbeat(child.name) > child.started_at:
                child.state = "running"
            elif told := self._hangs(child):
                self.report(f"{child.name} has sent no heartbeat {told}; it is killed")
                child.state = "failed"
                child.kill()
            return None
        if code == 0:
            child.state = "stopped"
            return FINISHED if child.name == FINAL_CHILD else None
        child.state = "failed"
        folder = child.spec.log_file.parent
        # On a full disk the log may lack its last lines.
        if disk_full(folder) or any("No space left on device" in line for line in child.last_lines(20)):
            fault = f"the disk of {folder} is full; free space there, then go on with --resume"
        elif code == USER_ERROR:
            fault = self._error_line(child)
        else:
            return self._restart(child, code)
        self.report(f"tandem: {child.name}: {fault}")
        return self._end_of(child, USER_ERROR)

    def _hangs(self, child: Child) -> str:
        """For how long a child that lives has been silent for too long; "" if it has not."""
        if child.state == "running" and self.silence(child.name) > SILENT_SECONDS:
            return f"for {SILENT_SECONDS:.0f} s"
        if child.state != "starting" or child.name.startswith("trainer-"):  # of several machines one sends heartbeats
            return ""
        if time.monotonic() > child.started_at + START_SECONDS and self.redis_silence() < REDIS_AWAY_SECONDS:
            return f"in the {START_SECONDS:.0f} s since its start"
        return ""

    def _end_of(self, child: Child, outcome: int) -> int | None:
        """The run's exit code after a child has failed for good. None: the run goes on without it, because it joined
        late, or died too often while other replicas work.
        """
        others = (one for one in self.children if one is not child and one.service == child.service)
        replaceable = child.service in SCALED_SERVICES and any(one.state == "running" for one in others)
        if not child.joined_late and not (replaceable and outcome == FAILED):
            return outcome
        self.report(f"the run goes on without {child.name}")
        if child.service in self._replicas:
            kept = [spec for spec in self._replicas[child.service] if spec.name != child.name]
            self.set_replicas(child.service, kept)
        self.children = [one for one in self.children if one is not child]
        return None

    def _start_is_due(self, child: Child) -> bool:
        if child.state == "restarting":
            return time.monotonic() >= child.restart_at
        if child.state != "waiting":
            return False
        first = self.states().get(child.spec.start_after)
        return first is None or first[0] == "running"  # None: it has left the run

    def _error_line(self, child: Child) -> str:
        """The child's error message. If it refers to the lines above, adds the log's path and its last exception."""
        error = child.last_error()
        if not error.endswith(LINES_ABOVE):
            return error
        text, cause = error.removesuffix(LINES_ABOVE), child.cause()
        if not self._keep_logs:
            return text + (f"its log names the cause: {cause}" if cause else "its log names no cause")
        return f"{text}{child.spec.log_file} names the cause" + (f": {cause}" if cause else "")

    def _restart(self, child: Child, code: int) -> int | None:
        delay: float | None = _OUTAGE_DELAY_SECONDS
        if self.redis_silence() < REDIS_AWAY_SECONDS:
            delay = child.policy.delay(time.monotonic() - child.started_at, self.progress(child.name))
        if delay is None:
            often = f"for the {child.policy.deaths}th time in a row without progress"
            self.report(f"{child.name} died ({describe_exit(code)}) {often}; giving up")
            self.report(f"the last lines of {child.spec.log_file}:")
            for line in child.last_lines(12):
                self.report(f"  {line}")
            return self._end_of(child, FAILED)
        child.state = "restarting"
        child.restarts += 1
        child.restart_at = time.monotonic() + delay
        self.report(f"{child.name} died ({describe_exit(code)}: {child.last_error()}); restarting it in {delay:g} s")
        return None

    def _stop_children(self) -> None:
        """Sends SIGTERM, after 6 s or at a second request SIGKILL, and kills what the children left behind."""
        deadline = time.monotonic() + SIGKILL_AFTER_SECONDS
        for child in sorted(self.children, key=lambda child: [*SERVICE_ORDER, child.service].index(child.service)):
            child.terminate()
        self._wait_until(deadline, interruptible=True)
        killed = (
            "is killed, as a second request wants it" if self._stops_at_once else "did not stop after SIGTERM; killed"
        )
        for child in self.children:
            if child.alive:
                self.report(f"{child.name} {killed}")
                child.kill()
        self._wait_until(time.monotonic() + 1.0)
        kill_marked(self.token)
        for child in self.children:
            child.reap()

    def _wait_until(self, deadline: float, *, interruptible: bool = False) -> None:
        while any(child.alive for child in self.children) and time.monotonic() < deadline:
            if interruptible and self._stops_at_once:
                return
            time.sleep(0.02)
