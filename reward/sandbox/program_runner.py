"""Runs programs in sandboxes for another process: `python -m tandem.reward.sandbox.program_runner`.

The first line of its standard input has the settings. Its first answer is `{}`, or `{"error": …}` if there are no
sandboxes. Each further line is a program, `{"call", "code", "seconds"}`, and has an answer, in any order. It ends with
its standard input, and its programs end with it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TextIO

from tandem.protos.errors import ScorerError
from tandem.reward.sandbox.inside.guest import TAIL_BYTES
from tandem.reward.sandbox.isolation import SandboxPool, open_sandboxes
from tandem.reward.sandbox.sandbox import Limits, SandboxError

_WAITING = 2.0  # wall time of a program in units of its processor time: on a busy machine it gets less than a core
_REPLY_SHARE = 0.1  # of a call's time, to end the program and answer
_MIN_SECONDS = 0.1  # a program with less time left does not begin
_OUTPUT_BYTES = 1 << 20
_writing = threading.Lock()


def main() -> None:
    calls, answers = sys.stdin, sys.stdout
    settings = json.loads(calls.readline() or "null")
    if settings is None:
        return
    cpu_seconds = settings["cpu_seconds"]
    limits = Limits(cpu_seconds, _WAITING * cpu_seconds + 1.0, settings["memory_bytes"], output_bytes=_OUTPUT_BYTES)
    try:
        pool = open_sandboxes(settings["packages"], allow_unsandboxed=settings["allow_unsandboxed"])
    except ScorerError as error:
        _write(answers, {"error": str(error)})
        return
    _write(answers, {})
    threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))  # more programs at once would be short of processor time
    for line in calls:
        call = json.loads(line)
        deadline = time.monotonic() + call["seconds"] * (1 - _REPLY_SHARE)
        threads.submit(_answer, pool, limits, call, deadline, answers).add_done_callback(_end_if_failed)
    pool.close()
    os._exit(0)  # without waiting for programs, which end as their channels close


def _answer(pool: SandboxPool, limits: Limits, call: Mapping[str, object], deadline: float, answers: TextIO) -> None:
    try:
        outcome = _outcome(pool, limits, str(call["code"]), deadline)
    except (SandboxError, ScorerError) as error:
        outcome = {"error": str(error)}
    _write(answers, {"call": call["call"], **outcome})


def _outcome(pool: SandboxPool, limits: Limits, code: str, deadline: float) -> dict[str, object]:
    """How the program ended. Raises SandboxError if no sandbox starts, or if the sandbox dies."""
    with closing(pool.take()) as sandbox:
        left = deadline - time.monotonic()
        if left < _MIN_SECONDS:
            return {"failure": "time", "exit_code": 0, "wall_seconds": 0.0, "stdout": "", "stderr": ""}
        wall_seconds = min(limits.wall_seconds, left)
        ended = sandbox.run("script", ["", code], replace(limits, wall_seconds=wall_seconds))
    cut = f"[the last {TAIL_BYTES} bytes of standard error]\n" if len(ended.stderr) == TAIL_BYTES else ""
    texts = {"stdout": ended.stdout.decode(errors="replace"), "stderr": cut + ended.stderr.decode(errors="replace")}
    return {"failure": ended.failure, "exit_code": ended.exit_code, "wall_seconds": wall_seconds, **texts}


def _write(answers: TextIO, message: Mapping[str, object]) -> None:
    with _writing:
        answers.write(json.dumps(message) + "\n")
        answers.flush()


def _end_if_failed(ended: Future[None]) -> None:
    """A bug ends the process, so that nobody waits for the answer."""
    if (error := ended.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


if __name__ == "__main__":
    main()
