"""Runs the tests of one answer in sandboxes. Verdicts are computed outside the answer's sandbox."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Literal

from tandem.reward.sandbox.inside import program, wire
from tandem.reward.sandbox.isolation import SandboxPool, open_sandboxes
from tandem.reward.sandbox.sandbox import Limits, Outcome, Sandbox, SandboxDiedError, SandboxError
from tandem.reward.sandbox.test_cases import (
    CallTest,
    Comparison,
    ScriptTest,
    StatementTest,
    Test,
    UnusableTestsError,
    same_output,
    same_value,
)
from tandem.reward.workers.child_process import memory_kills

Verdict = Literal["passed", "wrong", "error", "time", "memory", "output"]

_MIN_SECONDS = 0.1  # a test with less time left fails
_SETTLE_SECONDS = 0.2  # wait after a sandbox died: if its launcher died, its other sandboxes end a moment later
_TEST_GRACE_SECONDS = 2.0  # so that a test outlives the answer that it calls, and detects its end
_MAX_REPLY_BYTES = 8 << 20  # of a function's result as text
NO_DATA = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
"""What decoding and comparing a function's result may raise."""
_NO_OBJECT = object()  # placeholder for an object that is not data; equal to no value


@cache
def sandboxes(packages: tuple[str, ...], allow_unsandboxed: bool) -> SandboxPool:
    """Returns this process's shared pool of sandboxes with these packages. Raises ScorerError like `open_sandboxes`."""
    return open_sandboxes(packages, allow_unsandboxed=allow_unsandboxed)


class Trial:
    """Runs the tests of one answer. Every test has its own process, so a test that hangs or crashes fails alone.

    The answer's sandbox never holds the expected results: output and results are compared here, and the statements of
    a test run in another sandbox, which calls the answer over a socket that carries plain data.

    If a sandbox dies during a run, or its program is killed, the test is repeated in a new sandbox, once per trial. If
    a sandbox dies again, that is an error. If a program is killed again, it fails (`memory`), because it may have
    killed itself; it is an error if the kernel has killed a process for lack of memory in the meantime.

    `code` runs after `prelude`. `deadline` is that of the whole trial (`time.monotonic`), without waits for a sandbox;
    later tests fail (`time`). The methods raise SandboxError if no sandbox starts, or the sandboxes die.
    """

    def __init__(self, pool: SandboxPool, prelude: str, code: str, limits: Limits, deadline: float) -> None:
        self._pool = pool
        self._prelude = prelude
        self._code = code
        self._limits = limits
        self._deadline = deadline
        self._boxes: dict[str, Sandbox] = {}
        self._died = False
        self._kills_before: int | None = None

    def verdict(self, test: Test, comparison: Comparison, tolerance: float) -> Verdict:
        """Runs one test. Raises UnusableTestsError if the test itself cannot be run."""
        started = time.monotonic()
        if self._deadline - started < _MIN_SECONDS:
            return "time"
        try:
            return self._verdict(test, comparison, tolerance, self._deadline - started)
        except SandboxDiedError as error:
            self.close()
            if self._died:
                raise SandboxError(f"{error}, twice: the machine, a lack of memory, or the program") from None
            self._died = True
            time.sleep(_SETTLE_SECONDS)
            self._kills_before = memory_kills()
            self._deadline += time.monotonic() - started + _MIN_SECONDS  # the lost run does not count
            return self.verdict(test, comparison, tolerance)

    def _verdict(self, test: Test, comparison: Comparison, tolerance: float, left: float) -> Verdict:
        limits = replace(self._limits, wall_seconds=min(self._limits.wall_seconds, left))
        match test:
            case ScriptTest(stdin, wanted):
                box = self._box("answer")
                box.start("script", [self._prelude, self._code], limits, stdin.encode("utf-8", "replace"))
                outcome = self._outcome(box)
                got = outcome.stdout.decode("utf-8", "replace")
                return outcome.failure or ("passed" if same_output(got, wanted, comparison, tolerance) else "wrong")
            case CallTest():
                return self._call(test, limits, tolerance)
            case StatementTest():
                return self._try_statements(test, limits)

    def _box(self, role: str) -> Sandbox:
        """Returns the sandbox of the answer or of the tests; a new one if the last program left files in it."""
        box = self._boxes.get(role)
        if box is not None and box.clean:
            return box
        if box is not None:
            box.close()
        began = time.monotonic()
        box = self._boxes[role] = self._pool.take()
        self._deadline += time.monotonic() - began
        return box

    def close(self) -> None:
        for box in self._boxes.values():
            box.close()
        self._boxes.clear()

    def _outcome(self, box: Sandbox) -> Outcome:
        """Waits for the outcome. Raises SandboxDiedError also if the program was killed, first or by the kernel."""
        outcome = box.outcome()
        if outcome.killed and (not self._died or self._kills_before != memory_kills()):
            raise SandboxDiedError("a program was killed")
        return outcome

    def _start_answer(self, limits: Limits) -> tuple[Sandbox, socket.socket]:
        box = self._box("answer")
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                box.start("answer", [self._prelude, self._code], limits, line=theirs)
            except BaseException:
                mine.close()
                raise
        return box, mine

    def _call(self, test: CallTest, limits: Limits, tolerance: float) -> Verdict:
        box, line = self._start_answer(limits)
        with line:
            arguments = wire.encode(list(test.arguments), _no_objects)
            request = wire.dumps({"function": test.function, "args": arguments})
            reply = _ask(line, request, limits.wall_seconds + _TEST_GRACE_SECONDS)
        if reply is not None:
            box.stop()
        outcome = self._outcome(box)
        if reply is None:
            return outcome.failure or "error"
        if "error" in reply:
            return "memory" if reply["error"] == "MemoryError" else "error"
        try:
            got = wire.decode(reply["value"], lambda _: _NO_OBJECT)
            right = any(same_value(got, wanted, tolerance) for wanted in test.wanted)
        except NO_DATA:
            return "wrong"  # the answer wrote to the socket itself, or returned what nothing can equal
        return "passed" if right else "wrong"

    def _try_statements(self, test: StatementTest, limits: Limits) -> Verdict:
        judge = self._box("tests")
        box, line = self._start_answer(limits)
        with line:
            own = replace(limits, wall_seconds=limits.wall_seconds + _TEST_GRACE_SECONDS)
            judge.start("test", [self._prelude, test.text, test.entry_point], own, line=line)
        said = self._outcome(judge)
        box.stop()
        outcome = self._outcome(box)
        if said.exit_code == program.PASSED and not said.stopped:
            return "passed"
        if said.exit_code == program.UNUSABLE:
            raise UnusableTestsError(f"a test cannot be run: {said.stderr.decode(errors='replace').strip():.200}")
        if outcome.stopped != "asked" and outcome.failure:
            return outcome.failure
        return "wrong" if said.exit_code == program.FAILED else said.failure or "error"


def _ask(line: socket.socket, request: bytes, seconds: float) -> Mapping[str, object] | None:
    """Returns the answer's reply; None if the answer ended, sent too much, or sent nothing in time."""
    deadline = time.monotonic() + seconds
    received = bytearray()
    try:
        line.settimeout(seconds)
        line.sendall(request)
        while not received.endswith(b"\n"):
            line.settimeout(max(0.01, deadline - time.monotonic()))
            data = line.recv(1 << 16)
            received += data
            if not data or len(received) > _MAX_REPLY_BYTES:
                return None
        reply = json.loads(received)
    except (OSError, ValueError, RecursionError):
        return None
    return reply if isinstance(reply, dict) else None


def _no_objects(value: object) -> dict[str, object]:
    raise TypeError(f"{type(value).__name__} is not JSON data")
