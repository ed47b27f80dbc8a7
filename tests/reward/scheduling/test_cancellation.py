"""Cancelled scoring calls: finished scores stay, waiting items leave every queue, and running items end soon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.config import RewardConfig
from tandem.reward.contracts import RemoteJudge
from tandem.reward.judging import _cut, judge_each, judge_remotely, wait_aside
from tandem.reward.scheduling.cancellation import CANCELLED, CLOSING, CancellationToken
from tandem.reward.scorers.judge import GenerativeJudge
from tandem.reward.scorers.remote import RemoteScorer
from tandem.reward.scoring import CompiledRubric, ScoringCore
from tests.reward.conftest import FUNCTIONS
from tests.support.misbehaving_server import Answer, Asked, MisbehavingServer, chat
from tests.support.waiting import eventually

PATIENCE_SECONDS = 20.0
RIGHT, WRONG = Scored(1.0, {"acc": 1.0}), Scored(0.0, {"acc": 0.0})


def items(*solutions: str, group: str = "") -> list[ScoreItem]:
    return [ScoreItem("d", solution, "1", {}, group) for solution in solutions]


class Scoring:
    """A core whose scorer hangs on demand, and threads that call it."""

    def __init__(self, folder: Path) -> None:
        functions, self._log = folder / "functions.py", folder / "judged"
        functions.write_text(FUNCTIONS)
        slow = {"scorer": f"{functions}:compute_score", "arguments": {"log": str(self._log)}}
        config = {"scorer": "slow", "scorers": {"slow": slow}, "timeout_seconds": 60.0}
        self.core = ScoringCore(RewardConfig.model_validate(config))
        self._threads = ThreadPoolExecutor(4)

    def begin(
        self, cancellation: CancellationToken, *texts: str, rubric: CompiledRubric | None = None
    ) -> Future[list[Score]]:
        return self._threads.submit(self.core.score, rubric or self.core.default, items(*texts), "calls", cancellation)

    def soon(self, *texts: str) -> list[Score]:
        """The scores; cancels the call after PATIENCE_SECONDS."""
        cancellation = CancellationToken()
        timer = threading.Timer(PATIENCE_SECONDS, cancellation.cancel)
        timer.start()
        try:
            return self.begin(cancellation, *texts).result(timeout=2 * PATIENCE_SECONDS)
        finally:
            timer.cancel()

    def answered(self) -> int:
        """Number of running items whose answer from the worker has arrived."""
        requests = list(self.core._get_pool()._open_requests)
        return sum(len(answers) for request in requests for _, answers in list(request.at_work.values()))

    def forget(self) -> None:
        """Forgets what was judged so far."""
        self._log.write_text("")

    def judged(self) -> list[str]:
        return self._log.read_text().split()

    def close(self) -> None:
        self.core.close()
        self._threads.shutdown()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scoring]:
    with closing(Scoring(tmp_path_factory.mktemp("functions"))) as one:
        yield one


@pytest.fixture
def scoring(shared: Scoring, monkeypatch: pytest.MonkeyPatch) -> Scoring:
    monkeypatch.setattr("tandem.reward.workers.requests._GRACE_SECONDS", 0.1)
    shared.forget()
    return shared


# ---- cancellation tokens ----


def test_cancel_callbacks_are_called_once_and_only_inside_their_block() -> None:
    cancellation, called = CancellationToken(), list[str]()
    with cancellation.on_cancel(lambda: called.append("left before")):
        pass
    with cancellation.on_cancel(lambda: called.append("within")):
        assert called == [] and not cancellation.cancelled
        cancellation.cancel()
        cancellation.cancel()
        assert called == ["within"] and cancellation.cancelled
    with cancellation.on_cancel(lambda: called.append("after")):
        assert called == ["within", "after"]


# ---- in worker processes ----


def test_cancelling_keeps_finished_scores_and_frees_the_worker(scoring: Scoring) -> None:
    cancellation, replaced = CancellationToken(), scoring.core.figures()["workers_replaced"]
    call = scoring.begin(cancellation, "1", "0", "hang", "1")
    eventually(lambda: "hang" in scoring.judged() and scoring.answered() == 2)
    cancellation.cancel()
    assert call.result(timeout=PATIENCE_SECONDS) == [RIGHT, WRONG, CANCELLED, CANCELLED]
    assert scoring.soon("1") == [RIGHT], "the time of the one that hangs is 60 s"
    assert scoring.core.figures()["workers_replaced"] == replaced + 1 and scoring.judged().count("1") == 2


def test_cancelling_a_waiting_call_removes_it_from_the_queue(scoring: Scoring) -> None:
    first, second = CancellationToken(), CancellationToken()
    hanging = scoring.begin(first, "hang")
    eventually(lambda: "hang" in scoring.judged())
    waiting = scoring.begin(second, *["1"] * 500)
    eventually(lambda: scoring.core.figures()["calls_waiting_calls"] == 1)
    second.cancel()
    assert waiting.result(timeout=PATIENCE_SECONDS) == [CANCELLED] * 500
    assert scoring.core.figures()["calls_waiting_calls"] == 0
    assert not hanging.done() and scoring.judged() == ["hang"]
    first.cancel()
    assert hanging.result(timeout=PATIENCE_SECONDS) == [CANCELLED]


def test_a_call_cancelled_before_it_starts_starts_no_work(scoring: Scoring) -> None:
    cancellation = CancellationToken()
    cancellation.cancel()
    assert scoring.begin(cancellation, "1", "1").result(timeout=PATIENCE_SECONDS) == [CANCELLED] * 2
    assert scoring.core.figures()["calls_waiting_calls"] == 0


def test_cancelling_does_not_interrupt_the_construction_of_a_judge(
    tmp_path: Path, scoring: Scoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise callers with short deadlines would restart it again and again, and it would never finish."""
    monkeypatch.setattr("tandem.reward.workers.requests._GRACE_SECONDS", 1.5)
    loads, loaded = tmp_path / "loading", tmp_path / "loaded"
    (tmp_path / "large.py").write_text(
        f"import os, time\nopen({str(loads)!r}, 'a').write('x')\nwhile not os.path.exists({str(loaded)!r}):\n"
        "    time.sleep(0.01)\n\ndef f(**item):\n    time.sleep(0.2)\n    return 1.0\n"
    )
    pool = scoring.core._get_pool()
    spec = scoring.core._catalogue.spec(f"{tmp_path}/large.py:f", {}, "here")
    request = pool.submit(spec, items("a"), "calls")
    eventually(loads.exists)
    replaced = pool.replaced_workers
    pool.withdraw(request)
    assert request.wait() == [CANCELLED]
    threading.Timer(2.0, loaded.touch).start()  # longer than the grace period of a withdrawn item
    assert pool.score(spec, items("b")) == [Scored(1.0)]
    assert loads.read_text() == "x" and pool.replaced_workers == replaced


# ---- rubrics ----


def test_an_optional_component_without_time_leaves_the_item_unscored(scoring: Scoring) -> None:
    text = "[[components]]\nscorer = 'exact'\n[[components]]\nscorer = 'slow'\noptional = true\n"
    cancellation = CancellationToken()
    call = scoring.begin(cancellation, "hang", "0", rubric=scoring.core.compile(text))
    eventually(lambda: "hang" in scoring.judged())
    cancellation.cancel()
    found = call.result(timeout=PATIENCE_SECONDS)
    assert all(score is CANCELLED for score in found), "a number without the second component would be another number"


def test_an_item_that_failed_a_gate_keeps_its_score_when_cancelled(scoring: Scoring) -> None:
    inner = "[rubrics.inner]\n[[rubrics.inner.components]]\nscorer = 'slow'\n"
    text = "[[components]]\nscorer = 'exact'\narguments = {ignore_case = true}\ngate = true\n"
    text += "[[components]]\nscorer = 'rubric'\narguments = {name = 'inner'}\n" + inner
    cancellation = CancellationToken()
    rubric = scoring.core.compile(text)
    given = [ScoreItem("", "wrong", "right"), ScoreItem("", "hang", "HANG")]
    call = scoring._threads.submit(scoring.core.score, rubric, given, "calls", cancellation)
    eventually(lambda: "hang" in scoring.judged())
    cancellation.cancel()
    closed, cut = call.result(timeout=PATIENCE_SECONDS)
    assert isinstance(closed, Scored) and closed.value == 0.0 and cut is CANCELLED


# ---- in-process and remote scorers ----


def test_in_process_scorers_stop_between_two_items() -> None:
    cancellation = CancellationToken()

    def judge(item: ScoreItem) -> Score:
        if item.solution == "last":
            cancellation.cancel()
        return Scored(1.0)

    found = judge_each(judge, items("a", "last", "b", "c"), "calls", cancellation, None)
    assert found == [Scored(1.0), Scored(1.0), CANCELLED, CANCELLED]


def remotely(judge: RemoteJudge, cancellation: CancellationToken, *texts: str) -> Future[list[Score]]:
    """Asks a remote judge in another thread."""
    threads = ThreadPoolExecutor(1)
    future = threads.submit(judge_remotely, judge, items(*texts), "calls", cancellation, False)
    threads.shutdown(wait=False)
    return future


def test_cancelling_frees_the_slots_of_a_remote_scorer() -> None:

    def answer(asked: Asked) -> Answer:
        (item,) = asked.body["items"]
        return Answer(hangs=True) if item["solution"] == "hang" else Answer({"results": [{"score": 0.5}]})

    cancellation = CancellationToken()
    with (
        MisbehavingServer(answer) as server,
        closing(RemoteScorer(url=server.url, max_concurrent=1, timeout_seconds=50.0)) as judge,
    ):
        call = remotely(judge, cancellation, "a", "hang", "b", "c")
        eventually(lambda: len(server.asked) == 2)
        cancellation.cancel()
        assert call.result(timeout=PATIENCE_SECONDS) == [Scored(0.5), CANCELLED, CANCELLED, CANCELLED]
        assert judge.judge_batch(items("d")) == [Scored(0.5)], "the only place is free again"
        assert [asked.body["items"][0]["solution"] for asked in server.asked] == ["a", "hang", "d"]
        assert judge_remotely(judge, items("e"), "calls", cancellation, False) == [CANCELLED] and len(server.asked) == 3


def test_a_cancelled_question_is_charged_at_its_highest_price() -> None:
    cancellation = CancellationToken()
    prices: dict[str, Any] = {"completion_price": 1e6, "max_spend": 2000.0, "max_tokens": 1000}
    with (
        MisbehavingServer(lambda asked: Answer(hangs=True)) as server,
        closing(GenerativeJudge(base_url=server.url, model="m", template="{answer}", **prices)) as judge,
    ):
        call = remotely(judge, cancellation, "a")
        eventually(lambda: len(server.asked) == 1)
        assert judge.figures()["judge_spent"] == 0.0
        cancellation.cancel()
        assert call.result(timeout=PATIENCE_SECONDS) == [CANCELLED]
        eventually(lambda: judge.figures()["judge_spent"] == 1000.0)


def test_cancelling_a_question_before_it_is_sent_frees_its_reservation() -> None:
    cancellation = CancellationToken()
    prices: dict[str, Any] = {"completion_price": 1.0, "max_spend": 1.0, "requests_per_minute": 1}
    with (
        MisbehavingServer(lambda asked: chat('{"score": 7}', prompt_tokens=0, completion_tokens=0)) as server,
        closing(GenerativeJudge(base_url=server.url, model="m", template="{answer}", **prices)) as judge,
    ):
        call = remotely(judge, cancellation, "a", "b")
        eventually(lambda: len(server.asked) == 1 and judge.figures()["judge_waiting_calls"] == 1.0)
        assert judge._meter._reserved > 0.0
        cancellation.cancel()
        assert CANCELLED in call.result(timeout=PATIENCE_SECONDS)
        eventually(lambda: judge._meter._reserved == 0.0 and judge.figures()["judge_waiting_calls"] == 0.0)


def test_cancelling_ends_the_wait_for_work_that_no_thread_began() -> None:
    cancellation, go_on = CancellationToken(), threading.Event()
    with ThreadPoolExecutor(1) as threads, ThreadPoolExecutor(1) as others:
        threads.submit(go_on.wait)
        queued: Future[list[Score]] = threads.submit(list)
        waiting = others.submit(wait_aside, queued, cancellation, 2)
        assert not waiting.done()
        cancellation.cancel()
        assert waiting.result(timeout=PATIENCE_SECONDS) == [CANCELLED] * 2
        go_on.set()


def test_cancelling_one_item_cancels_its_group_in_a_grouped_scorer() -> None:
    group = [*items("a", "b", group="g"), *items("c", "d", group="h")]
    scores: list[Score] = [Scored(1.0), CLOSING, Scored(0.0), Unscored("crashed", "by itself")]
    assert _cut(scores, group, True) == [CANCELLED, CANCELLED, *scores[2:]]
    assert _cut(scores, group, False) == [scores[0], CANCELLED, *scores[2:]]
    alone = Unscored("infrastructure", "no other answer of the group has a score: the scorer is closing")
    assert _cut([alone, alone, *scores[2:]], group, True) == [CANCELLED, CANCELLED, *scores[2:]]
