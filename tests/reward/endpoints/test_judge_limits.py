"""Limits of a judge: requests and tokens per minute, and cost."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tandem.protos.contracts import Scored, Unscored
from tandem.reward.endpoints import http_client
from tandem.reward.scorers.judge import GenerativeJudge
from tests.support.judge_calls import GOOD, ask, endpoint, item, user_text
from tests.support.misbehaving_server import Answer, Asked, MisbehavingServer, chat
from tests.support.scores import refused

pytestmark = pytest.mark.usefixtures("short_pauses")

# ---- limits ----


def test_several_threads_share_one_judge() -> None:
    def answer(asked: Asked) -> Answer:
        return chat(json.dumps({"score": int(user_text(asked).partition("answer <")[2].partition(">")[0])}))

    with MisbehavingServer(answer) as server, ThreadPoolExecutor(8) as threads:
        with closing(endpoint(GenerativeJudge, server.url)) as judge:
            batches = [[item(f"answer <{grade}>")] * 5 for grade in range(8)]
            results = list(threads.map(judge.judge_batch, batches, timeout=30.0))
        assert len(server.asked) == 40
    assert results == [[Scored(float(grade))] * 5 for grade in range(8)]


def test_requests_are_spread_over_the_minute() -> None:
    began = time.monotonic()
    scores, _ = ask(GOOD, [item("a")] * 4, requests_per_minute=300)
    assert scores == [Scored(7.0)] * 4
    assert time.monotonic() - began >= 0.6  # three pauses of 0.2 s cannot be shorter, however slow the machine is


def test_waiting_for_the_rate_limit_does_not_use_up_the_deadline() -> None:
    """Eight requests at 120 a minute take 4 s, longer than the deadline of 2 s."""
    scores, _ = ask(GOOD, [item("a")] * 8, requests_per_minute=120, deadline_seconds=2.0)
    assert scores == [Scored(7.0)] * 8


def test_the_token_rate_counts_the_tokens_actually_used() -> None:
    """Each question is estimated at 1,300 of 3,000 tokens a minute and uses 15. Without the correction, the second
    would wait 26 s.
    """
    scores, _ = ask(GOOD, [item("a")] * 3, tokens_per_minute=3000, max_concurrent=1, deadline_seconds=20.0)
    assert scores == [Scored(7.0)] * 3


def test_a_question_larger_than_the_token_rate_is_unscored_as_limit() -> None:
    scores, asked = ask(GOOD, [item("x" * 9000), item("a")], tokens_per_minute=3000)
    reason, detail = refused(scores[0])
    assert reason == "limit" and "more than tokens_per_minute 3000" in detail
    assert scores[1] == Scored(7.0) and len(asked) == 1


def test_a_retry_without_room_in_the_rate_is_a_timeout() -> None:
    """The first attempt may have used its tokens, so the window has no room for a second."""
    options = {"tokens_per_minute": 1500, "timeout_seconds": 0.2, "deadline_seconds": 2.0}
    scores, asked = ask(Answer(hangs=True), [item("a")], **options)
    reason, detail = refused(scores[0])
    assert reason == "timeout" and "room in the rate limit (attempt 2)" in detail and len(asked) == 1


def test_waiting_too_long_for_a_slot_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_QUEUE_SECONDS", 0.1)
    options = {"max_concurrent": 1, "max_attempts": 1, "timeout_seconds": 1.0}
    scores, asked = ask(Answer(hangs=True), [item("a")] * 2, **options)
    assert [refused(score)[0] for score in scores] == ["timeout", "infrastructure"] and len(asked) == 1
    assert refused(scores[1])[1] == "it waited 0.1 s for one of max_concurrent places"


# ---- spending ----


def test_spending_stops_below_the_cap() -> None:
    answer = chat('{"score": 7}', prompt_tokens=100, completion_tokens=100)  # costs 0.0003
    with MisbehavingServer(answer) as server:
        prices = {"prompt_price": 1.0, "completion_price": 2.0, "max_spend": 0.01}
        with closing(endpoint(GenerativeJudge, server.url, max_tokens=1000, **prices)) as judge:
            scores = judge.judge_batch([item("a")] * 60)
            spent = judge.figures()["judge_spent"]
        num_asked = len(server.asked)
    scored = [score for score in scores if isinstance(score, Scored)]
    others = [score for score in scores if isinstance(score, Unscored)]
    assert len(scored) == num_asked and spent == pytest.approx(0.0003 * num_asked) and spent <= 0.01
    assert 20 <= num_asked < 34, "it goes on as long as the dearest answer would still fit"
    assert others and {score.reason for score in others} == {"limit"} and "max_spend 0.01" in others[0].detail


@pytest.mark.parametrize(
    ("bad", "billed"),
    [
        (Answer(hangs=True), True),
        (Answer({"choices": 1}), True),
        (Answer(b"{", cut=True), True),
        (Answer(status=500), False),
    ],
    ids=["hangs", "garbage", "cut", "500"],
)
def test_requests_that_may_have_been_billed_count_as_spent(bad: Answer, billed: bool) -> None:
    options = {"completion_price": 1000.0, "max_spend": 5.0, "max_attempts": 1, "timeout_seconds": 1.0}
    with MisbehavingServer(bad) as server, closing(endpoint(GenerativeJudge, server.url, **options)) as judge:
        judge.judge_batch([item("a")])
        figures = judge.figures()
        assert figures["judge_requests"] == 1.0
        assert figures["judge_spent"] == (pytest.approx(1.024) if billed else 0.0)
