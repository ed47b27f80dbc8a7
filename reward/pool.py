"""Worker processes for scorers that may hang or crash: user's functions and user's patterns.

Every thread of the pool owns one process and speaks with it alone, so a hang or a crash costs exactly the item that caused it:
answers come back one by one, which tells the culprit (the first item without one); its process is killed and the rest of the
chunk goes to a fresh process.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from protos.contracts import Score, Scored, ScoreItem, Unscored
from protos.errors import ScorerError

_CHUNK_ITEMS = 16  # items sent at once: amortises the wake-ups, and bounds what waits behind a slow item
_OUTPUT_TAIL_BYTES = 2000
# -P: the working folder stays off the path until our modules are loaded, see reward.worker
_BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); from reward.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"

_CLOSING = Unscored("infrastructure", "the scorer is closing")


class _HungError(Exception):
    """No answer within the item's time."""


class _DiedError(Exception):
    """The process closed its end."""


class WorkerProcess:
    """One process with the judge loaded, used by one thread.

    The thread that creates it must outlive it: the kernel ends the process with that thread.
    """

    def __init__(self, scorer: str, arguments: Mapping[str, Any], startup_seconds: float) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", _BOOTSTRAP, str(Path(__file__).resolve().parents[1])]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,  # killed with whatever it starts; Ctrl-C is the service's to handle
            )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._output_tail = b""
        self._received = b""
        self._unsent = json.dumps({"scorer": scorer, "arguments": dict(arguments)}).encode() + b"\n"
        self._selector = selectors.DefaultSelector()
        for source in (self._channel, self._output):
            os.set_blocking(source.fileno(), False)
            self._selector.register(source, selectors.EVENT_READ)
        self._await_ready(scorer, startup_seconds)

    def _await_ready(self, scorer: str, startup_seconds: float) -> None:
        try:
            (reply,) = self._messages(time.monotonic() + startup_seconds)
        except _HungError:
            self.kill()
            raise ScorerError(f"reward.scorer {scorer}: it did not import within {startup_seconds:g} s") from None
        except _DiedError:
            raise ScorerError(f"reward.scorer {scorer}: the process that imports it {self.epitaph()}") from None
        if "error" in reply:
            self.kill()
            raise ScorerError(reply["error"])

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def judge(self, lines: Sequence[bytes], timeout_seconds: float) -> list[Score]:
        """One score an encoded item, in order. Fewer only if the last one tells of a hang or a crash: the process is then dead."""
        scores: list[Score] = []
        self._unsent = b"".join(lines)
        while len(scores) < len(lines):
            try:  # the clock starts anew with every answer, so it runs for one item
                scores.extend(map(_decode, self._messages(time.monotonic() + timeout_seconds)))
            except _HungError:
                self.kill()
                return [*scores, Unscored("timeout", f"no answer within {timeout_seconds:g} s")]
            except _DiedError:
                return [*scores, Unscored("crashed", f"the scoring process {self.epitaph()}")]
        return scores

    def _messages(self, deadline: float) -> list[dict[str, Any]]:
        """Sends what is unsent, and returns the messages that arrive first (at least one)."""
        while b"\n" not in self._received:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
            self._selector.modify(self._channel, events)
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _HungError
            for key, event in ready:
                if key.fileobj is self._output:
                    self._forward_output()
                elif event & selectors.EVENT_READ:
                    self._receive()
                else:
                    self._send()
            if time.monotonic() > deadline and b"\n" not in self._received:
                raise _HungError  # one that prints for ever is always ready
        *complete, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in complete]

    def _receive(self) -> None:
        try:
            data = self._channel.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise _DiedError
        self._received += data

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[self._channel.send(self._unsent) :]
        except (BrokenPipeError, ConnectionResetError):
            self._unsent = b""  # the read that follows tells

    def _forward_output(self) -> None:
        data = self._output.read(1 << 16)
        if data:
            self._output_tail = (self._output_tail + data)[-_OUTPUT_TAIL_BYTES:]
            sys.stderr.write(data.decode(errors="replace"))
        elif data == b"":
            self._selector.unregister(self._output)

    def epitaph(self) -> str:
        """Ends the process, and says how it died and what it wrote last."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.poll()
        self.kill()
        while self._output in [key.fileobj for key, _ in self._selector.select(0)]:
            self._forward_output()
        if code is None:
            how = "closed its line"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        last_words = self._output_tail.decode(errors="replace").strip().rpartition("\n")[2]
        return how + (f"; it last wrote: {last_words[:200]}" if last_words else "")

    def kill(self) -> None:
        """Ends the process and its children at once; may be called again, and from another thread."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10.0)

    def close(self) -> None:
        """Frees what the dead process left behind."""
        self.kill()
        self._selector.close()
        self._channel.close()
        self._output.close()


class ScorerPool:
    """A scorer whose judge runs in `num_workers` processes. Thread-safe; `score` blocks its caller.

    Raises:
        ScorerError: at construction, if the judge cannot be loaded.
    """

    def __init__(
        self,
        scorer: str,
        arguments: Mapping[str, Any],
        *,
        num_workers: int,
        timeout_seconds: float,
        startup_seconds: float = 60.0,
    ) -> None:
        self.name = scorer
        self.replaced_workers = 0
        self._arguments = arguments
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._startup_seconds = startup_seconds
        self._lock = threading.Lock()
        self._workers: set[WorkerProcess] = set()
        self._mine = threading.local()
        self._closing = False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="scorer")
        try:
            self._threads.submit(self._worker).result()
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One result an item, in order. An item takes at most the time-out, and what hangs or crashes is unscored alone."""
        lines = [_encode(item) for item in items]
        sent = [line for line in lines if isinstance(line, bytes)]
        size = min(_CHUNK_ITEMS, -(-len(sent) // self._num_workers)) or 1
        chunks = [sent[start : start + size] for start in range(0, len(sent), size)]
        with self._lock:
            futures = [] if self._closing else [self._threads.submit(self._score_chunk, chunk) for chunk in chunks]
        scores: list[Score] = []
        for future in futures:
            with suppress(CancelledError):
                scores.extend(future.result())
        scores += [_CLOSING] * (
            len(sent) - len(scores)
        )  # the pool was closed: what was cancelled is at the end of its queue
        answers = iter(scores)
        return [line if isinstance(line, Unscored) else next(answers) for line in lines]

    def close(self) -> None:
        """Kills the processes; calls of `score` under way return at once, their rest unscored (`infrastructure`)."""
        with self._lock:
            self._closing = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.close()

    def _score_chunk(self, lines: Sequence[bytes]) -> list[Score]:
        scores: list[Score] = []
        while len(scores) < len(lines) and not self._closing:
            try:
                worker = self._worker()
            except (ScorerError, OSError) as error:
                # It did load at first: what fails now is the machine (memory, processes, a file that went), not the answer.
                scores += [Unscored("infrastructure", f"no scoring process: {error}")] * (len(lines) - len(scores))
                continue
            answered = worker.judge(lines[len(scores) :], self._timeout_seconds)
            if self._closing and not worker.alive:
                answered.pop()  # it did not hang or crash, it was killed by `close`
            scores += answered
        return scores + [_CLOSING] * (len(lines) - len(scores))

    def _worker(self) -> WorkerProcess:
        """This thread's process, replaced if it died."""
        worker: WorkerProcess | None = getattr(self._mine, "worker", None)
        if worker is not None and worker.alive:
            return worker
        if worker is not None:
            self.replaced_workers += 1
            with self._lock:
                self._workers.discard(worker)
            self._mine.worker = None
            worker.close()
        fresh = WorkerProcess(self.name, self._arguments, self._startup_seconds)
        with self._lock:
            self._workers.add(fresh)
            closing = self._closing
        self._mine.worker = fresh
        if closing:
            fresh.close()
            raise ScorerError("the scorer is closing")
        return fresh


def _encode(item: ScoreItem) -> bytes | Unscored:
    fields = {
        "data_source": item.data_source,
        "solution": item.solution,
        "ground_truth": item.ground_truth,
        "extra_info": dict(item.extra_info),
    }
    try:
        return json.dumps(fields).encode() + b"\n"
    except (TypeError, ValueError) as error:
        return Unscored("invalid_input", f"the item is not JSON: {error}")


def _decode(message: Mapping[str, Any]) -> Score:
    if "reason" in message:
        return Unscored(message["reason"], message["detail"])
    return Scored(message["value"], message["breakdown"])
