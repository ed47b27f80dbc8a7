"""The line to a reward model's process: one thread owns it, gathers what all callers ask into chunks, and replaces it when it dies."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from protos.contracts import Score, Scored, Unscored
from protos.errors import ScorerError
from reward.line_process import DiedError, HungError, LineProcess
from reward.loop_thread import CLOSING

T = TypeVar("T")

_CHUNK_QUESTIONS = 256  # among so many, rows of similar length are found
_CHUNK_CHARACTERS = 1 << 20
_LOOK_SECONDS = 5.0  # how often a caller makes sure that the thread still lives
_END_SECONDS = 20.0
_LONGEST_PAUSE_SECONDS = 60.0
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(slots=True, eq=False)
class Question:
    """One answer to be scored: `prompt` is text, chat messages or None."""

    prompt: Any
    answer: str
    score: Future[Score] = field(default_factory=Future)
    alone: bool = False
    """It was in a batch that hung or crashed, and is tried once more by itself: then the blame is its own."""

    @property
    def size(self) -> int:
        return len(self.answer) + len(str(self.prompt))


class ModelLane:
    """Scores questions in one process, which starts with the first. Thread-safe.

    A forward that hangs or crashes costs the process; the questions of that batch go one by one to the next, so that the culprit
    alone is unscored.
    """

    def __init__(self, setup: Mapping[str, Any], *, startup_seconds: float, timeout_seconds: float) -> None:
        self.num_starts = 0
        self._setup = dict(setup)
        self._startup_seconds = startup_seconds
        self._timeout_seconds = timeout_seconds
        self._wake = threading.Condition()
        self._queue: deque[Question] = deque()
        self._starts: list[Future[str]] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        self._process: LineProcess | None = None
        self._failed_starts = 0
        self._start_after = 0.0
        self._last_failure = ""

    @property
    def pid(self) -> int:
        """Of the process, 0 if there is none."""
        process = self._process
        return process.pid if process is not None else 0

    def start(self) -> None:
        """Loads the model now.

        Raises:
            ScorerError: it cannot be loaded.
        """
        wanted: Future[str] = Future()
        self._hand_over([], [wanted])
        if problem := self._await(wanted, CLOSING.detail):
            raise ScorerError(problem)

    def ask(self, questions: Sequence[Question]) -> list[Score]:
        """One score a question, in order; blocks until all are known."""
        if not self._hand_over(questions, []):
            return [CLOSING] * len(questions)
        return [self._await(question.score, CLOSING) for question in questions]

    def close(self) -> None:
        """Ends the process; what is under way comes back unscored (`infrastructure`). May be called again."""
        with self._wake:
            self._closing = True
            process, thread = self._process, self._thread
            self._wake.notify_all()
        if process is not None:
            process.kill()
        if thread is not None:
            thread.join(_END_SECONDS)

    def _hand_over(self, questions: Sequence[Question], starts: Sequence[Future[str]]) -> bool:
        with self._wake:
            if self._closing:
                return False
            self._queue.extend(questions)
            self._starts.extend(starts)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="reward-model", daemon=True)
                self._thread.start()
            self._wake.notify_all()
        return True

    def _await(self, future: Future[T], otherwise: T) -> T:
        """The result; `otherwise` if the lane ended without one."""
        while True:
            alive = self._thread is not None and self._thread.is_alive()
            try:
                return future.result(timeout=_LOOK_SECONDS if alive else 0.0)
            except TimeoutError:
                if not alive:
                    return otherwise

    def _serve(self) -> None:
        """The lane's thread. The kernel ends the process with it."""
        chunk: list[Question] = []
        try:
            while not self._closing:
                with self._wake:
                    if not (self._queue or self._starts or self._closing):
                        self._wake.wait(_LOOK_SECONDS)
                    starts, self._starts = self._starts, []
                    chunk = self._next_chunk()
                if not starts and not chunk:
                    continue
                problem = self._ensure_process()
                for wanted in starts:
                    wanted.set_result(problem)
                if problem:
                    for question in chunk:
                        question.score.set_result(Unscored("infrastructure", problem))
                else:
                    self._converse(chunk)
        except BaseException as error:  # a bug: whoever waits raises it
            for question in (*chunk, *self._queue):
                if not question.score.done():
                    question.score.set_exception(error)
            raise
        finally:
            if self._process is not None:
                self._process.close()
            for question in self._queue:
                if not question.score.done():
                    question.score.set_result(CLOSING)

    def _next_chunk(self) -> list[Question]:
        chunk: list[Question] = []
        characters = 0
        while self._queue and len(chunk) < _CHUNK_QUESTIONS:
            question = self._queue[0]
            characters += question.size
            if chunk and (question.alone or characters > _CHUNK_CHARACTERS):
                break
            chunk.append(self._queue.popleft())
            if question.alone:
                break
        return chunk

    def _ensure_process(self) -> str:
        """Starts the process if it is not there; returns why it cannot be had, "" if it can."""
        if self._process is not None:
            if self._process.alive:
                return ""
            self._process.close()
            self._process = None
        now = time.monotonic()
        if now < self._start_after:
            return f"{self._last_failure}; it is tried again in {self._start_after - now:.0f} s"
        problem = self._start_process()
        if problem:
            self._failed_starts += 1
            pause = min(2.0 ** (self._failed_starts - 1), _LONGEST_PAUSE_SECONDS)
            self._start_after, self._last_failure = time.monotonic() + pause, problem
        else:
            self._failed_starts = 0
        return problem

    def _start_process(self) -> str:
        name = f"reward model {self._setup['path']}"
        try:
            process = LineProcess("reward.model_process", _ENVIRONMENT)
        except OSError as error:
            return f"{name}: no process: {error}"
        self.num_starts += 1
        with self._wake:
            self._process = process
            if self._closing:
                return CLOSING.detail
        process.say(self._setup)
        try:
            reply = next(process.hear(self._startup_seconds))
        except HungError:
            process.kill()
            return f"{name} did not load within {self._startup_seconds:g} s"
        except DiedError:
            return f"{name}: its process {process.epitaph()}"
        if "error" in reply:
            process.kill()
            return f"{name}: {reply['error']}"
        return ""

    def _converse(self, chunk: Sequence[Question]) -> None:
        """Asks the process and enters what it answers. If it hangs or dies, the suspects go back into the queue one by one."""
        assert self._process is not None, "it was just started"
        pending = dict(enumerate(chunk))
        suspects = list(pending)
        asked = [{"id": n, "prompt": one.prompt, "answer": one.answer} for n, one in pending.items()]
        self._process.say({"questions": asked})
        try:
            while True:
                for message in self._process.hear(self._timeout_seconds):
                    if "done" in message:
                        return
                    suspects = message.get("working", suspects)
                    for number, value in message.get("scores", ()):
                        pending.pop(number).score.set_result(Scored(value))
                    for number, reason, detail in message.get("refused", ()):
                        pending.pop(number).score.set_result(Unscored(reason, detail))
        except HungError:
            self._process.kill()
            fault = Unscored("timeout", f"the reward model gave no answer within {self._timeout_seconds:g} s")
        except DiedError:
            fault = Unscored("crashed", f"the reward model's process {self._process.epitaph()}")
        self._sort_out(pending, [number for number in suspects if number in pending], fault)

    def _sort_out(self, pending: dict[int, Question], suspects: Sequence[int], fault: Unscored) -> None:
        with self._wake:
            if self._closing:  # it was killed by `close`
                for question in pending.values():
                    question.score.set_result(CLOSING)
                return
            if len(suspects) == 1:
                pending.pop(suspects[0]).score.set_result(fault)
                suspects = []
            for number in suspects or pending:
                pending[number].alone = True
            self._queue.extendleft(reversed(pending.values()))
