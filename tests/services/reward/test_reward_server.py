"""gRPC `RewardService` from a client's side: scores, streams, refusals that name place and remedy, and shutdown."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.protos import reward_pb2
from tandem.protos.errors import DataError, ScorerError, TandemError, UnavailableError
from tandem.reward.config import RewardConfig
from tandem.reward.rubric.rubric import MAX_SCORERS
from tandem.reward.scorers.tags import MAX_NAMES
from tandem.services.reward.request_scorer import is_quick
from tandem.services.reward.server import SERVICE_NAME
from tandem.services.reward.wire import MAX_DEPTH, MAX_ITEMS, MAX_REQUEST_BYTES
from tandem.services.rpc.client import from_rpc_error, translated
from tests.support.reward_server import (
    EXACT,
    Feed,
    Item,
    Request,
    ScriptedCore,
    Service,
    Stub,
    answers,
    code_of,
    raw_call,
    serving,
    summary,
)
from tests.support.waiting import eventually

NUMERIC = '[[components]]\nscorer = "numeric"\n'
WIDE = "".join(f'[[components]]\nscorer = "numeric"\nname = "n{n}"\n' for n in range(MAX_SCORERS))


# ---- Score ----


def test_each_item_has_one_result_in_order(service: Service) -> None:
    assert summary(service.score(answers("1", "2", "1"))) == [1.0, 0.0, 1.0]
    assert service.score([]) == []
    (item,) = service.score(answers("1"), EXACT)
    assert (item.scored.value, dict(item.scored.breakdown)) == (1.0, {"same": 1.0})


BAD_ITEMS = [
    (Item(ground_truth="not json"), "item 1: ground_truth is not JSON: Expecting value"),
    (Item(ground_truth='"1" 2'), "item 1: ground_truth is not JSON: Extra data"),
    (Item(ground_truth='"1"', extra_info="{"), "item 1: extra_info is not JSON: "),
    (Item(ground_truth='"1"', extra_info="[1]"), "item 1: extra_info is not a JSON object but [1]"),
    (Item(ground_truth='"1"', extra_info='"why"'), "item 1: extra_info is not a JSON object but 'why'"),
    (Item(ground_truth="[" * 100_000), f"item 1: ground_truth is not JSON: more than {MAX_DEPTH} lists"),
    (Item(ground_truth="[" * 65 + "]" * 65), f"item 1: ground_truth is not JSON: more than {MAX_DEPTH} lists"),
    (Item(ground_truth="1" * 5000), "item 1: ground_truth is not JSON: Exceeds the limit"),
]


@pytest.mark.parametrize(("bad", "detail"), BAD_ITEMS)
def test_a_bad_item_is_named_with_its_field_and_the_rest_is_scored(service: Service, bad: Item, detail: str) -> None:
    found = service.score([*answers("1"), bad, *answers("2")])
    assert summary(found) == [1.0, "invalid_input", 0.0]
    assert found[1].unscored.detail.startswith(detail), found[1].unscored.detail


def test_any_valid_json_notation_is_read(service: Service) -> None:
    truths = [' "1" ', '["1", "2"]', '"\\u0031"', "1", "[" * 64 + "]" * 64]
    found = service.score([Item(solution="1", ground_truth=truth) for truth in truths])
    assert summary(found) == [1.0, 1.0, 1.0, 1.0, "invalid_input"] and "JSON" not in found[4].unscored.detail


REFUSED = [
    (reward_pb2.ScoreRequest(rubric="components = 3"), ScorerError, "components"),
    (reward_pb2.ScoreRequest(rubric="x" * (65 << 10)), ScorerError, "at most 65,536"),
    (reward_pb2.ScoreRequest(rubric="[" * 10_000), ScorerError, "not valid TOML"),
    (reward_pb2.ScoreRequest(rubric='[[components]]\nscorer = "exat"'), ScorerError, "did you mean exact?"),
    (reward_pb2.ScoreRequest(rubric='[[components]]\nscorer = "os:system"'), ScorerError, "cannot name an import path"),
    (reward_pb2.ScoreRequest(items=[Item()] * (MAX_ITEMS + 1)), DataError, f"has {MAX_ITEMS + 1:,} items, at most"),
    (reward_pb2.ScoreRequest(items=[Item(solution="x" * MAX_REQUEST_BYTES)]), DataError, "send fewer items at a time"),
]


@pytest.mark.parametrize(("request_", "kind", "words"), REFUSED, ids=range(len(REFUSED)))
def test_an_invalid_request_is_refused_with_its_place(
    service: Service, request_: reward_pb2.ScoreRequest, kind: type[TandemError], words: str
) -> None:
    with pytest.raises(kind, match=words), translated():
        service.stub.Score(request_, timeout=20)


TEXT = b"\x0a\x02\xff\xfe"  # field 1, two bytes that are not UTF-8
RUBRIC = b"\x12\x02\xff\xfe"
WITHIN = {
    **dict.fromkeys(("GetJob", "WatchJob", "CancelJob", "DeleteJob"), TEXT),
    **{"Score": RUBRIC, "ScoreStream": b"\x12\x04" + RUBRIC, "SubmitJob": b"\x0a\x04" + TEXT},
}


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x0a\x7f"])
@pytest.mark.parametrize("method", WITHIN)
def test_undecodable_requests_are_invalid_argument(service: Service, method: str, data: bytes) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        raw_call(service.channel, method, [data or WITHIN[method]])
    assert code_of(caught.value) == "INVALID_ARGUMENT" and "cannot be decoded" in str(caught.value.details())
    assert isinstance(from_rpc_error(caught.value), DataError)


def test_health_answers_during_the_longest_work(redis_url: str) -> None:
    """Each request is small but would block the event loop for long; here it waits for the test."""
    core = ScriptedCore(in_process=True)
    named = (
        '[[components]]\nscorer = "tags"\narguments = '
        f"{{ order = {json.dumps([f't{n}' for n in range(MAX_NAMES)])} }}\n"
    )
    repeated = '[[components]]\nscorer = "repetition"\narguments = { n = 1000 }\n'
    requests = [
        reward_pb2.ScoreRequest(items=answers("wait", text), rubric=rubric)
        for rubric, text in (
            (named, "<t1>" * 25_000),
            (WIDE, "1 " * 60_000),
            (WIDE, "1 " * 500),
            (WIDE, ""),
            (repeated, "a " * 60_000),
            (NUMERIC, "1/0 " * 4000),
            ("", "x" * (1 << 20)),
        )
    ]
    requests.append(reward_pb2.ScoreRequest(items=answers("wait", *[""] * (MAX_ITEMS - 1))))
    with serving(redis_url, core, with_jobs=False) as one:
        health = health_pb2_grpc.HealthStub(one.channel)
        under_way = [one.stub.Score.future(request, timeout=60) for request in requests]
        eventually(lambda: core.asked.count("wait") == len(requests))
        reply = health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=20)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert not any(call.done() for call in under_way)
        core.go_on.set()
        assert [len(call.result().items) for call in under_way] == [len(request.items) for request in requests]


def test_small_requests_need_no_thread(service: Service) -> None:
    core, default = service.core, service.core.default
    numeric, wide = core.compile(NUMERIC), core.compile(WIDE)
    assert (
        is_quick(default, 64, 64 * 1000) and is_quick(numeric, 8, 8 * 500) and is_quick(core.compile(EXACT), 64, 64_000)
    )
    assert not is_quick(default, 1, 129 << 10) and not is_quick(numeric, 1, 16 << 10) and not is_quick(wide, 1, 1)


def test_a_long_batch_for_a_remote_scorer_is_sliced_and_groups_stay_together(redis_url: str) -> None:
    reward = RewardConfig.model_validate(
        {"scorers": {"far": {"scorer": "remote", "arguments": {"url": "http://127.0.0.1:1"}}}}
    )
    far = '[[components]]\nscorer = "far"\n'

    def together(core: ScriptedCore, *items: Item, rubric: str = "") -> set[float]:
        with serving(redis_url, core, reward=reward, with_jobs=False) as one:
            return {item.scored.breakdown["together"] for item in one.score(items, rubric)}

    many = answers(*["1"] * 1000)
    assert together(ScriptedCore(reward), *many) == {1000}, "callers take turns at the worker processes"
    assert together(ScriptedCore(reward), *many, rubric=far) == {64, 128, 256, 512, 40}
    assert together(ScriptedCore(reward, grouped=True), *answers(*["1"] * 1000, group="a"), rubric=far) == {1000}


# ---- ScoreStream ----


def stream_request(number: int, *texts: str, rubric: str = "") -> reward_pb2.ScoreStreamRequest:
    request = reward_pb2.ScoreRequest(items=answers(*texts), rubric=rubric)
    return reward_pb2.ScoreStreamRequest(request_id=number, request=request)


def test_replies_come_as_they_are_ready_and_name_their_request(redis_url: str) -> None:
    core, feed = ScriptedCore(), Feed()
    with serving(redis_url, core, with_jobs=False) as one:
        replies = one.stub.ScoreStream(iter(feed), timeout=30)
        feed.put(stream_request(7, "wait"), stream_request(8, "1", "2"))
        first = next(replies)
        assert (first.request_id, summary(first.reply.items)) == (8, [1.0, 0.0])
        core.go_on.set()
        assert next(replies).request_id == 7
        feed.close()
        assert list(replies) == []


def test_only_a_few_requests_of_a_stream_are_in_flight(redis_url: str) -> None:
    core = ScriptedCore()
    with serving(redis_url, core, with_jobs=False) as one:
        requests = [stream_request(n, "wait") for n in range(50)]
        replies = one.stub.ScoreStream(iter(requests), timeout=30)
        eventually(lambda: len(core.asked) == 8)
        assert not core.go_on.wait(0.3) and len(core.asked) == 8
        core.go_on.set()
        assert sorted(reply.request_id for reply in replies) == list(range(50))


def test_a_refused_request_ends_the_stream_and_is_named(service: Service) -> None:
    requests = [stream_request(1, "1"), stream_request(2, "1", rubric="nonsense")]
    with pytest.raises(ScorerError, match="request 2: "), translated():
        list(service.stub.ScoreStream(iter(requests), timeout=20))


# ---- scorers, limits and shutdown ----


def test_scorers_and_limits_are_listed(service: Service) -> None:
    reply = service.stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=20)
    scorers = {one.name: one for one in reply.scorers}
    assert {"exact", "numeric", "regex"} <= set(scorers)
    exact = scorers["exact"]
    assert exact.isolation == "in_process" and exact.version and exact.summary
    assert {one.name: json.loads(one.default) for one in exact.parameters}["ignore_case"] is False
    assert all(one.type and one.description for one in exact.parameters)
    limits = RewardConfig().limits
    assert (reply.limits["processes"], reply.limits["open_files"]) == (limits.processes, limits.open_files)
    assert reply.limits["max_items_per_request"] == MAX_ITEMS and reply.limits["max_request_bytes"] == MAX_REQUEST_BYTES
    assert summary(service.score(answers("1"), reply.default_rubric)) == [1.0]


def test_calls_end_with_the_service_and_can_be_retried_elsewhere(redis_url: str) -> None:
    core = ScriptedCore()
    with serving(redis_url, core) as one:
        job_id = one.submit(answers("wait")).job.job_id
        feed, chunks = Feed(), Feed()
        chunks.put(Request(header=Request.Header(idempotency_key="open")))
        feed.put(stream_request(1, "1"))
        calls = [
            one.stub.WatchJob(reward_pb2.WatchJobRequest(job_id=job_id), timeout=30),
            one.stub.ScoreStream(iter(feed), timeout=30),
            one.stub.SubmitJob(iter(chunks), timeout=30),
        ]
        assert all(next(call) for call in calls), "a stream that has had no reply would be tried elsewhere"
        # The channel of this project would try the call again.
        channel = grpc.insecure_channel(one.server.address, options=[("grpc.enable_retries", 0)])
        score = Stub(channel).Score.future(reward_pb2.ScoreRequest(items=answers("wait")), timeout=30)
        readers = ThreadPoolExecutor(len(calls))
        ended = [readers.submit(list, call) for call in calls]
        eventually(lambda: core.asked.count("wait") == 2)
    for future in ended:
        error = future.exception(timeout=20)
        assert isinstance(error, grpc.RpcError)
        assert isinstance(from_rpc_error(error), UnavailableError) and "shutting down" in str(from_rpc_error(error))
    feed.close(), chunks.close()
    with channel, pytest.raises(grpc.RpcError) as caught:
        score.result(timeout=20)
    assert code_of(caught.value) == "UNAVAILABLE"
