"""Keeps a run's child processes alive, and ends all of them together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from tandem.protos.errors import LINES_ABOVE
from tandem.services.run.children import Child, death_words, end_lineage, new_run_token
from tandem.services.run.folder import disk_full

POLL_SECONDS = 0.1
SIGKILL_AFTER_SECONDS = 6.0
"""Everything has to be gone 10 s after Ctrl-C; what ignores SIGTERM for so long is killed."""

FINISHED, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
"""How a run ends, as the exit code of `tandem run`. A child's exit code 2 is its user's error, too."""

FINISHER = "trainer"
"""The child whose end is the run's."""

ALONG_THE_RING = ("feed", "rollout", "reward", "trainer")


class Crew:
    """The children of one run, watched until the trainer has finished, one cannot go on, or somebody says stop.

    `logs_stay`: their logs are still there when the run is over, and worth naming.
    """

    def __init__(self, *, say: Callable[[str], None], logs_stay: bool = True) -> None:
        self.token = new_run_token()
        self.children: list[Child] = []
        self.chores: list[Callable[[], None]] = []
        """Called at every turn, e.g. to look after Redis; what they raise ends the run."""
        self.progress_mark: Callable[[], int] = lambda: 0
        self.last_beat: Callable[[str], float] = lambda name: time.monotonic()
        """Monotonic time of a child's last sign of life; one after its start turns `starting` into `running`."""
        self.say = say
        self._logs_stay = logs_stay
        self._stops_asked = 0
        self._stops_heeded = 0

    def run(self) -> int:
        """Starts the children and watches them to the end; nothing is left running, whatever happens."""
        try:
            for child in () if self._stops_asked else self.children:
                child.start()
            return self._watch()
        finally:
            self._stop_children()

    def ask_to_stop(self) -> None:
        """Ends the run as Ctrl-C does; asked twice, at once."""
        self._stops_asked += 1

    def states(self) -> Mapping[str, tuple[str, int, int]]:
        """Per child: state, pid, restarts. Safe to call from any thread."""
        return {child.name: (child.state, child.pid, child.restarts) for child in self.children}

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turns SIGINT, SIGTERM and SIGHUP into `ask_to_stop` (a bare counter: an Event's lock is not safe in a
        handler).
        """

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            self.ask_to_stop()

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> int:
        while True:
            if self._stops_asked:
                self._stops_heeded = 1  # one more means: at once
                self.say("stopping: every service is asked to end")
                return INTERRUPTED
            for child in self.children:
                outcome = self._attend(child)
                if outcome is not None:
                    return outcome
            for chore in self.chores:
                chore()
            time.sleep(POLL_SECONDS)

    def _attend(self, child: Child) -> int | None:
        """Restarts a child that died. Returns the run's exit code if the run is over."""
        code = child.exit_code()
        if code is None:
            if child.state == "restarting" and time.monotonic() >= child.restart_at:
                child.start()
            elif child.state == "starting" and self.last_beat(child.name) > child.started_at:
                child.state = "running"
            return None
        if code == 0:
            child.state = "stopped"
            return FINISHED if child.name == FINISHER else None
        child.state = "failed"
        full = disk_full(child.spec.log_file.parent)
        if code == USER_ERROR and not full:  # on a full disk its log lacks what it had to say
            self.say(f"tandem: {child.name}: {self._complaint(child)}")
            return USER_ERROR
        if full or any("No space left on device" in line for line in child.last_lines(20)):
            self.say(
                f"tandem: {child.name}: the disk of {child.spec.log_file.parent} is "
                "full; free space there, then go on with --resume"
            )
            return USER_ERROR
        return self._restart(child, code)

    def _complaint(self, child: Child) -> str:
        """What a child said as it ended; what it calls the lines above is in its log, not on this terminal."""
        complaint = child.complaint()
        if not complaint.endswith(LINES_ABOVE):
            return complaint
        told, cause = complaint.removesuffix(LINES_ABOVE), child.cause()
        if not self._logs_stay:
            return told + (f"its log names the cause: {cause}" if cause else "its log names no cause")
        return f"{told}{child.spec.log_file} names the cause" + (f": {cause}" if cause else "")

    def _restart(self, child: Child, code: int) -> int | None:
        delay = child.policy.delay(child.lived_seconds, self.progress_mark())
        if delay is None:
            self.say(
                f"{child.name} died ({death_words(code)}) for the {child.policy.deaths}th "
                "time in a row without progress; giving up"
            )
            self.say(f"the last lines of {child.spec.log_file}:")
            for line in child.last_lines(12):
                self.say(f"  {line}")
            return FAILED
        child.state = "restarting"
        child.restarts += 1
        child.restart_at = time.monotonic() + delay
        self.say(f"{child.name} died ({death_words(code)}: {child.complaint()}); starting it again in {delay:g} s")
        return None

    def _stop_children(self) -> None:
        """SIGTERM to all, SIGKILL to what is left after 6 s or when asked once more, and an end to whatever they left
        behind.
        """
        deadline = time.monotonic() + SIGKILL_AFTER_SECONDS
        for child in sorted(self.children, key=_stop_order):
            child.terminate()
        while any(child.alive for child in self.children) and time.monotonic() < deadline:
            if self._stops_asked > self._stops_heeded:
                break
            time.sleep(0.02)
        for child in self.children:
            if child.alive:
                self.say(f"{child.name} did not end when asked to; killed")
                child.kill()
        deadline = time.monotonic() + 1.0
        while any(child.alive for child in self.children) and time.monotonic() < deadline:
            time.sleep(0.02)
        end_lineage(self.token)
        for child in self.children:
            child.reap()


def _stop_order(child: Child) -> int:
    """Along the ring, so that nobody is handed work by a neighbour that outlives it."""
    service = child.name.partition("-")[0]
    return ALONG_THE_RING.index(service) if service in ALONG_THE_RING else len(ALONG_THE_RING)
