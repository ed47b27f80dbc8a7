"""A worker process as the service sees it: nothing it sends is trusted, every wait has a deadline."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from tandem.protos.contracts import Score, Unscored
from tandem.reward.config import RewardConfig
from tandem.reward.registry import ScorerSpec
from tandem.reward.workers.answers import STRAY, decode_scores, make_token, payloads
from tandem.reward.workers.child_process import (
    ChildProcess,
    DiedError,
    HungError,
    LineChannel,
    count_descendants,
    describe_exit,
    is_stopped,
    stat_fields,
)

_MAX_ANSWER_BYTES = 1 << 20
LAUNCH_SECONDS = 30.0
STARTUP_SECONDS = 60.0
"""Time limit for the construction of a judge: a user's module may import much."""
_STATUS_CHECK_SECONDS = 0.2  # how often it is checked whether a launcher that does not answer is stopped
_EXIT_SECONDS = 5.0  # for a process that is exiting: takes long only on a busy machine
_PF_EXITING = 0x4  # of the flags in /proc/PID/stat


@dataclass(slots=True)
class Outcome:
    """Result of a chunk. `end` says what becomes of the items without an answer:

    `done`: there are none. `item`: the first of them is unscored for `reason`. `memory`: it exceeded the memory limit.
    `stray`: while it was judged, something that is no answer was written to the channel. `retry`: nothing is known
    against any. After these four the process is dead. `refused`: the judge cannot be built, for `reason`.
    """

    answers: list[Score] = field(default_factory=list)
    end: Literal["done", "item", "memory", "stray", "retry", "refused"] = "done"
    reason: Unscored | None = None
    batch: bool = False
    seconds: float = 0.0
    """From the moment the judge was ready to the last answer."""


class _OverError(Exception):
    """The process hung, died, exceeded a limit or wrote something unexpected to the channel."""

    def __init__(self, reason: Unscored) -> None:
        super().__init__(reason.detail)
        self.reason = reason


class WorkerProcess:
    """One worker, forked by a launcher, which ends with it. Used by one thread at a time.

    Args:
        output: the pipe that the worker prints to.
        control: to the launcher, which reports the worker's process id and exit status there, and kills on request.

    Raises OSError if the launcher gave no process.
    """

    def __init__(
        self,
        connection: socket.socket,
        output: int,
        control: socket.socket,
        launcher: ChildProcess,
        config: RewardConfig,
    ) -> None:
        self._connection, self._output, self._control = connection, output, control
        self._launcher, self._config = launcher, config
        self._channel = LineChannel(connection, output)
        self._loaded: set[str] = set()
        self._watched = False
        self._given_up: Callable[[], bool] | None = None
        self._status: int | None = None
        self._reports = b""
        self._token = b""
        self._lines_read = 0
        self._stray = False
        self._handle = -1
        self.pid = int(self._await_report("pid", LAUNCH_SECONDS) or 0)
        if not self.pid:
            self._status = -signal.SIGKILL  # there is no process to wait for
            self.close()
            raise OSError("the launcher of scoring processes gave no process")
        with suppress(OSError):  # kernels without pidfds: only the launcher can kill
            self._handle = os.pidfd_open(self.pid)
        self.num_judged = 0

    @property
    def alive(self) -> bool:
        """Whether it can take a chunk: its channel is open and holds nothing unread."""
        return self._status is None and self._channel.quiet

    def judge(
        self, spec: ScorerSpec, items: Sequence[bytes], given_up: Callable[[float], bool], answers: list[Score]
    ) -> Outcome:
        """Judges encoded items, in order. The time limit starts anew with every answer.

        Args:
            given_up: called with the time (time.monotonic) at which the first item was begun. Once it returns True the
                process is killed as if its item had timed out; not while it builds the judge, which others need too.
            answers: the list to append answers to as they come.
        """
        token = make_token()
        header: dict[str, object] = {"scorer": spec.scorer, "arguments": spec.arguments, "preload": spec.preload}
        header |= {"items": len(items), "bytes": sum(map(len, items)), "token": token}
        self._token, self._lines_read, self._stray = token.encode(), 0, False
        self._channel.send(b"".join([json.dumps(header).encode() + b"\n", *items]))
        self._channel.printed_bytes = 0
        outcome = Outcome(answers)
        known = spec.key in self._loaded
        try:
            first, rest = self._first_line(self._config.timeout_seconds if known else STARTUP_SECONDS)
        except _OverError as error:
            # If it had the judge, no item here is to blame. If it was building it, the judge is, unless earlier items
            # may have left something behind that wrote to the channel or read from it.
            known = known or self.num_judged > 0
            outcome.end, outcome.reason = ("retry", None) if known else ("refused", error.reason)
            return outcome
        if "ready" not in first:
            outcome.end = "retry" if "retire" in first else "refused"
            if "error" in first:
                outcome.reason = Unscored("infrastructure", str(first["error"]))
            else:
                self.kill()
            return outcome
        self._loaded.add(spec.key)
        outcome.batch = first.get("batch") is True
        self._given_up = partial(given_up, time.monotonic())
        self._watched = spec.isolation == "worker"
        try:
            self._collect(outcome, rest, len(items), max(self._config.timeout_seconds, spec.longest_seconds))
        except _OverError as error:
            outcome.end, outcome.reason = "stray" if error.reason is STRAY else "item", error.reason
        self.num_judged += len(outcome.answers)
        if outcome.end == "done" and (self._stray or self._too_many_processes()):
            self.kill()  # several items left processes, each within its limit; or there is more than the answers
        self._watched, self._given_up = False, None
        return outcome

    def _first_line(self, seconds: float) -> tuple[dict[str, object], list[bytes]]:
        first, *rest = self._receive(seconds)
        with suppress(ValueError, RecursionError):
            reply = json.loads(first)
            if isinstance(reply, dict):
                return reply, rest
        raise self._over(STRAY)

    def _collect(self, outcome: Outcome, lines: list[bytes], number: int, seconds: float) -> None:
        answers, started = outcome.answers, time.monotonic()
        while True:
            found, rest = decode_scores(lines)
            self._stray = self._stray or len(answers) + len(found) > number
            answers += found[: number - len(answers)]
            outcome.seconds, left = time.monotonic() - started, number - len(answers)
            if left <= 0:
                self._stray = self._stray or bool(rest)
                return
            if rest == "memory":
                outcome.end = "memory"
                self.kill()
                return
            if rest or self._stray:
                raise self._over(STRAY)
            if lines:
                self._channel.printed_bytes = 0
            lines = self._receive(seconds)

    def _receive(self, seconds: float) -> list[bytes]:
        try:
            lines = self._channel.receive(seconds, self._check)
        except HungError:
            raise self._over(Unscored("timeout", f"no answer within {seconds:g} s")) from None
        except DiedError:
            raise _OverError(self._exit_reason()) from None
        found = payloads(lines, self._token, self._lines_read + 1)
        self._lines_read += len(found)
        self._stray = len(found) < len(lines)
        if not found:
            raise self._over(STRAY)
        return found

    def _check(self, idle: bool) -> None:
        """Raises if a limit is exceeded or nobody waits for the item any more."""
        limits = self._config.limits
        if self._channel.printed_bytes > limits.output_bytes:
            raise self._over(Unscored("limit", f"it printed more than {limits.output_bytes} bytes"))
        if self._channel.partial_bytes > _MAX_ANSWER_BYTES:
            raise self._over(Unscored("limit", f"an answer of more than {_MAX_ANSWER_BYTES} bytes"))
        if idle and self._too_many_processes():
            raise self._over(Unscored("limit", f"more than {limits.processes} processes at a time"))
        if self._given_up is not None and self._given_up():
            raise HungError

    def _over(self, reason: Unscored) -> _OverError:
        self.kill()
        return _OverError(reason)

    def _too_many_processes(self) -> bool:
        most = self._config.limits.processes
        return self._watched and count_descendants(self.pid, most) > most

    def _exit_reason(self) -> Unscored:
        exiting = self._is_exiting()
        if exiting:
            self._status = self._await_report("status", _EXIT_SECONDS)
        self.kill()
        if self._launcher.ended:
            return Unscored("infrastructure", "the launcher of scoring processes ended, and this one with it")
        if self._status == -signal.SIGXCPU:
            return Unscored("limit", f"more than {self._config.cpu_seconds:g} s of processor time")
        status = self._status if exiting or self._status != -signal.SIGKILL else None
        return Unscored("crashed", f"the scoring process {describe_exit(status, self._channel.last_output())}")

    def _is_exiting(self) -> bool:
        """Whether the process is ending. One that is not has only closed its channel, and is not waited for."""
        try:
            fields = stat_fields(self.pid)
        except OSError:
            return True
        return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)

    def kill(self) -> None:
        """Kills the process and all it started; returns when it has ended."""
        if self._status is None:
            with suppress(OSError):  # there may be no handle
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            with suppress(OSError):
                self._control.send(b"K")  # for what it started
            # A launcher that has ended took its workers with it; one that is stopped does not answer.
            status = self._await_report("status", 10.0)
            self._status = -signal.SIGKILL if status is None else status

    def close(self) -> None:
        self.kill()
        self._connection.close()
        self._control.close()
        for descriptor in (self._output, self._handle):
            if descriptor >= 0:
                os.close(descriptor)
        self._output = self._handle = -1

    def _await_report(self, what: str, seconds: float) -> int | None:
        """What the launcher reports of the worker; None if not in time, or if the launcher has ended or is stopped."""
        deadline = time.monotonic() + seconds
        while True:
            while b"\n" in self._reports:
                text, _, self._reports = self._reports.partition(b"\n")
                report = json.loads(text)
                if what in report:
                    return int(report[what])
            left = deadline - time.monotonic()
            self._control.settimeout(max(0.001, min(left, _STATUS_CHECK_SECONDS)))
            try:
                data = self._control.recv(4096)
            except TimeoutError:
                if left <= _STATUS_CHECK_SECONDS or is_stopped(self._launcher.pid):
                    return None
                continue
            except OSError:
                data = b""
            if not data:
                self._launcher.ended = True  # only the launcher held the other end
                return None
            self._reports += data
