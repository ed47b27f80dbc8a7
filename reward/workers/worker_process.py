"""A worker process as the service sees it. Nothing here is pickled, trusted or waits without a deadline."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tandem.protos.contracts import Score, Unscored
from tandem.reward.config import RewardConfig
from tandem.reward.registry import ScorerSpec
from tandem.reward.workers.answers import STRAY, decode_scores, make_token, payloads
from tandem.reward.workers.processes import count_descendants, is_stopped

_OUTPUT_TAIL_BYTES = 2000
_MAX_ANSWER_BYTES = 1 << 20
LAUNCH_SECONDS = 30.0
_LOOK_SECONDS = 0.2  # between two looks at whether a launcher that says nothing is stopped
_EPITAPH_SECONDS = 5.0  # to the end of a process that is ending: long only on a crowded machine
_PF_EXITING = 0x4  # of the flags in /proc/PID/stat
_WATCH_SECONDS = 0.1  # this often an item's processes are counted, and it is asked whether anybody wants it
_NAP_SECONDS = 0.002  # answers of fast items are read many at a time: waking up for each would cost more than the item
_NAP_ITEMS = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """What one answer may take."""

    seconds: float
    startup_seconds: float
    cpu_seconds: float
    memory_bytes: int
    processes: int
    open_files: int
    output_bytes: int

    @classmethod
    def of(cls, config: RewardConfig, startup_seconds: float) -> Limits:
        """Those of `[reward]`."""
        limits = config.limits
        return cls(
            config.timeout_seconds,
            startup_seconds,
            config.cpu_seconds,
            limits.memory_bytes,
            limits.processes,
            limits.open_files,
            limits.output_bytes,
        )


@dataclass(slots=True)
class Outcome:
    """How far a worker came with a chunk. `end` says what is to be done with the items that have no answer.

    `done`: there are none. `item`: the first of them is unscored for `reason`. `memory`: the first of them met the
    limit of memory.
    `stray`: while it was judged, the service's line brought what is no answer. `retry`: nothing is known against any.
    The process is dead after these four. `refused`: the judge cannot be built, for `reason`.
    """

    answers: list[Score] = field(default_factory=list)
    end: Literal["done", "item", "memory", "stray", "retry", "refused"] = "done"
    reason: Unscored | None = None
    batch: bool = False
    seconds: float = 0.0
    """From the judge being ready to the last answer."""


class _OverError(Exception):
    """The process hung, died, broke a limit or wrote to the service's line."""

    def __init__(self, reason: Unscored) -> None:
        super().__init__(reason.detail)
        self.reason = reason


def _never(since: float = 0.0) -> bool:
    return False


@dataclass(slots=True)
class Parent:
    """The launcher of a worker. What it forked ends with it."""

    pid: int
    ended: bool = False
    """Whether it was ended from here, as far as that got."""


class WorkerProcess:
    """One worker, spoken with by one thread at a time.

    Raises:
        OSError: the launcher gave none.
    """

    def __init__(
        self, channel: socket.socket, line: socket.socket, output: int, limits: Limits, parent: Parent
    ) -> None:
        self._channel, self._line, self._output, self._limits = channel, line, output, limits
        self._parent = parent
        self._received = b""
        self._unsent = memoryview(b"")
        self._output_tail = b""
        self._printed = 0
        self._output_open = True
        self._loaded: set[str] = set()
        self._pace = 0.0
        self._given_up: Callable[[], bool] = _never
        self._status: int | None = None
        self._line_text = b""
        self._token = b""
        self._told = 0
        self._stray = False
        self._handle = -1
        channel.setblocking(False)
        os.set_blocking(output, False)
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._poll.register(output, select.POLLIN)
        self.pid = int(self._said("pid", LAUNCH_SECONDS) or 0)
        if not self.pid:
            self._status = -signal.SIGKILL  # there is nothing whose end could be waited for
            self.close()
            raise OSError("the launcher of scoring processes gave no process")
        with suppress(OSError):  # a kernel without them: the launcher kills alone
            self._handle = os.pidfd_open(self.pid)
        self.num_judged = 0

    @property
    def alive(self) -> bool:
        """Whether it can take a chunk: its end of the channel is open and holds nothing unasked."""
        if self._status is not None or self._received:
            return False
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return not poll.poll(0)

    def judge(
        self,
        spec: ScorerSpec,
        items: Sequence[bytes],
        pace: float = 0.0,
        given_up: Callable[[float], bool] = _never,
        answers: list[Score] | None = None,
    ) -> Outcome:
        """Judges encoded items, in order. The clock starts anew with every answer, so it runs for one item.

        Args:
            pace: what an item of this scorer took lately, in seconds; 0: not known.
            given_up: asked with when the first item was begun (time.monotonic); once it says so, the process is ended
                as if the time
                of its item were over. Not while it builds the judge: those who come after need it too.
            answers: where the answers are entered as they come.
        """
        header: dict[str, Any] = {
            "scorer": spec.scorer,
            "arguments": spec.arguments,
            "preload": spec.preload,
            "items": len(items),
            "bytes": sum(map(len, items)),
            "token": make_token(),
        }
        self._token, self._told, self._stray = header["token"].encode(), 0, False
        self._unsent = memoryview(b"".join([json.dumps(header).encode() + b"\n", *items]))
        self._printed = 0
        outcome = Outcome([] if answers is None else answers)
        known = spec.key in self._loaded
        try:
            first, rest = self._first_line(self._limits.seconds if known else self._limits.startup_seconds)
        except _OverError as error:
            # Dead although it had the judge: nobody's fault that is here. Dead while it built it: the judge's.
            known = known or self.num_judged > 0  # … unless others may have left what wrote to its line or read from it
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
        watched = spec.isolation == "worker"
        self._pace, self._given_up = pace, partial(given_up, time.monotonic())
        try:
            self._collect(outcome, rest, len(items), watched, max(self._limits.seconds, spec.longest_seconds))
        except _OverError as error:
            outcome.end, outcome.reason = "stray" if error.reason is STRAY else "item", error.reason
        finally:
            self._given_up = _never
        self.num_judged += len(outcome.answers)
        if outcome.end == "done" and (self._stray or (watched and self._too_many_processes())):
            self.kill()  # processes left by several items, each within its limit; or every answer is there, and more
        return outcome

    def _first_line(self, seconds: float) -> tuple[dict[str, Any], list[bytes]]:
        first, *rest = self._lines(seconds, watched=False)
        with suppress(ValueError, RecursionError):
            reply = json.loads(first)
            if isinstance(reply, dict):
                return reply, rest
        raise self._strayed()

    def _collect(self, outcome: Outcome, lines: list[bytes], number: int, watched: bool, seconds: float) -> None:
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
                raise self._strayed()
            if left >= _NAP_ITEMS and self._pace and not self._unsent:
                time.sleep(min(_NAP_SECONDS, self._pace * left / 2))
            self._printed = 0 if lines else self._printed
            lines = self._lines(seconds, watched)

    def _lines(self, seconds: float, watched: bool) -> list[bytes]:
        """Sends what is unsent, and returns the lines that arrive first (at least one)."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or self._given_up():
                self.kill()
                raise _OverError(Unscored("timeout", f"no answer within {seconds:g} s"))
            self._poll.modify(self._channel, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            ready = self._poll.poll(1000.0 * min(left, _WATCH_SECONDS))
            for descriptor, event in ready:
                if descriptor == self._output:
                    self._forward_output()
                elif event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._receive()
                else:
                    self._send()
            if not ready and watched and self._too_many_processes():
                self.kill()
                raise _OverError(Unscored("limit", f"more than {self._limits.processes} processes at a time"))
        *complete, self._received = self._received.split(b"\n")
        found = payloads(complete, self._token, self._told + 1)
        self._told += len(found)
        self._stray = len(found) < len(complete)
        if not found:
            raise self._strayed()
        return found

    def _strayed(self) -> _OverError:
        self.kill()
        return _OverError(STRAY)

    def _too_many_processes(self) -> bool:
        return count_descendants(self.pid, self._limits.processes) > self._limits.processes

    def _receive(self) -> None:
        try:
            data = self._channel.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise _OverError(self._epitaph())
        self._received = self._received + data if self._received else data
        if len(self._received) > _MAX_ANSWER_BYTES and b"\n" not in self._received:
            self.kill()
            raise _OverError(Unscored("limit", f"an answer of more than {_MAX_ANSWER_BYTES} bytes"))

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[self._channel.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = memoryview(b"")  # the read that follows tells

    def _forward_output(self) -> None:
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._poll.unregister(self._output)
            self._output_open = False
            return
        self._output_tail = (self._output_tail + data)[-_OUTPUT_TAIL_BYTES:]
        self._printed += len(data)
        sys.stderr.write(data.decode(errors="replace"))
        if self._printed > self._limits.output_bytes:
            self.kill()
            raise _OverError(Unscored("limit", f"it printed more than {self._limits.output_bytes} bytes"))

    def _epitaph(self) -> Unscored:
        """Ends the process, and says how it died and what it wrote last."""
        if ending := self._is_ending():
            self._status = self._exit_status(_EPITAPH_SECONDS)
        self.kill()
        if self._parent.ended:
            return Unscored("infrastructure", "the launcher of scoring processes ended, and this one with it")
        closed_its_line = not ending and self._status == -signal.SIGKILL
        with suppress(_OverError):
            while self._output_open and select.select([self._output], [], [], 0)[0]:
                self._forward_output()
        if closed_its_line:
            how = "closed its line"
        elif self._status is not None and self._status < 0:
            if -self._status == signal.SIGXCPU:
                return Unscored("limit", f"more than {self._limits.cpu_seconds:g} s of processor time")
            how = f"was killed by {signal.Signals(-self._status).name}"
        else:
            how = f"exited with code {self._status}"
        last_words = self._output_tail.decode(errors="replace").strip().rpartition("\n")[2]
        return Unscored(
            "crashed", f"the scoring process {how}" + (f"; it last wrote: {last_words[:200]}" if last_words else "")
        )

    def _is_ending(self) -> bool:
        """Whether the process is past its code. One that lives on has closed its line itself, and is not waited for."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return True
        return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)

    def kill(self) -> None:
        """Ends the process and all it started; returns when it has ended."""
        if self._status is None:
            with suppress(OSError):
                if self._handle >= 0:
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            with suppress(OSError):
                self._line.send(b"K")  # for what it started
            self._status = self._exit_status(10.0)
            if self._status is None:
                self._status = (
                    -signal.SIGKILL
                )  # a launcher that is gone takes its workers with it; a stopped one says nothing

    def close(self) -> None:
        """Kills it and frees what is held for it."""
        self.kill()
        self._channel.close()
        self._line.close()
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _exit_status(self, seconds: float) -> int | None:
        status = self._said("status", seconds)
        return None if status is None else int(status)

    def _said(self, what: str, seconds: float) -> int | None:
        """What the launcher says of the worker; None past the time, or if the launcher is gone or stopped."""
        deadline = time.monotonic() + seconds
        while True:
            while b"\n" in self._line_text:
                text, _, self._line_text = self._line_text.partition(b"\n")
                said = json.loads(text)
                if what in said:
                    return int(said[what])
            left = deadline - time.monotonic()
            self._line.settimeout(max(0.001, min(left, _LOOK_SECONDS)))
            try:
                data = self._line.recv(4096)
            except TimeoutError:
                if left <= _LOOK_SECONDS or is_stopped(self._parent.pid):
                    return None
                continue
            except OSError:
                data = b""
            if not data:
                self._parent.ended = True  # it alone held the other end
                return None
            self._line_text += data
