"""The main loop of a worker process: it answers chunks until the other end closes the channel.

A chunk names its scorer, so any worker can judge it; judges are built once, and the last ones are kept. Messages are
lines of JSON over a socket, never pickle.

User's code can read the socket, too. So a chunk is read completely before any of it is answered. If something that an
item left running takes part of a later chunk, the worker never answers that chunk, and is replaced.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO, cast

from tandem.protos.contracts import ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.contracts import AnyJudge, BatchJudge, Scorer
from tandem.reward.registry import SCORERS, make_judge, preload
from tandem.reward.workers.answers import encode_score, line
from tandem.reward.workers.function import CoroutineJudge

MAX_JUDGES = 32
_REARM_SECONDS = 0.25  # how often the limit of processor time is set: for every item it would cost too much
_OWN_SHARE = 0.9  # of an item's time, after which coroutines are cancelled here, so that the process survives
_PAGE_BYTES = resource.getpagesize()
_ROOM_WORDS = 70_000  # a little over 512 KiB, so CPython allocates 1 MiB: room for thousands of frames


class _RetireError(Exception):
    """A fresh process should judge the chunk."""


class Worker:
    """Serves one socket. The reply to a chunk is a line that says whether the judge is ready, then a line per item."""

    def __init__(self, channel: socket.socket, limits: Mapping[str, Any]) -> None:
        self._lines: BinaryIO = channel.makefile("rb")
        self._channel = channel
        self._pid = os.getpid()
        self._token = b""
        self._told = 0
        self._seconds = float(limits["seconds"])
        self._cpu_seconds = float(limits["cpu_seconds"])
        self._memory_bytes = int(limits["memory_bytes"])
        self._judges: OrderedDict[str, AnyJudge] = OrderedDict()
        self._armed_at = -1.0
        self._user_folder = ""
        self._idle_bytes = 0
        self._judged = 0

    def serve(self) -> None:
        """Serves until end of file, or until a fresh process should take over because memory leaked or ran out."""
        os.register_at_fork(after_in_child=self._close_in_child)
        while header := self._lines.readline():
            chunk = json.loads(header)
            self._token, self._told = chunk["token"].encode(), 0
            try:
                text = self._read(chunk["bytes"])
                if len(text) < chunk["bytes"]:
                    return
                judge, lines = self._judge(chunk), BytesIO(text)
                self._say({"ready": True, "batch": isinstance(judge, BatchJudge)})
                if isinstance(judge, BatchJudge):
                    self._judge_batch(judge, lines, chunk["items"])
                else:
                    self._judge_each(judge, lines)
            except ScorerError as error:
                self._say({"error": str(error)})
            except _RetireError:
                self._say({"retire": True})
                return
            except MemoryError:
                self._judges.clear()
                self._say({"memory": True})
                return
            sys.stdout.flush()  # the user's prints appear in the log at once
            sys.stderr.flush()

    def _read(self, size: int) -> bytes:
        """The items of a chunk; shorter only at end of file."""
        try:
            return self._lines.read(size)
        except MemoryError:
            if self._judged:
                raise _RetireError from None  # earlier items may have leaked memory
            raise

    def _judge_each(self, judge: Any, lines: BinaryIO) -> None:
        judge_one = judge.judge
        for text in lines:
            self._arm()
            item = _decoded(text)
            score = judge_one(item) if isinstance(item, ScoreItem) else item
            # One write per item: whatever the next one does, this answer has left the process.
            self._send(self._line(encode_score(score)))
            self._judged += 1

    def _judge_batch(self, judge: BatchJudge, lines: BinaryIO, number: int) -> None:
        self._arm()
        read = [_decoded(text) for text in lines]
        items = [item for item in read if isinstance(item, ScoreItem)]
        scores = judge.judge_batch(items) if items else []
        assert len(scores) == len(items), f"a judge gave {len(scores)} results for {len(items)} items"
        results = iter(scores)
        answers = [encode_score(next(results) if isinstance(one, ScoreItem) else one) for one in read]
        self._send(b"".join(map(self._line, answers)))
        self._judged += number

    def _judge(self, chunk: Mapping[str, Any]) -> AnyJudge:
        if self._judged and self._data_bytes() > (self._idle_bytes + self._memory_bytes) // 2:
            raise _RetireError  # something leaks; later items must not suffer for it
        key = f"{chunk['scorer']} {chunk['arguments']}"
        judge = self._judges.get(key)
        if judge is not None:
            self._judges.move_to_end(key)
            return judge
        if chunk["scorer"] not in SCORERS:
            self._enter_users_folder(chunk["scorer"])
        preload(chunk["preload"])
        try:
            judge = make_judge(chunk["scorer"], json.loads(chunk["arguments"]))
            if isinstance(judge, CoroutineJudge):
                judge = replace(judge, seconds=_OWN_SHARE * self._seconds)
            if isinstance(judge, Scorer):
                judge.start()
        except MemoryError:
            raise ScorerError("it does not load within reward.limits.memory_bytes") from None
        self._judges[key] = judge
        if len(self._judges) > MAX_JUDGES:
            _, oldest = self._judges.popitem(last=False)
            if isinstance(oldest, Scorer):
                oldest.close()
        self._idle_bytes = self._data_bytes()
        return judge

    def _enter_users_folder(self, scorer: str) -> None:
        """A process imports user's modules from one folder only, since those of two may have the same names."""
        place = scorer.rpartition(":")[0]
        folder = str(Path(place).resolve().parent) if place.endswith(".py") else os.getcwd()
        if not self._user_folder:
            self._user_folder = folder
            sys.path.insert(0, os.getcwd())  # not earlier: their files must not replace library modules
        if self._user_folder != folder:
            raise _RetireError

    def _arm(self) -> None:
        """Sets the limit of processor time for the next item; past it the kernel sends SIGXCPU."""
        now = time.monotonic()
        if now - self._armed_at < _REARM_SECONDS:
            return
        self._armed_at = now
        used = time.process_time()
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        # Whole seconds, rounded up plus one: a single spinning thread reaches an equal wall time limit first.
        wanted = int(used + self._cpu_seconds) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))

    def _data_bytes(self) -> int:
        """Private memory, as RLIMIT_DATA counts it."""
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[5]) * _PAGE_BYTES

    def _say(self, message: Mapping[str, object]) -> None:
        self._send(self._line(json.dumps(message).encode()))

    def _line(self, payload: bytes) -> bytes:
        self._told += 1
        return line(self._token, self._told, payload)

    def _send(self, data: bytes) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # a child that user's code forked must not become a second worker
        self._channel.sendall(data)

    def _close_in_child(self) -> None:
        """Closes the channel in a forked child. Only once: the descriptor may belong to another file later."""
        descriptor = self._channel.detach()
        if descriptor >= 0:
            os.close(descriptor)


def _decoded(line: bytes) -> ScoreItem | Unscored:
    try:
        return ScoreItem._make(json.loads(line))
    except RecursionError:
        return Unscored("invalid_input", "ground_truth or extra_info is nested too deeply")


def with_room(function: FunctionType) -> FunctionType:
    """The function, with a frame so large that the frames of all it calls share its memory block.

    CPython 3.11 and 3.12 store frames in blocks of 16 KiB, and allocate and free a block whenever calls cross its end.
    math-verify's parsers recurse around that depth and cross it hundreds of times per answer. Part `math` of
    benchmarks/reward.py runs at 0.66 of plain loops' time with this; without it, math-verify takes up to 1.4 times
    the processor time.
    """
    code = function.__code__.replace(co_stacksize=_ROOM_WORDS)
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


_serve_with_room = with_room(cast(FunctionType, Worker.serve))


def serve(descriptor: int, limits: Mapping[str, object]) -> None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with socket.socket(fileno=descriptor) as channel:
        _serve_with_room(Worker(channel, limits))
