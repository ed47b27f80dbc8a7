"""Jobs over gRPC: submission, watch, cancellation, refusals with place and remedy, and every item's result."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing

import grpc
import pytest

from tandem.protos import reward_pb2
from tandem.protos.errors import (
    DataError,
    DeadlineError,
    JobError,
    JobExistsError,
    ScorerError,
    TandemError,
    UnknownJobError,
)
from tandem.reward.config import RewardConfig
from tandem.services.config.recipe import JobsConfig
from tandem.services.reward.jobs.store import CANCELLED, JobStore
from tandem.services.reward.wire import MAX_ITEMS
from tandem.services.rpc.client import translated
from tests.support.reward_server import (
    EXACT,
    Feed,
    Item,
    Request,
    ScriptedCore,
    Service,
    answers,
    code_of,
    serving,
    submission,
    summary,
)
from tests.support.waiting import eventually


def test_a_job_is_scored_item_by_item(service: Service) -> None:
    chunks = [answers("1", "2", "1"), [Item(solution="1", ground_truth="nonsense"), *answers("1")], answers("2")]
    replies = service.send(submission(*chunks, rubric=EXACT))
    assert [reply.next_chunk for reply in replies] == [0, 1, 2, 3, 3]
    assert replies[0].job.state == reward_pb2.Job.OPEN and replies[0].job.num_items == 0
    job_id = replies[-1].job.job_id
    found = service.results(job_id)
    assert summary(found) == [1.0, 0.0, 1.0, "invalid_input", 1.0, 0.0]
    assert found[3].unscored.detail.startswith("item 3: ground_truth"), "numbered within the job"
    job = service.job(job_id)
    assert (job.state, job.num_items, job.num_scored, job.num_waiting) == (reward_pb2.Job.DONE, 6, 5, 0)
    assert (job.mean_value, dict(job.num_unscored)) == (0.6, {"invalid_input": 1})
    assert job.created_at <= job.finished_at < job.expires_at
    listed = service.stub.ListJobs(reward_pb2.ListJobsRequest(limit=5), timeout=20).jobs
    assert job in listed


def test_a_watch_resumes_after_its_cursor(service: Service) -> None:
    job_id = service.submit(*[answers(str(n)) for n in range(5)]).job.job_id
    events = service.watch(job_id)
    assert [event.cursor for event in events] == [1, 2, 3, 4, 5, 5] and not events[-1].HasField("results")
    assert events[-1].job.state == reward_pb2.Job.DONE
    assert [event.cursor for event in service.watch(job_id, after_cursor=3)] == [4, 5, 5]
    assert [event.cursor for event in service.watch(job_id, with_results=False)] == [5]
    assert not any(event.HasField("results") for event in service.watch(job_id, with_results=False))
    with pytest.raises(DataError, match=r"after_cursor is 6, and job .* has had 5 events"), translated():
        service.watch(job_id, after_cursor=6)


def test_a_broken_submission_resumes_where_it_stopped(service: Service) -> None:
    feed = Feed()
    replies = service.stub.SubmitJob(iter(feed), timeout=20)
    feed.put(Request(header=Request.Header(idempotency_key="broken")))
    feed.put(Request(chunk=Request.Chunk(index=0, items=answers("1"))))
    job = [next(replies), next(replies)][-1].job
    replies.cancel()
    feed.close()
    again = service.send(submission(answers("2"), answers("1"), key="broken"))
    assert [reply.next_chunk for reply in again] == [1, 1, 2, 2], "chunk 0 is there already, and stays as it was"
    assert {reply.job.job_id for reply in again} == {job.job_id}
    assert summary(service.results(job.job_id)) == [1.0, 1.0]
    only = service.open("broken")
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
def test_an_invalid_submission_is_an_error_with_its_place(
    service: Service, requests: list[Request], kind: type[TandemError], words: str
) -> None:
    replies = []
    with pytest.raises(kind, match=words), translated():
        for reply in service.stub.SubmitJob(iter(requests), timeout=20):
            replies.append(reply)
    assert replies[-1].WhichOneof("outcome") == "error"
    cause = "invalid_rubric" if kind is ScorerError else "invalid_request"
    assert replies[-1].error.WhichOneof("cause") == cause and re.search(words, replies[-1].error.message)


def test_a_key_belongs_to_one_job(service: Service) -> None:
    job = service.submit(answers("1"), key="mine", rubric=EXACT, priority=2).job
    assert service.submit(answers("1"), key="mine", rubric=EXACT, priority=2).job.job_id == job.job_id
    with pytest.raises(JobExistsError, match="another rubric") as caught, translated():
        service.submit(answers("1"), key="mine", rubric="", priority=2)
    assert isinstance(caught.value.__cause__, grpc.RpcError) and code_of(caught.value.__cause__) == "ALREADY_EXISTS"
    with pytest.raises(JobError, match="takes no more"), translated():
        service.submit(answers("1"), answers("1"), key="mine", rubric=EXACT, priority=2)


def test_an_unknown_job_is_not_found(service: Service) -> None:
    for call, job_id in ((service.job, "0" * 32), (service.cancel, "")):
        with pytest.raises(UnknownJobError), translated():
            call(job_id)
    events = service.stub.WatchJob(reward_pb2.WatchJobRequest(job_id="no"), timeout=20)
    assert next(events).error.WhichOneof("cause") == "unknown_job"
    with pytest.raises(grpc.RpcError) as caught:
        next(events)
    assert code_of(caught.value) == "NOT_FOUND"
    with pytest.raises(DataError, match="at most 1000 jobs"), translated():
        service.stub.ListJobs(reward_pb2.ListJobsRequest(limit=1001), timeout=20)


def test_cancelling_a_job_ends_its_watch(redis_url: str) -> None:
    core = ScriptedCore()
    with serving(redis_url, core) as one:
        job_id = one.submit(answers("1"), answers("wait", "1"), answers("2", "2", "2")).job.job_id
        events = one.stub.WatchJob(reward_pb2.WatchJobRequest(job_id=job_id, with_results=True), timeout=20)
        eventually(lambda: "wait" in core.asked)
        job = one.cancel(job_id)
        assert job.state == reward_pb2.Job.CANCELLED and job.num_waiting == 0
        assert job.num_scored + job.num_unscored[CANCELLED] == 6 and job.num_unscored[CANCELLED] >= 2
        assert list(events)[-1].job == job
        core.go_on.set()
        eventually(lambda: one.store.counts()["stale_results_refused"] == 1)
        assert one.job(job_id) == job


def test_submission_waits_while_too_many_bytes_are_unscored(redis_url: str) -> None:
    core = ScriptedCore()
    with serving(redis_url, core) as one:
        one.store.connection.run("configure", 10**9, 40_000, 10**9)
        read: list[int] = []

        def requests() -> Iterator[Request]:
            for number, request in enumerate(submission(*[answers("wait", "x" * 400_000) for _ in range(40)])):
                read.append(number)
                yield request

        replies: list[reward_pb2.SubmitJobReply] = []
        call = one.stub.SubmitJob(requests(), timeout=60)
        reader = threading.Thread(target=lambda: replies.extend(call))
        reader.start()
        eventually(lambda: len(replies) >= 2)
        assert not core.go_on.wait(0.5)
        assert len(replies) == 2 and one.store.counts()["chunks_waiting"] + one.store.counts()["chunks_leased"] == 1
        assert len(read) < 40, "the client is held up, nothing piles up in the server"
        core.go_on.set()
        reader.join(timeout=60)
        assert replies[-1].next_chunk == 40
        assert summary(one.results(replies[-1].job.job_id)) == [0.0, 0.0] * 40


def test_job_calls_without_a_deadline_end_after_the_longest_call_time(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = ScriptedCore()
    with serving(redis_url, core) as one:
        one.store.connection.run("configure", 10**9, 40_000, 10**9)
        job_id = one.submit(answers("wait"), key="watched").job.job_id
        monkeypatch.setattr("tandem.services.reward.shutdown.LONGEST_CALL_SECONDS", 0.3)
        with pytest.raises(DeadlineError, match="continues where this one ends"), translated():
            list(one.stub.WatchJob(reward_pb2.WatchJobRequest(job_id=job_id)))
        chunks = [answers("wait", "x" * 100_000)] * 3
        with pytest.raises(DeadlineError, match="continues where this one ends"), translated():
            list(one.stub.SubmitJob(submission(*chunks, key="waits for room")))
        feed = Feed()
        feed.put(Request(header=Request.Header(idempotency_key="says no more")))
        with pytest.raises(DeadlineError, match="continues where this one ends"), translated():
            list(one.stub.SubmitJob(iter(feed)))
        feed.close()
        monkeypatch.undo()
        core.go_on.set()
        assert one.submit(*chunks, key="waits for room").next_chunk == 3
        assert summary(one.results(job_id)) == [0.0]


@pytest.mark.usefixtures("short_pauses")
def test_only_items_whose_scorer_is_unreachable_are_scored_again(redis_url: str) -> None:
    core = ScriptedCore()
    with serving(redis_url, core, reward=RewardConfig(infrastructure_attempts=3)) as one:
        chunk = answers("infrastructure*2", "1", "timeout*1", "infrastructure*9", "2")
        found = one.results(one.submit(chunk).job.job_id)
        assert summary(found) == [1.0, 1.0, "timeout", "infrastructure", 0.0]
        assert core.asked.count("infrastructure*2") == core.asked.count("infrastructure*9") == 3
        assert core.asked.count("1") == core.asked.count("timeout*1") == 1, "a time-out would only come again"


@pytest.mark.usefixtures("short_pauses")
def test_grouped_items_are_scored_again_together(redis_url: str) -> None:
    core = ScriptedCore(grouped=True)
    with serving(redis_url, core) as one:
        chunk = [*answers("infrastructure*1", "a", group="g"), *answers("b", group="h"), *answers("c")]
        assert summary(one.results(one.submit(chunk).job.job_id)) == [1.0, 0.0, 0.0, 0.0]
        assert [core.asked.count(text) for text in "abc"] == [2, 1, 1]
        assert {priority for priority, _ in core.batches} == {"jobs"}


@pytest.mark.usefixtures("short_pauses")
def test_a_job_is_never_scored_by_other_scorers_than_its_own(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by another default rubric, nor by another scorer of the same name, nor by another version of it."""
    jobs, house = JobsConfig(namespace="changed"), '[[components]]\nscorer = "house"\n'

    def reward(scorer: str) -> RewardConfig:
        declared = {"scorer": scorer, "scorers": {"house": {"scorer": scorer}}}
        return RewardConfig.model_validate({**declared, "infrastructure_attempts": 2})

    with serving(redis_url, jobs=jobs, reward=reward("exact"), with_jobs=False) as one:
        *changed, plain = [one.submit(answers("1.0"), rubric=text).job.job_id for text in ("", house, EXACT)]
    with serving(redis_url, jobs=jobs, reward=reward("numeric")) as one:
        for job_id in changed:
            (found,) = one.results(job_id)
            assert found.unscored.reason == "infrastructure" and "has another rubric" in found.unscored.detail
        assert summary(one.results(plain)) == [0.0], "what does not name it is the same"
    with monkeypatch.context() as patch:
        patch.setattr("tandem.reward.scorers.exact.ExactMatch.VERSION", "2")
        with serving(redis_url, jobs=jobs, reward=reward("exact"), with_jobs=False) as one:
            newer = one.submit(answers("1"), rubric=house).job.job_id
    with serving(redis_url, jobs=jobs, reward=reward("exact")) as one:
        assert summary(one.results(newer)) == ["infrastructure"]


def test_a_stop_gives_back_unfinished_chunks_with_their_partial_results(redis_url: str) -> None:
    jobs = JobsConfig(namespace="stopped")
    core = ScriptedCore()
    with serving(redis_url, core, jobs=jobs) as one:
        job_id = one.submit([*answers(*["1"] * 64), *answers("wait"), *answers(*["2"] * 300)]).job.job_id
        eventually(lambda: "wait" in core.asked)
    assert core.asked.count("1") == 64
    with closing(JobStore(redis_url, jobs)) as store:
        (chunk,) = store.connection.redis.hvals(store.connection.key(f"chunks:{job_id}"))
        assert (json.loads(chunk)["attempts"], json.loads(chunk)["worker"]) == (0, ""), "a stop is no attempt"
    core = ScriptedCore()
    core.go_on.set()
    with serving(redis_url, core, jobs=jobs) as one:
        assert summary(one.results(job_id)) == [1.0] * 64 + [0.0] * 301
        assert core.asked.count("1") == 0, "what was scored is not scored again"
        assert one.store.counts()["leases_expired"] == 0


def test_a_bug_stops_the_job_worker_with_its_error(redis_url: str) -> None:
    with pytest.raises(ZeroDivisionError), serving(redis_url, ScriptedCore()) as one:
        one.submit(answers("bug"))
        assert one.stop.wait(20)
