"""The line to a reward model's process, with a stand-in for the model that hangs, dies and babbles."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from typing import Any

import pytest

from protos.contracts import Score, Scored, Unscored
from protos.errors import ScorerError
from reward import model_lane
from reward.line_process import LineProcess
from reward.model_lane import ModelLane, Question


def refused(score: Score) -> tuple[str, str]:
    assert isinstance(score, Unscored), score
    return score.reason, score.detail


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(module: str, environment: Any) -> LineProcess:
        assert module == "reward.model_process" and environment["HF_HUB_OFFLINE"] == "1"
        return LineProcess("tests.stand_in_model", environment)

    monkeypatch.setattr(model_lane, "LineProcess", start)


def lane(path: str = "fine", batch: int = 4, timeout_seconds: float = 2.0) -> ModelLane:
    return ModelLane({"path": path, "batch": batch}, startup_seconds=60.0, timeout_seconds=timeout_seconds)


def ask(one: ModelLane, answers: list[str]) -> list[Score]:
    return one.ask([Question(None, answer) for answer in answers])


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("bad", "reason"), [("hang", "timeout"), ("die", "crashed")])
def test_a_culprit_is_unscored_alone(bad: str, reason: str) -> None:
    answers = ["x" * n if n not in (2, 9) else bad for n in range(12)]
    with closing(lane()) as one:
        scores = ask(one, answers)
        assert one.num_starts == 5, "each of the two kills its batch's process, and its own"
    assert {n for n, score in enumerate(scores) if isinstance(score, Unscored)} == {2, 9}
    assert {refused(scores[n])[0] for n in (2, 9)} == {reason}
    assert [score for n, score in enumerate(scores) if n not in (2, 9)] == [
        Scored(n) for n in range(12) if n not in (2, 9)
    ]
    if bad == "die":
        assert refused(scores[2])[1] == "the reward model's process was killed by SIGKILL; it last wrote: out of luck"


@pytest.mark.usefixtures("stand_in")
def test_one_that_is_alone_in_its_batch_is_not_tried_again() -> None:
    with closing(lane(batch=1)) as one:
        assert [type(score) for score in ask(one, ["a", "die", "b"])] == [Scored, Unscored, Scored]
        assert one.num_starts == 2


@pytest.mark.usefixtures("stand_in")
def test_a_process_that_dies_between_two_calls_is_replaced() -> None:
    with closing(lane()) as one:
        assert ask(one, ["a"]) == [Scored(1)]
        first = one.pid
        os.kill(first, signal.SIGKILL)
        assert ask(one, ["ab", "abc"]) == [Scored(2), Scored(3)]
        assert one.pid != first and one.num_starts == 2


@pytest.mark.usefixtures("stand_in")
def test_one_that_prints_much_is_heard() -> None:
    with closing(lane(timeout_seconds=60.0)) as one:
        assert ask(one, ["babble", "a"]) == [Scored(6), Scored(1)]


@pytest.mark.usefixtures("stand_in")
def test_many_callers_share_one_process() -> None:
    results: dict[int, list[Score]] = {}
    with closing(lane(timeout_seconds=60.0)) as one:

        def work(size: int) -> None:
            results[size] = ask(one, ["x" * size] * 20)

        threads = [threading.Thread(target=work, args=(size,)) for size in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert one.num_starts == 1
    assert results == {size: [Scored(size)] * 20 for size in range(16)}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("path", "told"), [("unloadable", "it is broken"), ("dies", "its process exited with code 3")])
def test_a_model_that_does_not_load_is_infrastructure(path: str, told: str) -> None:
    with closing(lane(path)) as one:
        with pytest.raises(ScorerError, match=told):
            one.start()
        reason, detail = refused(ask(one, ["a"])[0])
        assert reason == "infrastructure" and told in detail
        for _ in range(20):
            ask(one, ["a"])
        assert one.num_starts <= 3, "it is not started again for every call"


@pytest.mark.usefixtures("stand_in")
def test_close_ends_what_is_under_way() -> None:
    one = lane(timeout_seconds=600.0, batch=1)
    assert ask(one, ["a"]) == [Scored(1)]
    pid = one.pid
    results: list[Score] = []
    caller = threading.Thread(target=lambda: results.extend(ask(one, ["ab", "hang", "abc"])))
    caller.start()
    caller.join(0.5)
    one.close()
    caller.join(30.0)
    end = Unscored("infrastructure", "the scorer is closing")
    assert results[1:] == [end, end] and results[0] in (Scored(2), end)
    assert ask(one, ["a"]) == [end]
    with pytest.raises(ScorerError, match="is closing"):
        one.start()
    one.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "reward-model"]


def test_a_lane_that_was_never_asked_holds_nothing() -> None:
    before = threading.active_count()
    one = lane()
    assert one.pid == 0 and threading.active_count() == before
    one.close()
