"""gRPC `RewardService` as clients meet it: scores, streams, jobs, refusals with the place and the remedy, an orderly end."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import common_pb2, common_pb2_grpc, reward_pb2
from protos.errors import (
    DataError,
    DeadlineError,
    EnvironmentLackError,
    JobError,
    JobExistsError,
    ScorerError,
    TandemError,
    UnavailableError,
    UnknownJobError,
)
from reward.config import RewardConfig
from reward.rubric import MAX_SCORERS
from reward.scoring import ScoringCore
from reward.tags import MAX_NAMES
from services.config import dump_recipe, parse_recipe
from services.jobs.config import JobsConfig, ServiceConfig
from services.jobs.store import CANCELLED, JobStore
from services.reward_server import SERVICE_NAME
from services.reward_standalone import main as serve_alone
from services.rpc import connect, from_rpc_error, translated
from services.score_inline import is_quick
from services.score_wire import MAX_DEPTH, MAX_ITEMS, MAX_REQUEST_BYTES, reply_of
from tests.redis_ring import running_redis
from tests.reward_front import (
    ROOT,
    Item,
    Replica,
    Request,
    ScriptedCore,
    Service,
    Stub,
    answers,
    code_of,
    serving,
    submission,
    summary,
    until,
)
from tests.reward_ring import answers as ring_answers
from tests.reward_ring import collect, generate, run_of

NUMERIC = '[[components]]\nscorer = "numeric"\n'
WIDE = "".join(f'[[components]]\nscorer = "numeric"\nname = "n{n}"\n' for n in range(MAX_SCORERS))
EXACT = '[[components]]\nscorer = "exact"\nname = "same"\n'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture(scope="module")
def service(url: str) -> Iterator[Service]:
    """The real core with its default scorer, for tests that leave nothing behind."""
    with serving(url) as one:
        yield one


def score(service: Service, items: list[Item], rubric: str = "") -> list[reward_pb2.ScoreReply.Item]:
    reply = service.stub.Score(reward_pb2.ScoreRequest(items=items, rubric=rubric), timeout=20)
    assert len(reply.items) == len(items)
    return list(reply.items)


class Feed:
    """Requests of a stream, given one by one."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, *requests: Any) -> None:
        for request in requests:
            self._waiting.put(request)

    def close(self) -> None:
        self._waiting.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._waiting.get, None)


# ---- Score ----


def test_one_result_an_item_in_order(service: Service) -> None:
    assert summary(score(service, answers("1", "2", "1"))) == [1.0, 0.0, 1.0]
    assert score(service, []) == []
    (item,) = score(service, answers("1"), EXACT)
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
    found = score(service, [*answers("1"), bad, *answers("2")])
    assert summary(found) == [1.0, "invalid_input", 0.0]
    assert found[1].unscored.detail.startswith(detail), found[1].unscored.detail


def test_json_in_any_dress_is_read(service: Service) -> None:
    truths = [' "1" ', '["1", "2"]', '"\\u0031"', "1", "[" * 64 + "]" * 64]
    found = score(service, [Item(solution="1", ground_truth=truth) for truth in truths])
    assert summary(found) == [1.0, 1.0, 1.0, 1.0, "invalid_input"] and "JSON" not in found[4].unscored.detail


REFUSED = [
    (reward_pb2.ScoreRequest(rubric="components = 3"), ScorerError, "components"),
    (reward_pb2.ScoreRequest(rubric="x" * (65 << 10)), ScorerError, "at most 65,536"),
    (reward_pb2.ScoreRequest(rubric="[" * 10_000), ScorerError, "not valid TOML"),
    (reward_pb2.ScoreRequest(rubric='[[components]]\nscorer = "exat"'), ScorerError, "did you mean exact?"),
    (reward_pb2.ScoreRequest(rubric='[[components]]\nscorer = "os:system"'), ScorerError, "names no import path"),
    (reward_pb2.ScoreRequest(items=[Item()] * (MAX_ITEMS + 1)), DataError, f"has {MAX_ITEMS + 1:,} items, at most"),
    (reward_pb2.ScoreRequest(items=[Item(solution="x" * MAX_REQUEST_BYTES)]), DataError, "send fewer items at a time"),
]


@pytest.mark.parametrize(("request_", "kind", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_scored_at_all_is_refused_with_its_place(
    service: Service, request_: reward_pb2.ScoreRequest, kind: type[TandemError], words: str
) -> None:
    with pytest.raises(kind, match=words), translated():
        service.stub.Score(request_, timeout=20)


TEXT = b"\x0a\x02\xff\xfe"  # the first field, two bytes that are no text
RUBRIC = b"\x12\x02\xff\xfe"
WITHIN = {
    "Score": RUBRIC,
    "GetJob": TEXT,
    "WatchJob": TEXT,
    "CancelJob": TEXT,
    "DeleteJob": TEXT,
    "SubmitJob": b"\x0a\x04" + TEXT,
}
WITHIN["ScoreStream"] = b"\x12\x04" + RUBRIC


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x0a\x7f"])
@pytest.mark.parametrize("method", WITHIN)
def test_bytes_that_are_no_request_are_the_callers_fault(service: Service, method: str, data: bytes) -> None:
    path, data = f"/{SERVICE_NAME}/{method}", data or WITHIN[method]
    with pytest.raises(grpc.RpcError) as caught:
        if method in ("SubmitJob", "ScoreStream"):
            list(service.channel.stream_stream(path)(iter([data]), timeout=20))
        elif method == "WatchJob":
            list(service.channel.unary_stream(path)(data, timeout=20))
        else:
            service.channel.unary_unary(path)(data, timeout=20)
    assert code_of(caught.value) == "INVALID_ARGUMENT" and "no request of this method" in str(caught.value.details())
    assert isinstance(from_rpc_error(caught.value), DataError)


def test_health_answers_while_the_longest_work_is_done(url: str) -> None:
    """Requests that are small, each of which would hold the event loop up for long: they wait here for the test."""
    core = ScriptedCore(in_process=True)
    named = f'[[components]]\nscorer = "tags"\narguments = {{ order = {json.dumps([f"t{n}" for n in range(MAX_NAMES)])} }}\n'
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
    with serving(url, core, with_lane=False) as one:
        health = health_pb2_grpc.HealthStub(one.channel)
        under_way = [one.stub.Score.future(request, timeout=60) for request in requests]
        until(lambda: core.asked.count("wait") == len(requests))
        reply = health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=20)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert not any(call.done() for call in under_way)
        core.go_on.set()
        assert [len(call.result().items) for call in under_way] == [len(request.items) for request in requests]


def test_little_work_takes_no_thread(service: Service) -> None:
    core, default = service.core, service.core.default
    numeric, wide = core.compile(NUMERIC), core.compile(WIDE)
    assert (
        is_quick(default, 64, 64 * 1000) and is_quick(numeric, 8, 8 * 500) and is_quick(core.compile(EXACT), 64, 64_000)
    )
    assert not is_quick(default, 1, 129 << 10) and not is_quick(numeric, 1, 16 << 10) and not is_quick(wide, 1, 1)


def test_replies_are_put_together_where_they_were_scored(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def watched(scores: Any) -> reward_pb2.ScoreReply:
        threads.append(threading.current_thread().name)
        return reply_of(scores)

    monkeypatch.setattr("services.score_calls.reply_of", watched)
    with serving(url, ScriptedCore(), with_lane=False) as one:
        assert summary(score(one, answers("1", "2"))) == [1.0, 0.0]
    assert len(threads) == 1 and threads[0].startswith("score")


def test_a_long_batch_is_scored_in_slices_where_others_wait_but_groups_stay_together(url: str) -> None:
    reward = RewardConfig.model_validate(
        {"scorers": {"far": {"scorer": "remote", "arguments": {"url": "http://127.0.0.1:1"}}}}
    )
    far = '[[components]]\nscorer = "far"\n'
    with serving(url, ScriptedCore(reward), reward=reward, with_lane=False) as one:

        def together(*items: Item, rubric: str = "") -> set[float]:
            return {item.scored.breakdown["together"] for item in score(one, list(items), rubric)}

        assert together(*answers(*["1"] * 1000)) == {1000}, "callers take turns at the worker processes"
        assert together(*answers(*["1"] * 1000), rubric=far) == {64, 128, 256, 512, 40}
        one.core.default = _grouped(one.core)
        assert together(*answers(*["1"] * 1000, group="a")) == {1000}


def _grouped(core: ScoringCore) -> Any:
    one = core.default
    return type(one)(one.rubric, one.text, one.digest, False, True, 1)


# ---- ScoreStream ----


def stream_request(number: int, *texts: str, rubric: str = "") -> reward_pb2.ScoreStreamRequest:
    request = reward_pb2.ScoreRequest(items=answers(*texts), rubric=rubric)
    return reward_pb2.ScoreStreamRequest(request_id=number, request=request)


def test_replies_come_as_they_are_ready_and_name_their_request(url: str) -> None:
    core, feed = ScriptedCore(), Feed()
    with serving(url, core, with_lane=False) as one:
        replies = one.stub.ScoreStream(iter(feed), timeout=30)
        feed.put(stream_request(7, "wait"), stream_request(8, "1", "2"))
        first = next(replies)
        assert (first.request_id, summary(first.reply.items)) == (8, [1.0, 0.0])
        core.go_on.set()
        assert next(replies).request_id == 7
        feed.close()
        assert list(replies) == []


def test_no_more_than_a_few_requests_of_a_stream_are_under_way(url: str) -> None:
    core = ScriptedCore()
    with serving(url, core, with_lane=False) as one:
        requests = [stream_request(n, "wait") for n in range(50)]
        replies = one.stub.ScoreStream(iter(requests), timeout=30)
        until(lambda: len(core.asked) == 8)
        assert not core.go_on.wait(0.3) and len(core.asked) == 8
        core.go_on.set()
        assert sorted(reply.request_id for reply in replies) == list(range(50))


def test_a_refused_request_ends_the_stream_and_is_named(service: Service) -> None:
    requests = [stream_request(1, "1"), stream_request(2, "1", rubric="nonsense")]
    with pytest.raises(ScorerError, match="request 2: "), translated():
        list(service.stub.ScoreStream(iter(requests), timeout=20))


# ---- jobs ----


def test_a_job_is_scored_item_by_item(service: Service) -> None:
    chunks = [answers("1", "2", "1"), [Item(solution="1", ground_truth="nonsense"), *answers("1")], answers("2")]
    replies = list(service.stub.SubmitJob(submission(*chunks, rubric=EXACT), timeout=20))
    assert [reply.next_chunk for reply in replies] == [0, 1, 2, 3, 3]
    assert replies[0].job.state == reward_pb2.Job.OPEN and replies[0].job.num_items == 0
    job_id = replies[-1].job.job_id
    found = service.results(job_id)
    assert summary(found) == [1.0, 0.0, 1.0, "invalid_input", 1.0, 0.0]
    assert found[3].unscored.detail.startswith("item 3: ground_truth"), "numbered within the job"
    job = service.stub.GetJob(reward_pb2.GetJobRequest(job_id=job_id), timeout=20)
    assert (job.state, job.num_items, job.num_scored, job.num_waiting) == (reward_pb2.Job.DONE, 6, 5, 0)
    assert (job.mean_value, dict(job.num_unscored)) == (0.6, {"invalid_input": 1})
    assert job.created_at <= job.finished_at < job.expires_at
    listed = service.stub.ListJobs(reward_pb2.ListJobsRequest(limit=5), timeout=20).jobs
    assert job in listed


def test_a_watch_goes_on_after_its_cursor(service: Service) -> None:
    job_id = service.submit(*[answers(str(n)) for n in range(5)]).job.job_id
    events = service.watch(job_id)
    assert [event.cursor for event in events] == [1, 2, 3, 4, 5, 5] and not events[-1].HasField("results")
    assert events[-1].job.state == reward_pb2.Job.DONE
    assert [event.cursor for event in service.watch(job_id, after_cursor=3)] == [4, 5, 5]
    assert [event.cursor for event in service.watch(job_id, with_results=False)] == [5]
    assert not any(event.HasField("results") for event in service.watch(job_id, with_results=False))
    with pytest.raises(DataError, match=r"after_cursor is 6, and job .* has had 5 events"), translated():
        service.watch(job_id, after_cursor=6)


def test_a_submission_that_broke_goes_on_where_it_was(service: Service) -> None:
    feed = Feed()
    replies = service.stub.SubmitJob(iter(feed), timeout=20)
    feed.put(Request(header=Request.Header(idempotency_key="broken")))
    feed.put(Request(chunk=Request.Chunk(index=0, items=answers("1"))))
    job = [next(replies), next(replies)][-1].job
    replies.cancel()
    feed.close()
    again = list(service.stub.SubmitJob(submission(answers("2"), answers("1"), key="broken"), timeout=20))
    assert [reply.next_chunk for reply in again] == [1, 1, 2, 2], "chunk 0 is there already, and stays as it was"
    assert {reply.job.job_id for reply in again} == {job.job_id}
    assert summary(service.results(job.job_id)) == [1.0, 1.0]
    (only,) = service.stub.SubmitJob(iter([Request(header=Request.Header(idempotency_key="broken"))]), timeout=20)
    assert only.job.state == reward_pb2.Job.DONE and only.next_chunk == 2


HEADER = Request(header=Request.Header(idempotency_key="refusals"))
REFUSALS: list[tuple[list[Request], type[TandemError], str]] = [
    ([Request(chunk=Request.Chunk())], DataError, "a chunk came before the header"),
    ([Request(seal=Request.Seal())], DataError, "a seal came before the header"),
    ([Request()], DataError, "neither header, chunk nor seal"),
    ([HEADER, HEADER], DataError, "begins with a header, and has one"),
    ([Request(header=Request.Header())], DataError, "idempotency_key is empty: choose one"),
    ([Request(header=Request.Header(idempotency_key="é" * 101))], DataError, "has 202 bytes, at most 200"),
    ([Request(header=Request.Header(idempotency_key="a", name="x" * 201))], DataError, "header.name has 201 bytes"),
    ([Request(header=Request.Header(idempotency_key="a", priority=101))], DataError, "priority 101 is not between"),
    ([Request(header=Request.Header(idempotency_key="a", rubric="scorer = 1"))], ScorerError, "unknown key scorer"),
    ([HEADER, Request(header=Request.Header(idempotency_key="a", priority=1))], DataError, "begins with a header"),
    ([HEADER, Request(chunk=Request.Chunk(index=0))], DataError, "chunk 0 has no items"),
    ([HEADER, Request(chunk=Request.Chunk(index=3, items=[Item()]))], DataError, "chunk 3 came before chunk 0"),
    ([HEADER, Request(seal=Request.Seal(num_chunks=2))], DataError, "has 0 chunks, the seal says 2"),
    ([HEADER, Request(chunk=Request.Chunk(items=[Item()] * (MAX_ITEMS + 1)))], DataError, "chunk 0 has 8,193 items"),
]


@pytest.mark.parametrize(("requests", "kind", "words"), REFUSALS, ids=range(len(REFUSALS)))
def test_a_submission_that_is_wrong_says_where(
    service: Service, requests: list[Request], kind: type[TandemError], words: str
) -> None:
    with pytest.raises(kind, match=words), translated():
        list(service.stub.SubmitJob(iter(requests), timeout=20))


def test_a_key_means_one_job(service: Service) -> None:
    job = service.submit(answers("1"), key="mine", rubric=EXACT, priority=2).job
    assert service.submit(answers("1"), key="mine", rubric=EXACT, priority=2).job.job_id == job.job_id
    with pytest.raises(JobExistsError, match="another rubric") as caught, translated():
        service.submit(answers("1"), key="mine", rubric="", priority=2)
    assert isinstance(caught.value.__cause__, grpc.RpcError) and code_of(caught.value.__cause__) == "ALREADY_EXISTS"
    with pytest.raises(JobError, match="takes no more"), translated():
        service.submit(answers("1"), answers("1"), key="mine", rubric=EXACT, priority=2)


def test_a_job_that_is_not_there_is_not_found(service: Service) -> None:
    for call, request in (
        (service.stub.GetJob, reward_pb2.GetJobRequest(job_id="0" * 32)),
        (service.stub.CancelJob, reward_pb2.CancelJobRequest(job_id="")),
    ):
        with pytest.raises(UnknownJobError), translated():
            call(request, timeout=20)
    with pytest.raises(grpc.RpcError) as caught:
        service.watch("no")
    assert code_of(caught.value) == "NOT_FOUND"
    with pytest.raises(DataError, match="at most 1000 jobs"), translated():
        service.stub.ListJobs(reward_pb2.ListJobsRequest(limit=1001), timeout=20)


def test_a_cancelled_job_ends_the_watch_of_it(url: str) -> None:
    core = ScriptedCore()
    with serving(url, core) as one:
        job_id = one.submit(answers("1"), answers("wait", "1"), answers("2", "2", "2")).job.job_id
        events = one.stub.WatchJob(reward_pb2.WatchJobRequest(job_id=job_id, with_results=True), timeout=20)
        until(lambda: "wait" in core.asked)
        job = one.stub.CancelJob(reward_pb2.CancelJobRequest(job_id=job_id), timeout=20)
        assert job.state == reward_pb2.Job.CANCELLED and job.num_waiting == 0
        assert job.num_scored + job.num_unscored[CANCELLED] == 6 and job.num_unscored[CANCELLED] >= 2
        assert list(events)[-1].job == job
        core.go_on.set()
        until(lambda: one.store.counts()["stale_results_refused"] == 1)
        assert one.stub.GetJob(reward_pb2.GetJobRequest(job_id=job_id), timeout=20) == job


def test_submission_waits_while_too_much_is_not_scored(url: str) -> None:
    core = ScriptedCore()
    with serving(url, core) as one:
        one.store._run("configure", 10**9, 40_000, 10**9)
        read: list[int] = []

        def requests() -> Iterator[Request]:
            for number, request in enumerate(submission(*[answers("wait", "x" * 100_000) for _ in range(120)])):
                read.append(number)
                yield request

        replies: list[reward_pb2.SubmitJobReply] = []
        call = one.stub.SubmitJob(requests(), timeout=60)
        reader = threading.Thread(target=lambda: replies.extend(call))
        reader.start()
        until(lambda: len(replies) >= 2)
        assert not core.go_on.wait(0.5)
        assert len(replies) == 2 and one.store.counts()["chunks_waiting"] + one.store.counts()["chunks_leased"] == 1
        assert len(read) < 120, "the client is held up, nothing piles up in the server"
        core.go_on.set()
        reader.join(timeout=60)
        assert replies[-1].next_chunk == 120
        assert summary(one.results(replies[-1].job.job_id)) == [0.0, 0.0] * 120


def test_jobs_calls_have_an_end_without_a_deadline(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = ScriptedCore()
    with serving(url, core) as one:
        one.store._run("configure", 10**9, 40_000, 10**9)
        job_id = one.submit(answers("wait"), key="watched").job.job_id
        monkeypatch.setattr("services.waits.LONGEST_CALL_SECONDS", 0.3)
        with pytest.raises(DeadlineError, match="goes on where this one ends"), translated():
            list(one.stub.WatchJob(reward_pb2.WatchJobRequest(job_id=job_id)))
        chunks = [answers("wait", "x" * 100_000)] * 3
        with pytest.raises(DeadlineError, match="goes on where this one ends"), translated():
            list(one.stub.SubmitJob(submission(*chunks, key="waits for room")))
        feed = Feed()
        feed.put(Request(header=Request.Header(idempotency_key="says no more")))
        with pytest.raises(DeadlineError, match="goes on where this one ends"), translated():
            list(one.stub.SubmitJob(iter(feed)))
        feed.close()
        monkeypatch.undo()
        core.go_on.set()
        assert one.submit(*chunks, key="waits for room").next_chunk == 3
        assert summary(one.results(job_id)) == [0.0]


def test_items_whose_scorer_is_out_of_reach_are_scored_again_and_no_others(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.backoff.FIRST_PAUSE_SECONDS", 0.01)
    core = ScriptedCore()
    with serving(url, core, reward=RewardConfig(infrastructure_attempts=3)) as one:
        chunk = answers("infrastructure*2", "1", "timeout*1", "infrastructure*9", "2")
        found = one.results(one.submit(chunk).job.job_id)
        assert summary(found) == [1.0, 1.0, "timeout", "infrastructure", 0.0]
        assert core.asked.count("infrastructure*2") == core.asked.count("infrastructure*9") == 3
        assert core.asked.count("1") == core.asked.count("timeout*1") == 1, "a time-out would only come again"


def test_items_that_are_compared_are_scored_again_together(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.backoff.FIRST_PAUSE_SECONDS", 0.01)
    core = ScriptedCore()
    core.default = _grouped(core)
    with serving(url, core) as one:
        chunk = [*answers("infrastructure*1", "a", group="g"), *answers("b", group="h"), *answers("c")]
        assert summary(one.results(one.submit(chunk).job.job_id)) == [1.0, 0.0, 0.0, 0.0]
        assert [core.asked.count(text) for text in "abc"] == [2, 1, 1]


def test_an_item_that_services_die_of_gets_a_reason(url: str) -> None:
    with serving(url, with_lane=False) as one:
        job_id = one.submit(answers("1"), answers("1", "1")).job.job_id
        for _ in range(5):
            assert (claim := one.store.claim("dying", 300, 5)) is not None and claim.index == 0
            assert one.store.register("dying") == 1
        with one.lane:
            found = one.results(job_id)
        assert summary(found) == ["crashed", 1.0, 1.0]
        assert found[0].unscored.detail.startswith("5 services in a row ended")


def test_a_job_is_never_scored_by_another_rubric_than_it_was_submitted_to(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.backoff.FIRST_PAUSE_SECONDS", 0.01)
    jobs = JobsConfig(namespace="changed")
    with serving(url, jobs=jobs, with_lane=False) as one:
        plain, named = one.submit(answers("1 ")).job.job_id, one.submit(answers("1 "), rubric=EXACT).job.job_id
    with serving(url, jobs=jobs, reward=RewardConfig(scorer="numeric", infrastructure_attempts=2)) as one:
        (found,) = one.results(plain)
        assert found.unscored.reason == "infrastructure" and "has another rubric" in found.unscored.detail
        assert summary(one.results(named)) == [1.0]


def test_a_job_is_never_scored_by_another_scorer_of_the_same_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.backoff.FIRST_PAUSE_SECONDS", 0.01)
    jobs, rubric = JobsConfig(namespace="renamed"), '[[components]]\nscorer = "house"\n'

    def reward(scorer: str) -> RewardConfig:
        house = {"scorer": scorer}
        return RewardConfig.model_validate({"scorers": {"house": house}, "infrastructure_attempts": 2})

    with serving(url, jobs=jobs, reward=reward("exact"), with_lane=False) as one:
        named, plain = [one.submit(answers("1.0"), rubric=text).job.job_id for text in (rubric, "")]
    with serving(url, jobs=jobs, reward=reward("numeric")) as one:
        (found,) = one.results(named)
        assert found.unscored.reason == "infrastructure" and "has another rubric" in found.unscored.detail
        assert summary(one.results(plain)) == [0.0], "what does not name it is the same"
    monkeypatch.setattr("reward.exact.ExactMatch.VERSION", "2")
    with serving(url, jobs=jobs, reward=reward("exact"), with_lane=False) as one:
        changed = one.submit(answers("1"), rubric=rubric).job.job_id
    monkeypatch.undo()
    monkeypatch.setattr("services.backoff.FIRST_PAUSE_SECONDS", 0.01)
    with serving(url, jobs=jobs, reward=reward("exact")) as one:
        assert summary(one.results(changed)) == ["infrastructure"], "nor by another version of it"


def test_a_stop_gives_back_what_is_not_finished_with_what_is_scored_of_it(url: str) -> None:
    jobs = JobsConfig(namespace="stopped")
    core = ScriptedCore()
    with serving(url, core, jobs=jobs) as one:
        job_id = one.submit([*answers(*["1"] * 64), *answers("wait"), *answers(*["2"] * 300)]).job.job_id
        until(lambda: "wait" in core.asked)
    assert core.asked.count("1") == 64
    with closing(JobStore(url, jobs)) as store:
        (chunk,) = store._redis.hvals(store._key(f"chunks:{job_id}"))
        assert (json.loads(chunk)["attempts"], json.loads(chunk)["worker"]) == (0, ""), "a stop is no attempt"
    core = ScriptedCore()
    core.go_on.set()
    with serving(url, core, jobs=jobs) as one:
        assert summary(one.results(job_id)) == [1.0] * 64 + [0.0] * 301
        assert core.asked.count("1") == 0, "what was scored is not scored again"
        assert one.store.counts()["leases_expired"] == 0


def test_a_bug_ends_the_lane_and_says_so(url: str) -> None:
    with pytest.raises(ZeroDivisionError), serving(url, ScriptedCore()) as one:
        one.submit(answers("bug"))
        assert one.stop.wait(20)


def test_urgent_jobs_come_first(url: str) -> None:
    core = ScriptedCore()
    with serving(url, core, with_lane=False) as one:
        slow = [one.submit(*[answers(f"slow {n}") for n in range(4)], priority=-1) for _ in range(2)]
        urgent = one.submit(answers("urgent"), priority=100)
        with one.lane:
            for reply in (*slow, urgent):
                one.results(reply.job.job_id)
        assert core.asked.index("urgent") < 2 and {lane for lane, _ in core.batches} == {"jobs"}


# ---- what else it tells ----


def test_what_may_be_asked_for_is_told(service: Service) -> None:
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
    assert summary(score(service, answers("1"), reply.default_rubric)) == [1.0]


def test_streams_end_when_the_service_does(url: str) -> None:
    core, ended = ScriptedCore(), []
    with serving(url, core) as one:
        job_id = one.submit(answers("wait")).job.job_id
        feed, chunks = Feed(), Feed()
        chunks.put(Request(header=Request.Header(idempotency_key="open")))
        calls = [
            one.stub.WatchJob(reward_pb2.WatchJobRequest(job_id=job_id), timeout=30),
            one.stub.ScoreStream(iter(feed), timeout=30),
            one.stub.SubmitJob(iter(chunks), timeout=30),
        ]
        feed.put(stream_request(1, "1"))
        assert all(next(call) for call in calls), "a stream that has had no reply would be tried elsewhere"

        def read(call: Any) -> None:
            try:
                list(call)
            except grpc.RpcError as error:
                ended.append(from_rpc_error(error))

        readers = [threading.Thread(target=read, args=(call,)) for call in calls]
        for reader in readers:
            reader.start()
        until(lambda: "wait" in core.asked)
    for reader in readers:
        reader.join(timeout=20)
    feed.close(), chunks.close()
    assert [type(error) for error in ended] == [UnavailableError] * 3 and all("shutting down" in str(e) for e in ended)


def test_a_call_under_way_when_the_service_ends_can_be_made_elsewhere(url: str) -> None:
    core, ended = ScriptedCore(), []
    with serving(url, core, with_lane=False) as one:

        def ask() -> None:
            request = reward_pb2.ScoreRequest(items=answers("wait"))
            with (
                grpc.insecure_channel(one.server.address, options=[("grpc.enable_retries", 0)]) as channel,
                pytest.raises(grpc.RpcError) as caught,
            ):
                Stub(channel).Score(request, timeout=30)
            ended.append(code_of(caught.value))

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: "wait" in core.asked)
    asking.join(timeout=20)
    assert ended == ["UNAVAILABLE"]


# ---- as a process ----


def test_replicas_on_one_redis_are_one_service(url: str, tmp_path: Path) -> None:
    overrides = ("jobs.namespace=replicas", "reward.num_workers=1")
    one = Replica(tmp_path, *overrides, redis_url=url, name="one")
    two = Replica(tmp_path, *overrides, redis_url=url, name="two")
    try:
        with connect(f"{one.address},{two.address}") as channel:
            stub = Stub(channel)
            (*_, reply) = stub.SubmitJob(submission(*[answers("1", "2")] * 20, key="shared"), timeout=20)
            info = common_pb2_grpc.InfoServiceStub(channel)

            def answered() -> set[float]:
                """Which replicas four calls in a row come to."""
                return {info.Info(common_pb2.InfoRequest(), timeout=20).started_at for _ in range(4)}

            until(lambda: len(answered()) == 2)
            for _ in range(4):  # in turns: each knows the job
                assert stub.GetJob(reward_pb2.GetJobRequest(job_id=reply.job.job_id), timeout=20).num_items == 40
            assert len(answered()) == 2
            two.kill()
            for _ in range(10):  # a call that meets the dead one is tried at the other
                assert summary(stub.Score(reward_pb2.ScoreRequest(items=answers("1")), timeout=20).items) == [1.0]
            request = reward_pb2.WatchJobRequest(job_id=reply.job.job_id)
            assert list(stub.WatchJob(request, timeout=30))[-1].job.num_scored == 40
    finally:
        two.kill()
        assert one.terminate() == 0


def test_info_answers_before_all_is_there(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[common_pb2.InfoReply] = []

    def too_early(*_: Any, info: Any, **__: Any) -> None:
        told.append(info())
        raise EnvironmentLackError("that was all")

    monkeypatch.setattr("services.reward_standalone.stop_event", threading.Event)
    monkeypatch.setattr("services.reward_standalone.ServerThread", too_early)
    with pytest.raises(EnvironmentLackError, match="that was all"):
        serve_alone(ServiceConfig(), host="127.0.0.1", redis_url=url, folder=tmp_path)
    (reply,) = told
    assert (reply.service, reply.activity, reply.figures["workers_replaced"]) == ("reward", "starting", 0)


def test_alone_with_a_redis_of_its_own(tmp_path: Path) -> None:
    replica = Replica(tmp_path)
    try:
        with connect(replica.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", SERVICE_NAME):
                reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME)
            assert next(reflection.ServerReflectionInfo(iter([asked]), timeout=20)).HasField("file_descriptor_response")
            stub = Stub(channel)
            (*_, reply) = stub.SubmitJob(submission(answers("1", "2"), key="kept"), timeout=20)
            list(stub.WatchJob(reward_pb2.WatchJobRequest(job_id=reply.job.job_id), timeout=20))
            info = common_pb2_grpc.InfoServiceStub(channel).Info(common_pb2.InfoRequest(), timeout=20)
            assert (info.service, info.figures["items_ended"], info.figures["jobs"]) == ("reward", 2, 1)
    finally:
        assert replica.terminate() == 0
    replica = Replica(tmp_path)
    try:
        with connect(replica.address) as channel:
            header = Request(header=Request.Header(idempotency_key="kept"))
            (again,) = Stub(channel).SubmitJob(iter([header]), timeout=20)
            assert (again.job.job_id, again.job.state) == (reply.job.job_id, reward_pb2.Job.DONE)
            assert (again.job.num_scored, again.next_chunk) == (2, 1)
    finally:
        replica.process.send_signal(signal.SIGINT)
        assert replica.process.wait(timeout=20) == 0


RUN = """
import sys
from services.config import load_resolved
from services.process import die_with_parent, run_service
from services.reward_service import main
die_with_parent()
run_service(lambda: main(load_resolved(sys.argv[1]), sys.argv[2]))
"""


def test_a_run_serves_calls_and_jobs_beside_its_groups(url: str, tmp_path: Path) -> None:
    buffer = run_of(url)
    sections = {"run": {"run_id": buffer.run_id}, "model": {"path": "x"}, "data": {"train_file": "x"}}
    (tmp_path / "config.json").write_text(dump_recipe(parse_recipe(sections)))
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path / "config.json"), url], cwd=ROOT)
    try:
        until(lambda: "reward" in buffer.services())
        with connect(buffer.services()["reward"]) as channel:
            stub = Stub(channel)
            (*_, reply) = stub.SubmitJob(submission(answers("1", "2"), rubric=EXACT), timeout=20)
            (group_id,) = generate(buffer, [ring_answers("1", "2")])
            assert [row.reward for row in collect(buffer, 1)[group_id].scored_rows] == [1.0, 0.0]
            events = list(stub.WatchJob(reward_pb2.WatchJobRequest(job_id=reply.job.job_id), timeout=20))
            assert (events[-1].job.num_scored, events[-1].job.mean_value) == (2, 0.5)
            assert summary(stub.Score(reward_pb2.ScoreRequest(items=answers("1")), timeout=20).items) == [1.0]
            info = common_pb2_grpc.InfoServiceStub(channel).Info(common_pb2.InfoRequest(), timeout=20)
            assert (info.figures["groups_scored"], info.figures["jobs:items_scored"]) == (1, 2)
        process.terminate()
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
    assert buffer.verify() == []
