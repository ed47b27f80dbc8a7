"""The batcher in front of a reward model's process, with a stand-in that hangs, dies and writes output."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from tandem.protos.contracts import Score, Scored, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.scheduling.cancellation import CancellationToken
from tandem.reward.scheduling.priority_queue import Priority
from tandem.reward.workers import model_batcher
from tandem.reward.workers.child_process import LineProcess
from tandem.reward.workers.model_batcher import ModelBatcher, Question
from tests.support.paths import ROOT
from tests.support.scores import refused
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(module: str, environment: Any) -> LineProcess:
        assert module == "tandem.reward.workers.model_process" and environment["HF_HUB_OFFLINE"] == "1"
        return LineProcess("tests.support.stand_in_model", {**environment, "PYTHONPATH": str(ROOT)})

    monkeypatch.setattr(model_batcher, "LineProcess", start)


CLOSING = Unscored("infrastructure", "the scorer is closing")


def make_batcher(path: str = "fine", batch: int = 4, timeout_seconds: float = 1.0) -> ModelBatcher:
    return ModelBatcher({"path": path, "batch": batch}, startup_seconds=60.0, timeout_seconds=timeout_seconds)


def ask(one: ModelBatcher, answers: list[str]) -> list[Score]:
    return one.ask([Question(None, answer) for answer in answers])


@pytest.mark.parametrize(("bad", "reason"), [("hang", "timeout"), ("die", "crashed")])
def test_only_the_question_that_hangs_or_crashes_is_unscored(bad: str, reason: str) -> None:
    answers = ["x" * n if n not in (2, 9) else bad for n in range(12)]
    with closing(make_batcher()) as one:
        scores = ask(one, answers)
        assert one.num_starts == 5, "each of the two kills its batch's process, and its own"
    assert {n for n, score in enumerate(scores) if isinstance(score, Unscored)} == {2, 9}
    assert {refused(scores[n])[0] for n in (2, 9)} == {reason}
    assert [score for n, score in enumerate(scores) if n not in (2, 9)] == [
        Scored(n) for n in range(12) if n not in (2, 9)
    ]
    if bad == "die":
        assert refused(scores[2])[1] == "the reward model's process was killed by SIGKILL; it last wrote: out of luck"


def test_a_question_alone_in_its_batch_is_not_retried_and_a_process_that_died_between_calls_is_replaced() -> None:
    with closing(make_batcher(batch=1)) as one:
        assert [type(score) for score in ask(one, ["a", "die", "b"])] == [Scored, Unscored, Scored]
        assert one.num_starts == 2
        assert one._process is not None
        os.kill(one._process.pid, signal.SIGKILL)
        assert ask(one, ["ab", "abc"]) == [Scored(2), Scored(3)]
        assert one.num_starts == 3


def test_much_output_of_the_process_does_not_block_it() -> None:
    with closing(make_batcher(timeout_seconds=60.0)) as one:
        assert ask(one, ["babble", "a"]) == [Scored(6), Scored(1)]


def test_many_callers_share_one_process() -> None:
    with closing(make_batcher(timeout_seconds=60.0)) as one, ThreadPoolExecutor(16) as threads:
        results = threads.map(lambda size: ask(one, ["x" * size] * 20), range(16), timeout=60.0)
        assert list(results) == [[Scored(size)] * 20 for size in range(16)]
        assert one.num_starts == 1


@pytest.mark.parametrize(("path", "told"), [("unloadable", "it is broken"), ("dies", "its process exited with code 3")])
def test_a_model_that_does_not_load_is_infrastructure(path: str, told: str) -> None:
    with closing(make_batcher(path)) as one:
        with pytest.raises(ScorerError, match=told):
            one.start()
        reason, detail = refused(ask(one, ["a"])[0])
        assert reason == "infrastructure" and told in detail
        for _ in range(20):
            ask(one, ["a"])
        assert one.num_starts <= 3, "it is not started again for every call"


def test_close_ends_running_questions() -> None:
    one = make_batcher(timeout_seconds=600.0, batch=1)
    assert ask(one, ["a"]) == [Scored(1)]
    assert one._process is not None
    pid = one._process.pid
    results: list[Score] = []
    caller = threading.Thread(target=lambda: results.extend(ask(one, ["ab", "hang", "abc"])))
    caller.start()
    caller.join(0.5)
    one.close()
    caller.join(30.0)
    assert results[1:] == [CLOSING, CLOSING] and results[0] in (Scored(2), CLOSING)
    assert ask(one, ["a"]) == [CLOSING]
    with pytest.raises(ScorerError, match="is closing"):
        one.start()
    one.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "reward-model"]


def test_a_batcher_that_was_never_asked_starts_nothing() -> None:
    before = threading.active_count()
    with closing(make_batcher()) as one:
        assert one.num_starts == 0 and threading.active_count() == before


# ---- priorities ----


class Model:
    """Speaks the process's protocol in this process, two answers per forward pass. The first forward pass waits for the
    test.
    """

    pid, alive = 1, True

    def __init__(self) -> None:
        self.forwards: list[list[str]] = []
        self.let_go = threading.Event()
        self._said: list[Any] = []
        self._lines = self._talk()

    def send(self, message: Any) -> None:
        self._said.append(message)

    def receive(self, seconds: float) -> Iterator[Any]:
        yield next(self._lines)

    def kill(self) -> None:
        self.let_go.set()

    def close(self) -> None:
        pass

    def _talk(self) -> Iterator[Any]:
        assert self._said.pop()["path"] == "fine"
        yield {"ready": True}
        while True:
            questions = self._said.pop()["questions"]
            yield {"working": [question["id"] for question in questions]}
            for start in range(0, len(questions), 2):
                if start:
                    yield {"next": True}
                    if not self._said.pop()["continue"]:
                        break
                batch = questions[start : start + 2]
                self.forwards.append([question["answer"] for question in batch])
                assert self.let_go.wait(30.0)
                yield {"scores": [[question["id"], float(question["answer"][1:])] for question in batch]}
            yield {"done": True}


class Asking(threading.Thread):
    """Asks questions in a thread of its own; the answers are worth 0, 1, 2, …"""

    def __init__(self, one: ModelBatcher, priority: Priority, number: int) -> None:
        super().__init__(daemon=True)
        self._one, self._priority = one, priority
        self._questions = [Question(None, f"{priority[0]}{n}") for n in range(number)]
        self.cancellation = CancellationToken()
        self.scores: list[Score] = []
        self.start()

    def run(self) -> None:
        with self.cancellation.as_current():
            self.scores = self._one.ask(self._questions, self._priority)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model()
    monkeypatch.setattr(model_batcher, "LineProcess", lambda module, environment: made)
    return made


def test_the_ring_gets_the_next_forward_pass_and_a_job_its_share(model: Model) -> None:
    with closing(make_batcher()) as one:
        job = Asking(one, "jobs", 20)
        eventually(lambda: model.forwards)
        ring = Asking(one, "ring", 12)
        eventually(lambda: one.waiting("ring") == 12)
        model.let_go.set()
        ring.join(30.0)
        job.join(30.0)
    assert "".join(forward[0][0] for forward in model.forwards) == "jrrrjrrr" + "j" * 8
    assert all(len(forward) == 2 and forward[0][0] == forward[1][0] for forward in model.forwards)
    assert job.scores == [Scored(n) for n in range(20)] and ring.scores == [Scored(n) for n in range(12)]


def test_cancelled_questions_leave_the_queue(model: Model) -> None:
    with closing(make_batcher()) as one:
        gone = Asking(one, "calls", 4)
        eventually(lambda: model.forwards)
        waiting = Asking(one, "calls", 5)
        eventually(lambda: one.waiting("calls") == 5)
        stays = Asking(one, "calls", 2)
        eventually(lambda: one.waiting("calls") == 7)
        for asking in (gone, waiting):
            asking.cancellation.cancel()
            asking.join(30.0)
        assert gone.scores == [CLOSING] * 4 and waiting.scores == [CLOSING] * 5
        model.let_go.set()
        stays.join(30.0)
    assert stays.scores == [Scored(0), Scored(1)] and model.forwards == [["c0", "c1"], ["c0", "c1"]]
