"""The generative judge with a misbehaving chat endpoint: requests, votes, failures and closing."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from email.utils import formatdate
from typing import Any

import numpy as np
import pytest

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.protos.types import Prompt, SamplingParameters, Trajectory
from tandem.reward.config import RewardConfig
from tandem.reward.endpoints import http_client
from tandem.reward.endpoints.http_client import LONGEST_PAUSE_SECONDS, Fault, retry_after, with_retries
from tandem.reward.registry import SCORERS
from tandem.reward.rubric.catalogue import Catalogue
from tandem.reward.scorers.judge import GenerativeJudge, combined
from tandem.reward.scoring import ScoringCore
from tandem.services.reward.service import score_item
from tests.reward.endpoints.test_rate_limit import run
from tests.support.judge_calls import GOOD, ask, item, refused, user_text
from tests.support.misbehaving_server import Answer, Asked, MisbehavingServer, chat, free_port


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


# ---- requests ----


def test_the_judge_is_sent_the_filled_template_and_its_grade_is_the_score() -> None:
    scores, asked = ask(GOOD, [item("two")], system="Be strict.", max_tokens=99, extra_body={"reasoning_effort": "low"})
    assert scores == [Scored(7.0)]
    (request,) = asked
    assert request.path == "/v1/chat/completions"
    assert "authorization" not in request.headers
    assert request.body["messages"][0] == {"role": "system", "content": "Be strict."}
    assert "What is 1 + 1?" in user_text(request) and "\ntwo\n" in user_text(request)
    del request.body["messages"]
    assert request.body == {"model": "m", "temperature": 0.0, "max_tokens": 99, "reasoning_effort": "low"}


def test_the_api_key_comes_from_the_environment_and_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    told = Answer({"error": "no such key: sk-secret"}, status=401)
    scores, asked = ask(told, [item("two")], api_key_env="JUDGE_KEY")
    assert asked[0].headers["authorization"] == "Bearer sk-secret"
    reason, detail = refused(scores[0])
    assert reason == "infrastructure" and "401" in detail and "sk-secret" not in detail
    assert len(asked) == 1, "a wrong key is wrong the next time, too"
    judge = GenerativeJudge(base_url="http://127.0.0.1:1", model="m", api_key_env="JUDGE_KEY")
    assert "sk-secret" not in repr(judge)


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (ScoreItem("", "a", "2"), "extra_info.prompt is missing"),
        (item("a", 7), "extra_info.prompt is neither text nor chat messages"),
        (item("a", []), "neither text nor"),
        (item("a", [{"role": "user", "content": [{"type": "image_url"}]}]), "neither text nor"),
        (item("a", truth=None), "ground truth is missing"),
    ],
)
def test_an_item_without_a_placeholder_value_is_invalid_and_the_others_are_graded(one: ScoreItem, told: str) -> None:
    scores, asked = ask(GOOD, [one, item("two")])
    reason, detail = refused(scores[0])
    assert reason == "invalid_input" and told in detail
    assert scores[1] == Scored(7.0) and len(asked) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_an_unreadable_verdict_is_retried_only_above_temperature_0(temperature: float) -> None:
    scores, asked = ask(
        lambda asked: chat("dunno") if asked.number == 0 else GOOD, [item("two")], temperature=temperature
    )
    if temperature:
        assert scores == [Scored(7.0)] and len(asked) == 2
    else:
        reason, detail = refused(scores[0])
        assert reason == "crashed" and "no JSON with score in the judge's answer 'dunno'" in detail and len(asked) == 1


def test_a_missing_verdict_has_its_reason() -> None:
    cut, _ = ask(chat("I think", finish_reason="length"), [item("two")], max_tokens=5)
    assert refused(cut[0])[0] == "crashed" and "it was cut at max_tokens 5" in refused(cut[0])[1]
    silent, _ = ask(chat(None, finish_reason="content_filter"), [item("two")])
    assert refused(silent[0]) == ("crashed", "the judge gave no text (finish_reason 'content_filter')")


# ---- votes ----


@pytest.mark.parametrize(("how", "value"), [("mean", 4.0), ("median", 3.0), ("majority", 2.0)])
def test_votes_are_combined_and_their_spread_is_reported(how: Any, value: float) -> None:
    grades = [2, 8, 3, 2, 5]
    scores, asked = ask(
        lambda asked: chat(json.dumps({"score": grades[asked.number]})),
        [item("two")],
        votes=5,
        combine=how,
        temperature=1.0,
    )
    assert scores == [Scored(value, {"spread": 6.0})] and len(asked) == 5


def test_majority_takes_the_most_frequent_vote_and_the_lowest_on_a_tie() -> None:
    assert combined([5.0, 5.0, 1.0], "majority") == 5.0
    assert combined([3.0, 2.0, 3.0, 1.0, 2.0, 9.0], "majority") == 2.0


def test_a_failed_vote_leaves_the_item_unscored() -> None:
    def answer(asked: Asked) -> Answer:
        return Answer({"error": "too long"}, status=400) if asked.number == 1 else GOOD

    scores, _ = ask(answer, [item("two")], votes=3, temperature=1.0)
    assert refused(scores[0])[0] == "invalid_input"


# ---- failures ----


@pytest.mark.parametrize(
    "bad",
    [
        Answer({"error": "overloaded"}, status=500),
        Answer(b"bad gateway", status=502),
        Answer(b"", status=429),
        Answer(b"<html>", status=200),
        Answer(b"\xff\xfe", status=200),
        Answer(b"[" * 100_000, status=200),
        Answer({"choices": []}),
        Answer({"choices": [{"message": "x"}]}),
        Answer([1]),
        Answer(b'{"choices": [', cut=True),
        Answer(GOOD.body, headers={"Content-Encoding": "gzip"}),
    ],
    ids=lambda bad: f"{bad.status}-{str(bad.body)[:12]}",
)
def test_temporary_errors_are_retried_and_lasting_ones_are_infrastructure(bad: Answer) -> None:
    again, asked = ask(lambda asked: bad if asked.number == 0 else GOOD, [item("two")])
    retried = "Content-Encoding" not in bad.headers
    assert (again == [Scored(7.0)] and len(asked) == 2) if retried else refused(again[0])[0] == "infrastructure"
    always, asked = ask(bad, [item("two")], max_attempts=3)
    assert refused(always[0])[0] == "infrastructure" and len(asked) == (3 if retried else 1)


@pytest.mark.parametrize(
    ("status", "reason"),
    [(400, "invalid_input"), (422, "invalid_input"), (403, "infrastructure"), (307, "infrastructure")],
)
def test_permanent_errors_are_not_retried(status: int, reason: str) -> None:
    headers = {"Location": "http://127.0.0.1:1/"} if status == 307 else {}
    scores, asked = ask(Answer({"error": "the prompt is too long"}, status=status, headers=headers), [item("two")])
    assert refused(scores[0])[0] == reason and f"answered {status}: " in refused(scores[0])[1] and len(asked) == 1


def test_an_unreachable_address_is_infrastructure() -> None:
    with closing(GenerativeJudge(base_url=f"http://127.0.0.1:{free_port()}", model="m", max_attempts=2)) as judge:
        reason, detail = refused(judge.judge_batch([item("two")])[0])
    assert reason == "infrastructure" and "cannot be reached" in detail and "(attempt 2)" in detail


@pytest.mark.parametrize("bad", [Answer(hangs=True), Answer(trickles=True)], ids=["hangs", "trickles"])
def test_a_slow_reply_times_out_its_own_item_only(bad: Answer) -> None:
    def answer(asked: Asked) -> Answer:
        return bad if "slow" in user_text(asked) else GOOD

    items = [item("slow" if n == 3 else f"answer {n}") for n in range(8)]
    scores, asked = ask(answer, items, timeout_seconds=3.0, deadline_seconds=60.0, max_attempts=2)
    assert refused(scores[3])[0] == "timeout" and "3 s (attempt 2)" in refused(scores[3])[1]
    assert [score for n, score in enumerate(scores) if n != 3] == [Scored(7.0)] * 7
    assert len(asked) == 9


def test_the_deadline_ends_the_attempts() -> None:
    scores, asked = ask(Answer(hangs=True), [item("two")], timeout_seconds=0.2, deadline_seconds=0.5, max_attempts=100)
    assert refused(scores[0])[0] == "timeout" and 1 <= len(asked) <= 3


def test_retry_after_is_honoured_by_all_questions() -> None:
    times: list[float] = []

    def answer(asked: Asked) -> Answer:
        times.append(time.monotonic())
        return Answer(status=429, headers={"Retry-After": "1"}) if asked.number == 0 else GOOD

    scores, _ = ask(answer, [item("a"), item("b")], max_concurrent=1)
    assert scores == [Scored(7.0)] * 2
    assert len(times) == 3 and times[1] - times[0] >= 1.0


@pytest.mark.parametrize("asked", [0.0, 0.4, 100.0])
def test_retry_pauses_grow_and_are_spread(monkeypatch: pytest.MonkeyPatch, asked: float) -> None:
    """Two hundred requests fail seven times on a virtual clock; `asked` is the `Retry-After` of every reply."""
    monkeypatch.setattr(http_client, "FIRST_PAUSE_SECONDS", 1.0)
    pauses: dict[int, list[float]] = defaultdict(list)

    async def one() -> None:
        loop, number = asyncio.get_running_loop(), 0
        before = loop.time()

        async def attempt(deadline: float) -> Fault:
            nonlocal before, number
            if number:
                pauses[number].append(loop.time() - before)
            before, number = loop.time(), number + 1
            return Fault("infrastructure", "down", not_before_seconds=asked)

        fault = await with_retries(attempt, max_attempts=8, deadline=math.inf)
        assert isinstance(fault, Fault) and fault.detail == "down (attempt 8)"

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(200)))

    run(all_of_them)
    assert list(pauses) == list(range(1, 8))
    for number, seconds in pauses.items():
        half = min(2.0 ** (number - 1), LONGEST_PAUSE_SECONDS) / 2
        least = max(asked, half)
        assert least - 1e-6 <= min(seconds) and max(seconds) <= least + half + 1e-6
        assert max(seconds) - min(seconds) > 0.8 * half and len(set(seconds)) > 190


def test_a_retry_after_beyond_the_deadline_is_not_retried() -> None:
    scores, asked = ask(
        Answer(status=503, headers={"Retry-After": "3600"}),
        [item("a"), item("b")],
        max_concurrent=1,
        deadline_seconds=30.0,
    )
    assert refused(scores[0])[0] == "infrastructure" and "no time for another" in refused(scores[0])[1]
    assert refused(scores[1])[0] == "infrastructure" and "asked to wait for 36" in refused(scores[1])[1]
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0", 0.0), ("", 0.0), ("-3", 0.0), ("soon", 0.0), ("9" * 5000, 86400.0), ("٣", 0.0)],
)
def test_retry_after(value: str, seconds: float) -> None:
    assert retry_after(value) == seconds


def test_retry_after_as_a_date() -> None:
    assert 50.0 < retry_after(formatdate(time.time() + 60, usegmt=True)) <= 60.0
    assert retry_after(formatdate(0, usegmt=True)) == 0.0


# ---- closing ----


def test_close_ends_calls_in_progress() -> None:
    arrived = threading.Event()

    def answer(asked: Asked) -> Answer:
        if "hang" in user_text(asked):
            arrived.set()
            return Answer(hangs=True)
        return GOOD

    with MisbehavingServer(answer) as server:
        judge = GenerativeJudge(
            base_url=server.url, model="m", max_concurrent=1, timeout_seconds=600, deadline_seconds=600
        )
        results: list[Score] = []
        caller = threading.Thread(
            target=lambda: results.extend(judge.judge_batch([item("a"), item("hang"), item("b")]))
        )
        caller.start()
        assert arrived.wait(30.0)
        judge.close()
        caller.join(30.0)
        closing_down = Unscored("infrastructure", "the scorer is closing")
        assert results == [Scored(7.0), closing_down, closing_down], "what had come is kept"
        assert judge.judge_batch([item("a")]) == [closing_down]
        judge.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "judge"]


def test_an_unused_judge_holds_no_resources() -> None:
    before = threading.active_count()
    judge = GenerativeJudge(base_url="http://127.0.0.1:1", model="m")
    assert not any(judge.figures().values()) and threading.active_count() == before
    judge.close()


def test_a_service_that_declares_a_judge_lets_clients_use_it_by_name() -> None:
    with MisbehavingServer(lambda asked: GOOD) as server:
        arguments = {"base_url": server.url, "model": "m", "system": "Be strict."}
        declared = {"strict": {"scorer": "judge", "arguments": arguments}}
        with closing(ScoringCore(RewardConfig.model_validate({"scorers": declared}))) as core:
            rubric = core.compile(
                """
                [[components]]
                scorer = "exact"
                weight = 10.0
                [[components]]
                scorer = "strict"
                from = [0.0, 10.0]
                to = [0.0, 1.0]
                """
            )
            assert core.score(rubric, [item("2"), item("3")], "calls") == [
                Scored(10.7, {"exact": 1.0, "strict": 0.7}),
                Scored(0.7, {"exact": 0.0, "strict": 0.7}),
            ]
            assert core.figures()["judge_requests:strict"] == 2.0
        assert server.asked[0].body["messages"][0] == {"role": "system", "content": "Be strict."}


def test_groups_of_a_run_show_the_judge_their_prompt() -> None:
    sampling = SamplingParameters()
    asked_for = ({"role": "user", "content": "1 + 1?"},)
    prompt = Prompt(0, 0, np.array([1], np.int32), 1, sampling, ground_truth="2", messages=asked_for)
    scores, asked = ask(GOOD, [score_item(prompt, Trajectory(0, "policy", (), "two", "stop", sampling))])
    assert scores == [Scored(7.0)] and "[Question]\n1 + 1?\n" in user_text(asked[0])


# ---- invalid arguments ----


@pytest.fixture
def arguments() -> Iterator[dict[str, Any]]:
    yield {"base_url": "http://127.0.0.1:1/v1", "model": "m"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url '127.0.0.1:8000' is no http:// or https:// URL"),
        ({"base_url": "file:///etc/passwd"}, "is no http://"),
        ({"base_url": "http://[::1"}, "is no http://"),
        ({"base_url": "http://me:pw@host/v1"}, "holds credentials"),
        ({"model": ""}, "arguments.model"),
        ({"api_key_env": "SURELY_NOT_SET"}, "environment variable SURELY_NOT_SET is not set"),
        ({"votes": 3}, "votes at temperature 0"),
        ({"votes": 17, "temperature": 1.0}, "votes must be at most max_concurrent"),
        ({"temperature": 3.0}, "temperature must be"),
        ({"temperature": "hot"}, "arguments.temperature: should be a number (got 'hot')"),
        ({"combine": "mode"}, "arguments.combine: there is no 'mode'"),
        ({"max_attempts": 0}, "arguments.max_attempts"),
        ({"deadline_seconds": 0.0}, "arguments.deadline_seconds"),
        ({"requests_per_minute": 1, "deadline_seconds": 30.0}, "wait longer than deadline_seconds"),
        ({"requests_per_minute": -1}, "arguments.requests_per_minute"),
        ({"max_spend": 1.0}, "max_spend needs prompt_price"),
        ({"extra_body": {"stream": True}}, "extra_body must not hold stream"),
        ({"template": "{question}"}, "template: it lacks {answer}"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"lowest": 1.0, "highest": 1.0}, "lowest 1 must be below highest 1"),
        ({"score_key": ""}, "set pattern or score_key"),
        ({"base_ur": "x"}, "did you mean reward.arguments.base_url?"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(arguments: dict[str, Any], wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ScorerError) as caught:
        Catalogue().spec("judge", {**arguments, **wrong}, "reward")
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["judge", "pairwise", "group_rank", "remote", "reward_model"])
def test_a_client_cannot_name_addresses_and_folders(arguments: dict[str, Any], name: str) -> None:
    assert SCORERS[name].ISOLATION == "remote"
    with pytest.raises(ScorerError, match="a client cannot"):
        Catalogue(for_clients=True).spec(name, arguments, "components[0]")
