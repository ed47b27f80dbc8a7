"""What a scoring process runs: it builds its judge, then answers one line a question, until the other end closes.

Lines of JSON over an inherited socket, never pickle. `reward.pool` starts it.
It imports neither grpc nor redis nor torch (unless the user's function does), so a replacement costs tens of milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any

from protos.contracts import Score, Scored, ScoreItem
from protos.errors import ScorerError
from reward.registry import make_judge

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serves the socket `descriptor` until end of file, or until process `parent` ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent died before the line above
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)  # what the user's code starts must not hold the line open
    channel = socket.socket(fileno=descriptor)
    lines = channel.makefile("r", encoding="utf-8", newline="\n")
    sys.path.insert(0, os.getcwd())  # only now: a user's file named like a module of ours must not replace it
    setup = json.loads(lines.readline())
    try:
        judge = make_judge(setup["scorer"], setup["arguments"])
    except ScorerError as error:
        _send(channel, {"error": str(error)})
        return
    _send(channel, {"ready": True})
    for line in lines:
        _send(channel, _encoded(judge.judge(ScoreItem(**json.loads(line)))))
        # User's prints appear in the service's log as they happen, not when a buffer is full.
        sys.stdout.flush()
        sys.stderr.flush()


def _encoded(score: Score) -> dict[str, Any]:
    if isinstance(score, Scored):
        return {"value": score.value, "breakdown": dict(score.breakdown)}
    return {"reason": score.reason, "detail": score.detail}


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")
