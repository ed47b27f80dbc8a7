"""What every scorer behind an HTTP endpoint does when the endpoint misbehaves: a judge and a remote scorer."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import defaultdict
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
from tests.support.judge_calls import GOOD, ask, endpoint, item
from tests.support.misbehaving_server import Answer, Asked, MisbehavingServer, free_port
from tests.support.processes import run_python
from tests.support.scores import refused
from tests.support.virtual_time import in_virtual_time

pytestmark = pytest.mark.usefixtures("short_pauses")

KINDS: list[type[Endpoint]] = [GenerativeJudge, RemoteScorer]
SEVEN = Answer({**GOOD.body, "results": [{"score": 7}]})  # either of them reads 7
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.KIND)


# ---- failures ----


@each_kind
@pytest.mark.parametrize(
    "bad",
    [
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
    ],
    ids=lambda bad: f"{bad.status}-{str(bad.body)[:12]}",
)
def test_temporary_errors_are_retried_and_lasting_ones_are_infrastructure(kind: type[Endpoint], bad: Answer) -> None:
    again, asked = ask(lambda asked: bad if asked.number == 0 else SEVEN, [item("two")], kind)
    retried = "Content-Encoding" not in bad.headers
    assert (again == [Scored(7.0)] and len(asked) == 2) if retried else refused(again[0])[0] == "infrastructure"
    always, asked = ask(bad, [item("two")], kind, max_attempts=3)
    assert refused(always[0])[0] == "infrastructure" and len(asked) == (3 if retried else 1)


@each_kind
@pytest.mark.parametrize(
    ("status", "reason"),
    [(400, "invalid_input"), (422, "invalid_input"), (403, "infrastructure"), (307, "infrastructure")],
)
def test_permanent_errors_are_not_retried(kind: type[Endpoint], status: int, reason: str) -> None:
    headers = {"Location": "http://127.0.0.1:1/"} if status == 307 else {}
    scores, asked = ask(Answer({"error": "too long"}, status=status, headers=headers), [item("two")], kind)
    assert refused(scores[0]) == (reason, f'the endpoint answered {status}: {{"error": "too long"}}')
    assert len(asked) == 1


@each_kind
def test_an_unreachable_address_is_infrastructure(kind: type[Endpoint]) -> None:
    with closing(endpoint(kind, f"http://127.0.0.1:{free_port()}", max_attempts=2)) as scorer:
        for score in scorer.judge_batch([item("one"), item("two")]):
            reason, detail = refused(score)
            assert reason == "infrastructure" and "cannot be reached" in detail and "(attempt 2)" in detail


@each_kind
@pytest.mark.parametrize("bad", [Answer(hangs=True), Answer(trickles=True)], ids=["hangs", "trickles"])
def test_a_slow_reply_times_out_its_own_item_only(kind: type[Endpoint], bad: Answer) -> None:
    items = [item("slow" if n == 3 else f"answer {n}") for n in range(8)]
    options: dict[str, Any] = {"timeout_seconds": 3.0, "deadline_seconds": 60.0, "max_attempts": 2}
    scores, asked = ask(lambda asked: bad if "slow" in str(asked.body) else SEVEN, items, kind, **options)
    assert refused(scores[3])[0] == "timeout" and "3 s (attempt 2)" in refused(scores[3])[1]
    assert [score for n, score in enumerate(scores) if n != 3] == [Scored(7.0)] * 7
    assert len(asked) == 9


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
from tandem.reward.endpoints.session_portal import ClosedError, SessionPortal

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

portal = SessionPortal("test", session)
threading.Thread(target=call, daemon=True).start()
assert begun.wait(30)
"""


def test_a_program_that_never_closes_its_portal_exits() -> None:
    done = run_python("-c", UNCLOSED)
    assert (done.returncode, done.stderr) == (0, "")
