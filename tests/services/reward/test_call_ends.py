"""Calls that end before their items: replies before the deadline, no work for cancelled calls, size limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.protos import common_pb2, common_pb2_grpc, reward_pb2
from tandem.protos.errors import SizeError, UnavailableError
from tandem.reward.config import RewardConfig
from tandem.services.reward.server import RPC_LIMITS, SERVICE_NAME
from tandem.services.reward.wire import MAX_CARRIED_BYTES, MAX_REQUEST_BYTES
from tandem.services.rpc.client import from_rpc_error, translated
from tests.support.reward_server import (
    EXACT,
    Item,
    Request,
    ScriptedCore,
    Service,
    Stub,
    answers,
    code_of,
    raw_call,
    serving,
    submission,
    summary,
)
from tests.support.waiting import eventually

FUNCTION = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        open({log!r}, "a").write("x")
        time.sleep(600)
    return float(solution_str == ground_truth)
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scorer") / "hanging"


@pytest.fixture(scope="module")
def service(redis_url: str, log: Path) -> Iterator[Service]:
    """Two workers and a scorer that hangs on demand for longer than any test."""
    file = log.with_name("scorer.py")
    file.write_text(FUNCTION.format(log=str(log)))
    reward = RewardConfig(scorer=f"{file}:compute_score", num_workers=2, timeout_seconds=300.0)
    with serving(redis_url, reward=reward, with_jobs=False) as one:
        assert summary(one.score(answers(*["1"] * 8))) == [1.0] * 8
        yield one


def hanging_now(log: Path) -> int:
    return len(log.read_text()) if log.exists() else 0


def no_time(item: reward_pb2.ScoreReply.Item) -> bool:
    return item.unscored.reason == "timeout" and "the call's deadline" in item.unscored.detail


# ---- the deadline ----


def test_settled_scores_are_returned_before_the_deadline(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are answered after half of their time, so that a slow machine makes no difference."""
    monkeypatch.setattr("tandem.services.reward.request_scorer._MARGIN_SHARE", 0.5)
    monkeypatch.setattr("tandem.services.reward.request_scorer.DEADLINE_MARGIN_SECONDS", 60.0)
    requests = [reward_pb2.ScoreRequest(items=answers("1", *texts)) for texts in (["2", "hang", "1"], ["2"])]
    found = list(service.stub.Score(requests[0], timeout=3.0).items)
    assert summary(found[:2]) == [1.0, 0.0] and no_time(found[2]) and len(found) == 4
    assert summary(service.score(answers(*["1"] * 8))) == [1.0] * 8, "both workers are there again"
    stream = [reward_pb2.ScoreStreamRequest(request_id=n, request=request) for n, request in enumerate(requests)]
    replies = {one.request_id: one.reply.items for one in service.stub.ScoreStream(iter(stream), timeout=3.0)}
    assert summary(replies[1]) == [1.0, 0.0]
    assert summary(replies[0][:2]) == [1.0, 0.0] and no_time(replies[0][2])


# ---- cancelled calls ----


def test_a_cancelled_call_stops_its_scoring(service: Service, log: Path) -> None:
    before = hanging_now(log)
    hanging = reward_pb2.ScoreRequest(items=answers(*["hang"] * 2))
    calls = [service.stub.Score.future(hanging, timeout=60) for _ in range(2)]
    eventually(lambda: hanging_now(log) == before + 2)  # both workers
    calls.append(service.stub.Score.future(reward_pb2.ScoreRequest(items=answers(*["1"] * 500)), timeout=60))
    eventually(lambda: service.core.figures()["calls_waiting_calls"] >= 1)
    judged = service.core.figures()["worker_items_calls"]
    for call in calls:
        call.cancel()
    eventually(lambda: service.servicer._scorer._bytes_in_flight == 0)
    assert service.core.figures()["calls_waiting_calls"] == 0
    assert summary(service.score(answers("1", "2"))) == [1.0, 0.0], "the workers were given up, long before their time"
    assert service.core.figures()["worker_items_calls"] < judged + 100 and hanging_now(log) <= before + 4


def test_a_hanging_call_delays_no_rubric_and_frees_its_thread_when_it_is_cancelled(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.services.reward.request_scorer._SCORING_THREADS", 1)
    core = ScriptedCore()
    with serving(redis_url, core, with_jobs=False) as one:
        call = one.stub.Score.future(reward_pb2.ScoreRequest(items=answers("wait")), timeout=60)
        eventually(lambda: core.asked == ["wait"])
        assert one.submit(answers("1"), rubric=EXACT).job.num_items == 1
        assert one.stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=20).scorers
        assert not call.done()
        call.cancel()
        assert summary(one.score(answers("1"))) == [1.0] and not core.go_on.is_set()


# ---- too many calls ----


def test_a_call_beyond_the_limit_is_retried_and_health_still_answers(redis_url: str) -> None:
    core = ScriptedCore()
    with serving(redis_url, core, with_jobs=False, limits=replace(RPC_LIMITS, max_calls=1)) as one:
        request = reward_pb2.ScoreRequest(items=answers("1"))
        waiting = reward_pb2.ScoreRequest(items=answers("wait"))
        under_way = one.stub.Score.future(waiting, timeout=60)
        eventually(lambda: core.asked == ["wait"])
        with grpc.insecure_channel(one.server.address, options=[("grpc.enable_retries", 0)]) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                Stub(channel).Score(request, timeout=20)
            assert code_of(caught.value) == "UNAVAILABLE"
            assert isinstance(from_rpc_error(caught.value), UnavailableError)
            assert "0 of 1 places are free" in str(caught.value.details())
            assert list(Stub(channel).ScoreStream(iter([]), timeout=20)) == [], "streams have places of their own"
            health = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=20
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            common_pb2_grpc.InfoServiceStub(channel).Info(common_pb2.InfoRequest(), timeout=20)
        threading.Timer(0.1, core.go_on.set).start()
        assert summary(one.score(answers("1"))) == [1.0], "the clients of this project try again"
        assert len(under_way.result().items) == 1
        core.go_on.clear()
        again = one.stub.Score.future(waiting, timeout=60)
        eventually(lambda: core.asked.count("wait") == 2)
        again.cancel()
        assert summary(one.score(answers("2"))) == [0.0], "a call that was cancelled is none any more"


# ---- oversized messages and invalid text ----


@pytest.mark.parametrize("method", ["Score", "ScoreStream", "SubmitJob"])
def test_a_message_that_is_too_large_is_a_one_line_error_with_both_sizes(service: Service, method: str) -> None:
    request = reward_pb2.ScoreRequest(items=[Item(solution="x" * (MAX_REQUEST_BYTES + (1 << 20)))])
    told = rf"has 17,8\d\d,\d\d\d bytes, at most {MAX_CARRIED_BYTES:,} are taken"
    wrapped = {
        "Score": [request],
        "ScoreStream": [reward_pb2.ScoreStreamRequest(request=request)],
        "SubmitJob": submission(list(request.items)),
    }
    with pytest.raises(SizeError, match=told) as caught, translated():
        raw_call(service.channel, method, [message.SerializeToString() for message in wrapped[method]])
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, grpc.RpcError) and code_of(caught.value.__cause__) == "RESOURCE_EXHAUSTED"
    assert summary(service.score(answers("1"))) == [1.0]


def test_a_message_that_is_too_large_after_decompression_is_refused(service: Service) -> None:
    request = reward_pb2.ScoreRequest(items=[Item(solution="x" * (MAX_REQUEST_BYTES + (1 << 20)))])
    with pytest.raises(SizeError, match="a message is too large"), translated():
        service.stub.Score(request, timeout=20, compression=grpc.Compression.Gzip)


def test_the_size_limit_applies_to_the_request_without_its_wrapping(service: Service) -> None:
    """The transport allows extra bytes for the wrapping; a request that uses them is refused by its own size, with the
    same error.
    """
    above = reward_pb2.ScoreRequest(items=[Item(solution="x" * MAX_REQUEST_BYTES)]).ByteSize() - MAX_REQUEST_BYTES
    request = reward_pb2.ScoreRequest(items=[Item(solution="x" * (MAX_REQUEST_BYTES - above))])
    assert request.ByteSize() == MAX_REQUEST_BYTES
    wrapped = reward_pb2.ScoreStreamRequest(request_id=2**64 - 1, request=request)
    (reply,) = service.stub.ScoreStream(iter([wrapped]), timeout=20)
    assert len(reply.reply.items) == 1
    request.items[0].solution += "x"
    with pytest.raises(SizeError, match="the request has 16,777,217 bytes, at most 16,777,216") as caught, translated():
        service.stub.Score(request, timeout=20)
    assert isinstance(caught.value.__cause__, grpc.RpcError) and code_of(caught.value.__cause__) == "RESOURCE_EXHAUSTED"


def with_bad(name: str, message: Any) -> bytes:
    """The message with bytes that are not UTF-8 in place of @@."""
    data: bytes = message.SerializeToString()
    assert data.count(b"@@") == 1, name
    return data.replace(b"@@", b"1\xff")


@pytest.mark.parametrize("name", ["data_source", "solution", "ground_truth", "extra_info", "group"])
def test_an_item_with_invalid_text_is_named_with_its_field_and_the_rest_is_scored(service: Service, name: str) -> None:
    items = [*answers("1"), Item(**{name: "@@"}), *answers("2")]
    detail = f"item 1: {name} is not UTF-8: invalid start byte at byte 1"
    request = reward_pb2.ScoreRequest(items=items)
    (data,) = raw_call(service.channel, "Score", [with_bad(name, request)])
    wrapped = reward_pb2.ScoreStreamRequest(request_id=3, request=request)
    (streamed,) = raw_call(service.channel, "ScoreStream", [with_bad(name, wrapped)])
    for reply in (reward_pb2.ScoreReply.FromString(data), reward_pb2.ScoreStreamReply.FromString(streamed).reply):
        assert summary(reply.items) == [1.0, "invalid_input", 0.0]
        assert reply.items[1].unscored.detail == detail


def test_a_job_scores_all_items_except_one_with_invalid_text(redis_url: str) -> None:
    with serving(redis_url) as one:
        header, *chunks, seal = submission(answers("1"), [*answers("2"), Item(solution="@@"), *answers("1")])
        requests = [header.SerializeToString(), *[chunk.SerializeToString() for chunk in chunks[:1]]]
        requests += [with_bad("solution", chunks[1]), seal.SerializeToString()]
        (*_, last) = raw_call(one.channel, "SubmitJob", requests)
        found = one.results(reward_pb2.SubmitJobReply.FromString(last).job.job_id)
        assert summary(found) == [1.0, 0.0, "invalid_input", 1.0]
        assert found[2].unscored.detail == "item 2: solution is not UTF-8: invalid start byte at byte 1"


def test_a_job_with_invalid_text_in_its_header_is_refused(service: Service) -> None:
    header = with_bad("key", Request(header=Request.Header(idempotency_key="@@")))
    with pytest.raises(grpc.RpcError) as caught:
        raw_call(service.channel, "SubmitJob", [header])
    assert code_of(caught.value) == "INVALID_ARGUMENT"
