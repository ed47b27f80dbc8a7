"""The remote scorer with a misbehaving HTTP service: field mapping, batches, failures by type, and closing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.endpoints import http_client
from tandem.reward.registry import make_spec
from tandem.reward.scorers.remote import RemoteScorer
from tests.support.judge_calls import refused
from tests.support.misbehaving_server import Answer, Asked, MisbehavingServer, free_port


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def item(answer: str, truth: Any = "2", **extra: Any) -> ScoreItem:
    return ScoreItem("test", answer, truth, extra, group="g")


def echo(asked: Asked) -> Answer:
    """Scores a numeric answer by its value."""
    return Answer({"results": [{"score": float(one["solution"])} for one in asked.body["items"]]})


def ask(
    answer: Callable[[Asked], Answer] | Answer, items: list[ScoreItem], **options: Any
) -> tuple[list[Score], list[Asked]]:
    serve = answer if callable(answer) else lambda asked: answer
    with (
        MisbehavingServer(serve) as server,
        closing(RemoteScorer(url=server.url + "/score", **options)) as scorer,
    ):
        return scorer.judge_batch(items), server.asked


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


@pytest.mark.parametrize("reason", ["timeout", "crashed", "infrastructure", "invalid_input", "limit"])
def test_reasons_of_the_service_are_kept(reason: str) -> None:
    scores, _ = ask(Answer({"results": [{"reason": reason, "detail": "so it is"}]}), [item("a")])
    assert scores == [Unscored(reason, "so it is")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"score": None},
        {"score": "1"},
        {"score": math.nan},
        {"score": math.inf},
        {"score": 10**400},
        {"score": [1]},
        {"reason": "bored"},
        {"reason": 5},
        7,
        None,
    ],
    ids=str,
)
def test_an_invalid_score_is_unscored(result: Any) -> None:
    scores, _ = ask(Answer({"results": [result, {"score": 1}]}), [item("a"), item("b")], batch_size=2)
    assert refused(scores[0])[0] == "infrastructure" and scores[1] == Scored(1.0)


@pytest.mark.parametrize("truth", [{1, 2}, math.nan, b"bytes"], ids=str)
def test_an_item_that_json_cannot_hold_is_invalid_and_the_others_are_scored(truth: Any) -> None:
    scores, _ = ask(echo, [item("5", truth), item("6")], batch_size=2)
    assert refused(scores[0])[0] == "invalid_input" and "the item is not JSON" in refused(scores[0])[1]
    assert scores[1] == Scored(6.0)


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
@settings(max_examples=20, deadline=None)
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
        timeout_seconds=3.0 if bad.hangs else 30.0,
        deadline_seconds=120.0,
    )
    assert refused(scores[13])[0] == reason
    assert [score for n, score in enumerate(scores) if n != 13] == [Scored(float(n)) for n in range(20) if n != 13]


@pytest.mark.parametrize("status", [401, 429, 502, 503])
def test_a_service_that_is_down_is_not_asked_item_by_item(status: int) -> None:
    scores, asked = ask(Answer(status=status), [item(str(n)) for n in range(8)], batch_size=8, max_attempts=2)
    assert {refused(score)[0] for score in scores} == {"infrastructure"}
    assert len(asked) == (1 if status == 401 else 2)


# ---- failures ----


def test_temporary_errors_are_retried() -> None:
    bad = [
        Answer(status=500),
        Answer(b"<html>"),
        Answer(status=429, headers={"Retry-After": "0"}),
        Answer(b"{", cut=True),
    ]
    scores, asked = ask(
        lambda asked: bad[asked.number] if asked.number < len(bad) else echo(asked), [item("3")], max_attempts=5
    )
    assert scores == [Scored(3.0)] and len(asked) == 5


def test_an_unreachable_address_is_infrastructure() -> None:
    with closing(RemoteScorer(url=f"http://127.0.0.1:{free_port()}/", max_attempts=2)) as scorer:
        assert {refused(score)[0] for score in scorer.judge_batch([item("1"), item("2")])} == {"infrastructure"}


def test_a_refused_item_is_invalid_with_the_services_reason() -> None:
    scores, asked = ask(Answer({"error": "no ground truth"}, status=400), [item("1")])
    assert refused(scores[0]) == ("invalid_input", 'the endpoint answered 400: {"error": "no ground truth"}')
    assert len(asked) == 1


def test_attempts_end_at_the_deadline() -> None:
    scores, asked = ask(Answer(hangs=True), [item("1")], deadline_seconds=0.5, timeout_seconds=60.0)
    assert refused(scores[0])[0] == "timeout" and len(asked) == 1


def test_a_reply_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LARGEST_REPLY_BYTES", 1 << 20)
    scores, asked = ask(Answer(b"[" + b" " * (2 << 20)), [item("1")])
    assert refused(scores[0]) == ("infrastructure", "the endpoint's answer exceeds 1 MiB") and len(asked) == 1


def test_no_more_requests_at_once_than_allowed() -> None:
    met = threading.Barrier(2, timeout=30.0)

    def answer(asked: Asked) -> Answer:
        met.wait()
        return echo(asked)

    with MisbehavingServer(answer) as server:
        with closing(RemoteScorer(url=server.url, max_concurrent=2)) as scorer:
            assert scorer.judge_batch([item(str(n)) for n in range(6)]) == [Scored(float(n)) for n in range(6)]
        assert server.most_at_once == 2


def test_close_ends_calls_in_progress() -> None:
    arrived = threading.Event()

    def answer(asked: Asked) -> Answer:
        arrived.set()
        return Answer(hangs=True)

    closing_down = [Unscored("infrastructure", "the scorer is closing")]
    with MisbehavingServer(answer) as server:
        scorer = RemoteScorer(url=server.url, timeout_seconds=600, deadline_seconds=600)
        results: list[Score] = []
        caller = threading.Thread(target=lambda: results.extend(scorer.judge_batch([item("1")])))
        caller.start()
        assert arrived.wait(30.0)
        scorer.close()
        caller.join(30.0)
        assert results == closing_down and scorer.judge_batch([item("1")]) == closing_down
    assert not [thread for thread in threading.enumerate() if thread.name == "remote-scorer"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"url": "unix:/x"}, "url 'unix:/x' is no http:// or https:// URL"),
        ({"batch_size": 0}, "arguments.batch_size"),
        ({"batch_size": 2, "items_key": ""}, "batch_size above 1 needs items_key"),
        ({"fields": {"code": "answer"}}, "fields.code: 'answer' is none of data_source, solution"),
        ({"fields": {"code": "solution.x"}}, "fields.code"),
        ({"constants": {"group": 1}}, "constants.group is also a field of the item"),
        ({"labels": {"a": "b"}}, "arguments.labels"),
        ({"score_path": ""}, "arguments.score_path"),
        ({"deadline_seconds": 0}, "arguments.deadline_seconds"),
        ({"api_key_env": "SURELY_NOT_SET"}, "SURELY_NOT_SET is not set"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ScorerError) as caught:
        make_spec("remote", {"url": "http://127.0.0.1:1/", **wrong})
    assert told in str(caught.value) and "\n" not in str(caught.value)
