"""What every scorer behind an HTTP endpoint does when the endpoint misbehaves, and the limits of a judge."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from email.utils import formatdate
from typing import Any

import pytest

from tandem.protos.contracts import Score, Scored, Unscored
from tandem.reward.endpoints import http_client
from tandem.reward.endpoints.endpoint import Endpoint
from tandem.reward.endpoints.http_client import LONGEST_PAUSE_SECONDS, Fault, retry_after, with_retries
from tandem.reward.scorers.judge import GenerativeJudge
from tandem.reward.scorers.remote import RemoteScorer
from tests.support.judge_calls import GOOD, ask, endpoint, item, user_text
from tests.support.misbehaving_server import Answer, Asked, MisbehavingServer, chat, free_port
from tests.support.processes import run_python
from tests.support.scores import refused
from tests.support.virtual_time import in_virtual_time

pytestmark = pytest.mark.usefixtures("short_pauses")

KINDS: list[type[Endpoint]] = [GenerativeJudge, RemoteScorer]
SEVEN = Answer({**GOOD.body, "results": [{"score": 7}]})  # either of them reads 7
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.KIND)


# ---- failures ----


BAD = [
    Answer({"error": "overloaded"}, status=500),
    Answer(b"bad gateway", status=502),
    Answer(b"", status=429),
    Answer(status=429, headers={"Retry-After": "0"}),
    Answer(b"<html>", status=200),
    Answer(b"\xff\xfe", status=200),
    Answer(b"[" * 100_000, status=200),
    Answer({"choices": []}),
    Answer({"choices": [{"message": "x"}]}),
    Answer([1, 2]),
    Answer(b'{"choices": [', cut=True),
    Answer(SEVEN.body, headers={"Content-Encoding": "gzip"}),
]


def named(asked: Asked) -> str:
    """The text in << >> of the item that was sent."""
    return str(asked.body).partition("<<")[2].partition(">>")[0]


@each_kind
def test_temporary_errors_are_retried_and_lasting_ones_are_infrastructure(kind: type[Endpoint]) -> None:
    """Each bad reply is given to one question once, and to another always."""
    counts = Counter[str]()

    def answer(asked: Asked) -> Answer:
        how, number = named(asked).split()
        counts[named(asked)] += 1
        return SEVEN if how == "once" and counts[named(asked)] > 1 else BAD[int(number)]

    for how in ("once", "always"):
        scores, _ = ask(answer, [item(f"<<{how} {number}>>") for number in range(len(BAD))], kind, max_attempts=3)
        for number, (bad, score) in enumerate(zip(BAD, scores, strict=True)):
            retried = "Content-Encoding" not in bad.headers
            assert counts[f"{how} {number}"] == ((2 if how == "once" else 3) if retried else 1), bad
            assert score == Scored(7.0) if how == "once" and retried else refused(score)[0] == "infrastructure", bad


@each_kind
def test_permanent_errors_are_not_retried(kind: type[Endpoint]) -> None:
    reasons = {400: "invalid_input", 422: "invalid_input", 403: "infrastructure", 307: "infrastructure"}

    def answer(asked: Asked) -> Answer:
        return Answer({"error": "too long"}, int(named(asked)), {"Location": "http://127.0.0.1:1/"})

    scores, asked = ask(answer, [item(f"<<{status}>>") for status in reasons], kind)
    for (status, reason), score in zip(reasons.items(), scores, strict=True):
        assert refused(score) == (reason, f'the endpoint answered {status}: {{"error": "too long"}}')
    assert len(asked) == len(reasons)


@each_kind
def test_an_unreachable_address_is_infrastructure(kind: type[Endpoint]) -> None:
    with closing(endpoint(kind, f"http://127.0.0.1:{free_port()}", max_attempts=2)) as scorer:
        for score in scorer.judge_batch([item("one"), item("two")]):
            reason, detail = refused(score)
            assert reason == "infrastructure" and "cannot be reached" in detail and "(attempt 2)" in detail


@each_kind
def test_a_slow_reply_times_out_its_own_item_only(kind: type[Endpoint]) -> None:
    slow = {"hangs": Answer(hangs=True), "trickles": Answer(trickles=True)}
    items = [item("<<hangs>>"), item("<<trickles>>"), *(item(f"answer {n}") for n in range(6))]
    options: dict[str, Any] = {"timeout_seconds": 2.0, "deadline_seconds": 60.0, "max_attempts": 2}
    scores, asked = ask(lambda asked: slow.get(named(asked), SEVEN), items, kind, **options)
    for score in scores[:2]:
        assert refused(score)[0] == "timeout" and "2 s (attempt 2)" in refused(score)[1]
    assert scores[2:] == [Scored(7.0)] * 6 and len(asked) == 10


@each_kind
@pytest.mark.parametrize(("attempt", "most"), [(0.2, 3), (60.0, 1)])
def test_the_deadline_ends_the_attempts(kind: type[Endpoint], attempt: float, most: int) -> None:
    options: dict[str, Any] = {"timeout_seconds": attempt, "deadline_seconds": 0.5, "max_attempts": 100}
    scores, asked = ask(Answer(hangs=True), [item("two")], kind, **options)
    assert refused(scores[0])[0] == "timeout" and 1 <= len(asked) <= most


@each_kind
def test_a_reply_without_end_is_cut_off(kind: type[Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "LARGEST_REPLY_BYTES", 1 << 20)
    scores, asked = ask(Answer(b"[" + b" " * (2 << 20)), [item("1")], kind)
    assert refused(scores[0]) == ("infrastructure", "the endpoint's answer exceeds 1 MiB") and len(asked) == 1


# ---- pauses between attempts ----


@each_kind
def test_retry_after_is_honoured_by_all_questions(kind: type[Endpoint]) -> None:
    times: list[float] = []

    def answer(asked: Asked) -> Answer:
        times.append(time.monotonic())
        return Answer(status=429, headers={"Retry-After": "1"}) if asked.number == 0 else SEVEN

    scores, _ = ask(answer, [item("a"), item("b")], kind, max_concurrent=1)
    assert scores == [Scored(7.0)] * 2
    assert len(times) == 3 and times[1] - times[0] >= 1.0


@each_kind
def test_a_retry_after_beyond_the_deadline_is_not_retried(kind: type[Endpoint]) -> None:
    later = Answer(status=503, headers={"Retry-After": "3600"})
    scores, asked = ask(later, [item("a"), item("b")], kind, max_concurrent=1, deadline_seconds=30.0)
    assert refused(scores[0])[0] == "infrastructure" and "no time for another" in refused(scores[0])[1]
    assert refused(scores[1])[0] == "infrastructure" and "asked to wait for 36" in refused(scores[1])[1]
    assert len(asked) == 1


@pytest.mark.parametrize("asked", [0.0, 0.4, 100.0])
@in_virtual_time
async def test_retry_pauses_grow_and_are_spread(monkeypatch: pytest.MonkeyPatch, asked: float) -> None:
    """Two hundred requests fail seven times on a virtual clock; `asked` is the `Retry-After` of every reply."""
    monkeypatch.setattr(http_client, "FIRST_PAUSE_SECONDS", 1.0)
    pauses: dict[int, list[float]] = defaultdict(list)

    clock = asyncio.get_running_loop().time

    async def one() -> None:
        before, number = clock(), 0

        async def attempt(deadline: float) -> Fault:
            nonlocal before, number
            if number:
                pauses[number].append(clock() - before)
            before, number = clock(), number + 1
            return Fault("infrastructure", "down", not_before_seconds=asked)

        fault = await with_retries(attempt, max_attempts=8, deadline=math.inf)
        assert isinstance(fault, Fault) and fault.detail == "down (attempt 8)"

    await asyncio.gather(*(one() for _ in range(200)))
    assert list(pauses) == list(range(1, 8))
    for number, seconds in pauses.items():
        half = min(2.0 ** (number - 1), LONGEST_PAUSE_SECONDS) / 2
        least = max(asked, half)
        assert least - 1e-6 <= min(seconds) and max(seconds) <= least + half + 1e-6
        assert max(seconds) - min(seconds) > 0.8 * half and len(set(seconds)) > 190


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0", 0.0), ("", 0.0), ("-3", 0.0), ("soon", 0.0), ("9" * 5000, 86400.0), ("٣", 0.0)],
)
def test_retry_after(value: str, seconds: float) -> None:
    assert retry_after(value) == seconds


def test_retry_after_as_a_date() -> None:
    assert 50.0 < retry_after(formatdate(time.time() + 60, usegmt=True)) <= 60.0
    assert retry_after(formatdate(0, usegmt=True)) == 0.0


# ---- concurrency and closing ----


@each_kind
def test_max_concurrent_bounds_requests_under_way(kind: type[Endpoint]) -> None:
    met = threading.Barrier(3, timeout=30.0)

    def answer(asked: Asked) -> Answer:
        met.wait()  # blocks until three requests are here
        return SEVEN

    with MisbehavingServer(answer) as server:
        with closing(endpoint(kind, server.url, max_concurrent=3)) as scorer:
            assert scorer.judge_batch([item(str(n)) for n in range(9)]) == [Scored(7.0)] * 9
        assert server.most_at_once == 3


@each_kind
def test_close_ends_calls_in_progress(kind: type[Endpoint]) -> None:
    arrived = threading.Event()

    def answer(asked: Asked) -> Answer:
        if "hang" in str(asked.body):
            arrived.set()
            return Answer(hangs=True)
        return SEVEN

    closing_down = Unscored("infrastructure", "the scorer is closing")
    with MisbehavingServer(answer) as server:
        scorer = endpoint(kind, server.url, max_concurrent=1, timeout_seconds=600, deadline_seconds=600)
        results: list[Score] = []
        items = [item("a"), item("hang"), item("b")]
        caller = threading.Thread(target=lambda: results.extend(scorer.judge_batch(items)))
        caller.start()
        assert arrived.wait(30.0)
        scorer.close()
        caller.join(30.0)
        assert results == [Scored(7.0), closing_down, closing_down], "what had come is kept"
        assert scorer.judge_batch([item("a")]) == [closing_down]
        scorer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == kind.KIND]


@each_kind
def test_an_unused_endpoint_holds_no_resources(kind: type[Endpoint]) -> None:
    before = threading.active_count()
    scorer = endpoint(kind, "http://127.0.0.1:1")
    assert not any(scorer.figures().values()) and threading.active_count() == before
    scorer.close()


UNCLOSED = """
import asyncio, threading
from contextlib import asynccontextmanager
from tandem.reward.endpoints.endpoint import ClientPortal, ClosedError

begun = threading.Event()

@asynccontextmanager
async def session():
    yield 7

async def wait_for_long(value):
    begun.set()
    await asyncio.sleep(3600)

def call():
    try:
        portal.run(wait_for_long)
    except ClosedError:
        pass

portal = ClientPortal("test", session)
threading.Thread(target=call, daemon=True).start()
assert begun.wait(30)
"""


def test_a_program_that_never_closes_its_portal_exits() -> None:
    done = run_python("-c", UNCLOSED)
    assert (done.returncode, done.stderr) == (0, "")


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
