"""The remote scorer: field mapping, batches, and one bad item among others."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import Scored, ScoreItem, Unscored, UnscoredReason
from tandem.reward.scorers.remote import RemoteScorer
from tests.support import judge_calls
from tests.support.misbehaving_server import Answer, Asked
from tests.support.scores import refused

pytestmark = pytest.mark.usefixtures("short_pauses")


def item(answer: str, truth: Any = "2", **extra: Any) -> ScoreItem:
    return ScoreItem("test", answer, truth, extra, group="g")


def echo(asked: Asked) -> Answer:
    """Scores a numeric answer by its value."""
    return Answer({"results": [{"score": float(one["solution"])} for one in asked.body["items"]]})


ask = partial(judge_calls.ask, kind=RemoteScorer)


# ---- requests and replies ----


def test_items_are_posted_and_results_are_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_KEY", "secret")
    results = {"results": [{"score": 0.5, "breakdown": {"style": 1, "word": "x", "bad": None}}, {"score": True}]}
    scores, asked = ask(Answer(results), [item("a", n=1), item("b", ["x"])], batch_size=8, api_key_env="SCORER_KEY")
    assert scores == [Scored(0.5, {"style": 1.0}), Scored(1.0)]
    (request,) = asked
    assert request.path == "/score" and request.headers["authorization"] == "Bearer secret"
    assert request.body == {
        "items": [
            {"data_source": "test", "solution": "a", "ground_truth": "2", "extra_info": {"n": 1}, "group": "g"},
            {"data_source": "test", "solution": "b", "ground_truth": ["x"], "extra_info": {}, "group": "g"},
        ]
    }


def test_names_can_be_mapped_to_another_services_format() -> None:
    def answer(asked: Asked) -> Answer:
        if asked.body["code"] == "broken":
            return Answer({"status": "SandboxError", "message": "no room"})
        passed = asked.body["code"] == "print(1)" and asked.body["stdin"] == "x"
        return Answer({"status": "Success" if passed else "Failed", "run_result": {"time": {"seconds": 0.25}}})

    scores, asked = ask(
        answer,
        [item("print(1)", stdin="x"), item("print(2)", stdin="x"), item("broken", stdin="x"), item("print(1)")],
        items_key="",
        fields={"code": "solution", "stdin": "extra_info.stdin"},
        constants={"language": "python", "run_timeout": 10},
        score_path="status",
        labels={"Success": 1.0, "Failed": 0.0},
        breakdown_path="run_result.time",
    )
    assert scores[:2] == [Scored(1.0, {"seconds": 0.25}), Scored(0.0, {"seconds": 0.25})]
    assert refused(scores[2]) == ("infrastructure", "the endpoint's result has no score at status: 'SandboxError'")
    reason, detail = refused(scores[3])
    assert reason == "invalid_input" and "extra_info.stdin is missing" in detail
    assert {"code": "print(1)", "stdin": "x", "language": "python", "run_timeout": 10} in [one.body for one in asked]


def test_an_empty_results_key_reads_the_reply_as_the_list() -> None:
    scores, _ = ask(Answer([{"value": {"total": 3}}]), [item("a")], results_key="", score_path="value.total")
    assert scores == [Scored(3.0)]


def test_reasons_of_the_service_are_kept() -> None:
    reasons: tuple[UnscoredReason, ...] = get_args(UnscoredReason)
    results = [{"reason": reason, "detail": "so it is"} for reason in reasons]
    scores, _ = ask(Answer({"results": results}), [item("a")] * len(reasons), batch_size=8)
    assert scores == [Unscored(reason, "so it is") for reason in reasons]


NO_NUMBERS: list[Any] = [None, "1", math.nan, math.inf, 10**400, [1]]
NO_SCORES = [{}, *({"score": value} for value in NO_NUMBERS), {"reason": "bored"}, {"reason": 5}, 7, None]


def test_an_invalid_score_is_unscored() -> None:
    results = [*NO_SCORES, {"score": 1}]
    scores, _ = ask(Answer({"results": results}), [item("a")] * len(results), batch_size=len(results))
    assert scores.pop() == Scored(1.0) and {refused(score)[0] for score in scores} == {"infrastructure"}


def test_an_item_that_json_cannot_hold_is_invalid_and_the_others_are_scored() -> None:
    scores, _ = ask(echo, [*(item("5", truth) for truth in ({1, 2}, math.nan, b"bytes")), item("6")], batch_size=4)
    assert scores.pop() == Scored(6.0)
    for score in scores:
        assert refused(score)[0] == "invalid_input" and "the item is not JSON" in refused(score)[1]


def test_any_text_reaches_the_service_unchanged() -> None:
    texts = ["", "\x00", "\ud800", "ü€😀", '"}]}', "x" * 1_000_000]
    seen: list[str] = []

    def answer(asked: Asked) -> Answer:
        seen.extend(one["solution"] for one in asked.body["items"])
        return Answer({"results": [{"score": 1}] * len(asked.body["items"])})

    scores, _ = ask(answer, [item(text) for text in texts], batch_size=10)
    assert scores == [Scored(1.0)] * len(texts) and seen == texts


# ---- batches ----


@given(count=st.integers(0, 40), batch_size=st.integers(1, 12))
@settings(max_examples=20)
def test_every_item_gets_its_own_result(count: int, batch_size: int) -> None:
    scores, asked = ask(echo, [item(str(n)) for n in range(count)], batch_size=batch_size, max_concurrent=3)
    assert scores == [Scored(float(n)) for n in range(count)]
    assert len(asked) == -(-count // batch_size)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Answer({"detail": "unreadable"}, status=422), "invalid_input"),
        (Answer(status=413), "invalid_input"),
        (Answer(status=500), "infrastructure"),
        (Answer(b"Traceback", status=200), "infrastructure"),
        (Answer({"results": []}), "infrastructure"),
        (Answer(b"{", cut=True), "infrastructure"),
        (Answer(hangs=True), "timeout"),
    ],
    ids=lambda bad: f"{bad.status}-{bad.body!r:.12}" if isinstance(bad, Answer) else bad,
)
def test_one_bad_item_does_not_affect_the_others(bad: Answer, reason: str) -> None:
    def answer(asked: Asked) -> Answer:
        return bad if any(one["solution"] == "13" for one in asked.body["items"]) else echo(asked)

    scores, _ = ask(
        answer,
        [item(str(n)) for n in range(20)],
        batch_size=8,
        max_attempts=2,
        timeout_seconds=1.5 if bad.hangs else 30.0,
        deadline_seconds=120.0,
    )
    assert refused(scores[13])[0] == reason
    assert [score for n, score in enumerate(scores) if n != 13] == [Scored(float(n)) for n in range(20) if n != 13]


@pytest.mark.parametrize("status", [401, 429, 502, 503])
def test_a_service_that_is_down_is_not_asked_item_by_item(status: int) -> None:
    scores, asked = ask(Answer(status=status), [item(str(n)) for n in range(8)], batch_size=8, max_attempts=2)
    assert {refused(score)[0] for score in scores} == {"infrastructure"}
    assert len(asked) == (1 if status == 401 else 2)
