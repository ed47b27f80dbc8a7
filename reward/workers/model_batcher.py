"""One thread owns the process of a reward model, gathers questions of all callers into chunks, and replaces it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tandem.protos.contracts import Score, Scored, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.scheduling.cancellation import CLOSING, current_token
from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority, PriorityQueue
from tandem.reward.workers.child_process import DiedError, HungError, LineProcess

T = TypeVar("T")

_CHUNK_QUESTIONS = 256  # of one priority: enough to find rows of similar length
_CHUNK_CHARACTERS = 1 << 20
_CHECK_SECONDS = 5.0  # how often a caller checks that the thread is alive
_END_SECONDS = 20.0
_MAX_PAUSE_SECONDS = 60.0
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(slots=True, eq=False)
class Question:
    """One answer to be scored: `prompt` is text, chat messages or None."""

    prompt: Any
    answer: str
    score: Future[Score] = field(default_factory=Future)
    alone: bool = False
    """It was in a batch that hung or crashed, and is retried by itself to find the question at fault."""

    @property
    def size(self) -> int:
        return len(self.answer) + len(str(self.prompt))

    def settle(self, score: Score) -> None:
        """Sets its score, unless it has one: its call may have been cancelled."""
        with suppress(InvalidStateError):
            self.score.set_result(score)


class ModelBatcher:
    """Scores questions in one process, which starts with the first. Thread-safe.

    A turn in the priority queue is one forward pass: before each further one the process asks whether to continue, and
    returns the rest of its chunk if another priority is next. If a forward pass hangs or crashes, the questions of its
    batch are asked one by one in a new process, so that only the culprit is unscored.
    """

    def __init__(self, setup: Mapping[str, object], *, startup_seconds: float, timeout_seconds: float) -> None:
        self.num_starts = 0
        self._setup = dict(setup)
        self._startup_seconds = startup_seconds
        self._timeout_seconds = timeout_seconds
        self._wake = threading.Condition()
        self._queue: PriorityQueue[Question] = PriorityQueue()
        self._starts: list[Future[str]] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        self._process: LineProcess | None = None
        self._failed_starts = 0
        self._start_after = 0.0
        self._last_failure = ""

    def start(self) -> None:
        """Loads the model now. Raises ScorerError if it cannot be loaded."""
        wanted: Future[str] = Future()
        self._submit([], [wanted])
        if problem := self._await(wanted, CLOSING.detail):
            raise ScorerError(problem)

    def ask(self, questions: Sequence[Question], priority: Priority = "calls") -> list[Score]:
        """One score per question, in order. Blocks until all are known or the caller's token is cancelled."""
        if not self._submit(questions, [], priority):
            return [CLOSING] * len(questions)
        with current_token().on_cancel(partial(_withdraw, questions)):
            return [self._await(question.score, CLOSING) for question in questions]

    def waiting(self, priority: Priority) -> int:
        return self._queue.waiting(priority)

    def close(self) -> None:
        """Ends the process; running questions become unscored (`infrastructure`). May be called again."""
        with self._wake:
            self._closing = True
            process, thread = self._process, self._thread
            self._wake.notify_all()
        if process is not None:
            process.kill()
        if thread is not None:
            thread.join(_END_SECONDS)

    def _submit(
        self, questions: Sequence[Question], starts: Sequence[Future[str]], priority: Priority = "ring"
    ) -> bool:
        with self._wake:
            if self._closing:
                return False
            for question in questions:
                self._queue.add(priority, question)
            self._starts.extend(starts)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="reward-model", daemon=True)
                self._thread.start()
            self._wake.notify_all()
        return True

    def _await(self, future: Future[T], otherwise: T) -> T:
        while True:
            alive = self._thread is not None and self._thread.is_alive()
            try:
                return future.result(timeout=_CHECK_SECONDS if alive else 0.0)
            except TimeoutError:
                if not alive:
                    return otherwise

    def _serve(self) -> None:
        """Main function of the thread. The kernel ends the process with it."""
        priority: Priority = "ring"
        chunk: list[Question] = []
        try:
            while not self._closing:
                with self._wake:
                    if not (self._queue or self._starts or self._closing):
                        self._wake.wait(_CHECK_SECONDS)
                    starts, self._starts = self._starts, []
                    priority, chunk = self._next_chunk()
                if not starts and not chunk:
                    continue
                problem = self._ensure_process()
                for wanted in starts:
                    wanted.set_result(problem)
                if problem:
                    for question in chunk:
                        question.settle(Unscored("infrastructure", problem))
                else:
                    self._converse(priority, chunk)
        except BaseException as error:  # a bug: every caller raises it
            with self._wake:
                waiting = self._queue.clear()
            for question in (*chunk, *waiting):
                with suppress(InvalidStateError):
                    question.score.set_exception(error)
            raise
        finally:
            if self._process is not None:
                self._process.close()
            with self._wake:
                _withdraw(self._queue.clear())

    def _next_chunk(self) -> tuple[Priority, list[Question]]:
        """Questions of the next priority, enough to batch rows of similar length; empty if none wait."""
        self._forget_settled()
        found = self._queue.pop()
        if found is None:
            return "ring", []
        priority, question = found
        chunk = [question]
        characters = question.size
        while not question.alone and len(chunk) < _CHUNK_QUESTIONS and (head := self._head(priority)) is not None:
            characters += head.size
            if head.alone or characters > _CHUNK_CHARACTERS:
                break
            chunk.append(self._queue.pop_from(priority))
        return priority, chunk

    def _continues(self, priority: Priority, rest: Iterable[Question]) -> bool:
        """Whether the next forward pass is this priority's turn, and the rest of the chunk is still wanted."""
        with self._wake:
            self._forget_settled()
            return not all(question.score.done() for question in rest) and self._queue.try_continue(priority)

    def _head(self, priority: Priority) -> Question | None:
        """The first question of a priority that has no score yet; drops those before it."""
        while (head := self._queue.first(priority)) is not None and head.score.done():
            self._queue.pop_from(priority)
        return head

    def _forget_settled(self) -> None:
        """Drops settled questions of every priority, so that they take no turn."""
        for priority in PRIORITIES:
            self._head(priority)

    def _ensure_process(self) -> str:
        """Starts the process if needed; returns why it cannot be started, "" on success."""
        if self._process is not None:
            if self._process.alive:
                return ""
            self._process.close()
            self._process = None
        now = time.monotonic()
        if now < self._start_after:
            return f"{self._last_failure}; it is tried again in {self._start_after - now:.0f} s"
        problem = self._start_process()
        self._failed_starts = self._failed_starts + 1 if problem else 0
        if problem:
            pause = min(2.0 ** (self._failed_starts - 1), _MAX_PAUSE_SECONDS)
            self._start_after, self._last_failure = time.monotonic() + pause, problem
        return problem

    def _start_process(self) -> str:
        name = f"reward model {self._setup['path']}"
        try:
            process = LineProcess("tandem.reward.workers.model_process", _ENVIRONMENT)
        except OSError as error:
            return f"{name}: no process: {error}"
        self.num_starts += 1
        with self._wake:
            self._process = process
            if self._closing:
                return CLOSING.detail
        process.send(self._setup)
        try:
            reply = next(process.receive(self._startup_seconds))
        except HungError:
            process.kill()
            return f"{name} did not load within {self._startup_seconds:g} s"
        except DiedError:
            return f"{name}: its process {process.exit_reason()}"
        if "error" in reply:
            process.kill()
            return f"{name}: {reply['error']}"
        return ""

    def _converse(self, priority: Priority, chunk: Sequence[Question]) -> None:
        """Asks the process and stores its answers. Questions that gave way to another priority go back to the front of
        their queue. If the process hangs or dies, the questions it was working on do too, to be asked one by one.
        """
        assert self._process is not None, "it was just started"
        pending = dict(enumerate(chunk))
        suspects = list(pending)
        gave_way = False
        asked = [{"id": n, "prompt": one.prompt, "answer": one.answer} for n, one in pending.items()]
        self._process.send({"questions": asked})
        try:
            while True:
                for message in self._process.receive(self._timeout_seconds):
                    if "done" in message:
                        if gave_way:
                            self._put_back(priority, pending.values())
                        return
                    if "next" in message:
                        gave_way = not self._continues(priority, pending.values())
                        self._process.send({"continue": not gave_way})
                    suspects = message.get("working", suspects)
                    for number, value in message.get("scores", ()):
                        pending.pop(number).settle(Scored(value))
                    for number, reason, detail in message.get("refused", ()):
                        pending.pop(number).settle(Unscored(reason, detail))
        except HungError:
            self._process.kill()
            fault = Unscored("timeout", f"the reward model gave no answer within {self._timeout_seconds:g} s")
        except DiedError:
            fault = Unscored("crashed", f"the reward model's process {self._process.exit_reason()}")
        if self._closing:  # `close` killed it
            _withdraw(pending.values())
            return
        suspects = [number for number in suspects if number in pending]
        if len(suspects) == 1:
            pending.pop(suspects.pop()).settle(fault)
        for number in suspects or pending:
            pending[number].alone = True
        self._put_back(priority, pending.values())

    def _put_back(self, priority: Priority, questions: Iterable[Question]) -> None:
        with self._wake:
            for index, question in enumerate(questions):
                self._queue.push_front(priority, question, index)


def _withdraw(questions: Iterable[Question]) -> None:
    for question in questions:
        question.settle(CLOSING)
