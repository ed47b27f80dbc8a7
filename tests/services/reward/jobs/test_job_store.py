"""The laws of reward jobs in Redis that its twin does not check, and the limit of results: which are given up, which
calls are refused.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import redis
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.reward_job import demands, measure
from tandem.protos import reward_pb2
from tandem.protos.errors import (
    EnvironmentLackError,
    JobError,
    JobExistsError,
    JobLimitError,
    LedgerError,
    UnavailableError,
    UnknownJobError,
)
from tandem.services.buffer import connection
from tandem.services.cli import app
from tandem.services.clients import RewardClient
from tandem.services.config.recipe import JobsConfig, RewardConfig
from tandem.services.leases import SHUTDOWN, Held
from tandem.services.reward.jobs.store import ChunkResult, JobRecord, JobStore
from tandem.services.reward.jobs.worker import JobWorker
from tandem.services.rpc.client import translated
from tests.services.reward.conftest import LEASE_SECONDS, claim, finish, keys_of, new_store, submit
from tests.support.dataset_files import write_lines
from tests.support.redis_ring import lose_every_answer, running_redis
from tests.support.reward_server import ScriptedCore, Service, answers, code_of, serving, submission, summary
from tests.support.waiting import eventually


@pytest.fixture()
def store(redis_url: str) -> Iterator[JobStore]:
    made = new_store(redis_url)
    yield made
    made.close()


def test_a_job_is_submitted_scored_and_done(store: JobStore) -> None:
    job = submit(store, 3, 2, seal=True)
    assert (job.state, job.num_items, job.num_waiting, job.num_chunks, job.finished_at) == ("RUNNING", 5, 5, 2, 0.0)
    first, second = claim(store), claim(store)
    assert (first.index, first.first_item, first.items) == (0, 0, b"key 0")
    assert (second.index, second.first_item, second.items) == (1, 3, b"key 1")
    assert store.claim("one", LEASE_SECONDS, 0) is None
    assert store.complete(second, ChunkResult(b"second", 2, 0.25, {}))
    assert store.complete(first, ChunkResult(b"first", 1, 1.0, {"timeout": 1, "crashed": 1}))
    job, results = store.events(job.job_id, 0, 1 << 20)
    assert results == [b"second", b"first"], "in the order of completion"
    assert (job.state, job.num_scored, job.sum_values, job.num_waiting) == ("DONE", 3, 1.25, 0)
    assert job.num_unscored == {"timeout": 1, "crashed": 1}
    assert job.created_at <= job.finished_at < job.expires_at
    assert store.events(job.job_id, 1, 1 << 20)[1] == [b"first"] and store.events(job.job_id, 2, 1 << 20)[1] == []
    assert store.events(job.job_id, 0, 1)[1] == [b"second"], "one at least"
    assert store.events(job.job_id, 0, 0)[1] == []
    assert not any(name.startswith(("items:", "chunks:", "partials:")) for name in keys_of(store)), "payloads are gone"


def test_the_same_key_is_the_same_job(store: JobStore) -> None:
    job = store.submit("key", rubric="a", priority=3, name="first", digest="d")
    again = store.submit("key", rubric="a", priority=3, name="second", digest="e")
    assert again == job and again.name == "first"
    with pytest.raises(JobExistsError, match=f"job {job.job_id} has this idempotency_key and another rubric"):
        store.submit("key", rubric="b", priority=3)
    with pytest.raises(JobExistsError, match="another priority"):
        store.submit("key", rubric="a", priority=4)
    assert store.submit("1e3", rubric="a", priority=3).job_id != job.job_id
    assert store.submit("1000", rubric="a", priority=3).idempotency_key == "1000"
    assert len(store.list_jobs(10)) == 3


@pytest.mark.parametrize("job_id", ["0" * 32, "", "x", "../../etc", "0" * 31 + "\n", "é" * 32])
def test_an_unknown_job_is_named(store: JobStore, job_id: str) -> None:
    for verb in (
        lambda: store.events(job_id, 0, 1),
        lambda: store.cancel(job_id),
        lambda: store.delete(job_id),
        lambda: store.seal(job_id, 0),
        lambda: store.add_chunk(job_id, 0, 1, b""),
        lambda: store.has_room(job_id, 1),
    ):
        with pytest.raises(UnknownJobError, match="there is no job"):
            verb()


def test_a_chunk_given_back_waits_for_its_pause_and_keeps_its_partial_results(store: JobStore) -> None:
    submit(store, 2)
    assert store.give_back(claim(store), attempts=1, partial=b"half", pause_seconds=300.0)
    assert store.claim("one", LEASE_SECONDS, 0) is None and store.register("") == 1
    paused = claim(store)
    assert (paused.partial, paused.attempts, paused.losses) == (b"half", 1, 0)
    assert store.give_back(paused, attempts=2, partial=b"", pause_seconds=0.0)
    again = claim(store)
    assert (again.partial, again.attempts, again.losses) == (b"half", 2, 0)


def test_a_result_with_a_wrong_number_of_items_is_a_ledger_error(store: JobStore) -> None:
    submit(store, 3)
    held = claim(store)
    with pytest.raises(LedgerError, match="has 3 items, not 2"):
        store.complete(held, ChunkResult(b"", 1, 0.0, {"timeout": 1}))
    assert finish(store, held, 3)


def test_higher_priority_comes_first_and_jobs_of_equal_priority_take_turns(store: JobStore) -> None:
    submit(store, *[10] * 6, key="long")
    claim(store)
    submit(store, *[10] * 2, key="short")
    submit(store, *[1] * 3, key="small")
    submit(store, 10, key="urgent", priority=1)
    submit(store, 10, key="background", priority=-100)
    order = [claim(store).items.decode() for _ in range(12)]
    assert order[0] == "urgent 0" and order[-1] == "background 0"
    assert order.index("short 1") < order.index("long 4"), (
        "a job that comes later does not wait for the whole of an earlier one"
    )
    assert order.index("small 2") < order.index("short 1"), "turns are of items, not of chunks"
    assert [one for one in order if one.startswith("long")] == [f"long {n}" for n in range(1, 6)]


def test_ended_and_abandoned_jobs_are_forgotten_after_retention_and_waiting_ones_are_not(redis_url: str) -> None:
    """The retention is short only once no job is open without anything that waits, but for the abandoned one."""
    store = new_store(redis_url)
    done = submit(store, 1, key="done", seal=True)
    claimed, waiting = claim(store), submit(store, key="waits")
    store = JobStore(redis_url, store.config.model_copy(update={"retention_seconds": 0.05}))
    assert store.add_chunk(waiting.job_id, 0, 1, b"waits 0")[0]
    assert finish(store, claimed, 1)
    abandoned = submit(store, key="open")
    eventually(lambda: [job.job_id for job in store.list_jobs(10)] == [waiting.job_id])
    for job_id in (done.job_id, abandoned.job_id):
        with pytest.raises(UnknownJobError):
            store.events(job_id, 0, 1)
    again = store.submit("done", rubric="another", priority=1)
    assert again.job_id != done.job_id and finish(store, claim(store), 1)
    eventually(lambda: not store.list_jobs(10))
    assert keys_of(store) <= {"clock", "meta", "signal:waiting"}


def test_namespaces_are_separate(redis_url: str) -> None:
    one, other = new_store(redis_url), new_store(redis_url)
    submit(one, 1)
    assert other.claim("one", LEASE_SECONDS, 0) is None and other.list_jobs(10) == []


def test_calls_repeated_after_a_lost_reply_change_nothing(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_every_answer(monkeypatch)
    job = submit(store, 2, 3, seal=True)
    assert (job.num_items, job.num_chunks) == (5, 2)
    first, second = claim(store), claim(store)
    assert store.give_back(first, attempts=1, partial=b"half", pause_seconds=0.0)
    assert finish(store, second, 3) and finish(store, claim(store), 2)
    job = store.cancel(job.job_id)
    assert (job.state, job.num_scored, job.sum_values, job.num_results) == ("DONE", 5, 2.5, 2)
    assert store.counts()["unscored_bytes"] == 0 and store.counts()["stale_results_refused"] == 0


RECORD_BYTES = 4096
OVERHEAD_BYTES = 256


def finished(store: JobStore, key: str, num_bytes: int, *, seal: bool = True) -> JobRecord:
    """A job whose only chunk has results of this many bytes."""
    job = submit(store, 1, key=key, seal=seal)
    results = b"r" * (num_bytes - OVERHEAD_BYTES)
    assert store.complete(claim(store), ChunkResult(results, 1, 1.0, {}))
    return store.events(job.job_id, 0, 0)[0]


def kept(store: JobStore) -> float:
    return store.counts()["result_bytes"]


# ---- the limit ----


def test_the_default_limit_is_twice_the_limit_of_unscored_bytes() -> None:
    assert JobsConfig().result_bytes == 2 * JobsConfig().max_unscored_bytes == 1 << 29
    assert JobsConfig(max_unscored_bytes=1 << 25).result_bytes == 1 << 26
    assert JobsConfig(max_result_bytes=5).result_bytes == 5
    assert JobsConfig(max_result_bytes=5).redis_bytes == JobsConfig().max_unscored_bytes + 5


def test_beyond_the_limit_the_job_that_ended_first_gives_up_its_results(redis_url: str) -> None:
    with closing(new_store(redis_url, max_result_bytes=40_000)) as store:
        late = submit(store, 1, key="late", seal=True)  # submitted first, never ends
        claim(store)
        first, second = finished(store, "first", 10_000), finished(store, "second", 8_000)
        assert kept(store) == 3 * RECORD_BYTES + 18_000 and first.result_bytes == RECORD_BYTES + 10_000
        third = finished(store, "third", 7_000)
        states = {job.idempotency_key: job.state for job in store.list_jobs(10)}
        assert states == {"late": "RUNNING", "first": "EXPIRED", "second": "DONE", "third": "DONE"}
        gone, _ = store.events(first.job_id, 0, 0)
        assert (gone.num_scored, gone.sum_values, gone.ended) == (1, 1.0, True) and gone.expires_at == first.expires_at
        assert gone.result_bytes == RECORD_BYTES and kept(store) == 4 * RECORD_BYTES + 15_000
        assert not store.connection.redis.exists(store.connection.key(f"results:{first.job_id}"))
        with pytest.raises(JobError, match=f"job {first.job_id} is EXPIRED: its results were given up"):
            store.events(first.job_id, 0, 1)
        for job in (second, third):
            assert len(store.events(job.job_id, 0, 1)[1]) == 1
        assert store.counts()["jobs_expired"] == 1
        assert store.submit("first", rubric="", priority=0).job_id == first.job_id, "its key still means it"
        assert store.cancel(late.job_id).state == "CANCELLED"


def test_a_rubric_counts_until_its_job_ends_and_is_compared_even_later(redis_url: str) -> None:
    with closing(new_store(redis_url)) as store:
        job = store.submit("key", rubric="r" * 60_000, priority=0)
        assert kept(store) == job.result_bytes == RECORD_BYTES + 60_000
        job = store.seal(job.job_id, 0)
        assert kept(store) == job.result_bytes == RECORD_BYTES
        assert store.submit("key", rubric="r" * 60_000, priority=0) == job
        with pytest.raises(JobError, match="another rubric"):
            store.submit("key", rubric="r" * 59_999 + "s", priority=0)


def test_counted_bytes_are_at_least_the_memory_that_redis_uses(tmp_path: Path) -> None:
    """Covers the least favourable jobs: one item per chunk, long keys and names, and results that no job record pays
    for.
    """
    with running_redis(tmp_path) as url, closing(new_store(url)) as store:

        def used() -> int:
            for key in store.connection.redis.scan_iter(f"{store.connection.prefix}answer:*", count=1000):
                store.connection.redis.delete(key)  # replies are kept for a minute only
            store.connection.redis.memory_purge()
            return int(store.connection.server_info("memory")["used_memory"])

        def assert_counted() -> None:
            assert used() - before <= kept(store) - counted

        store.connection.redis.config_set("appendfsync", "no")  # the test measures memory only
        before, counted = used(), 0.0
        for number in range(250):
            job = store.submit(f"{number:0200}", rubric="r" * 100, priority=0, name="n" * 200, digest="d" * 64)
            for index in range(1 + number % 3):
                store.add_chunk(job.job_id, index, 1, b"x" * 40)
                store.complete(claim(store), ChunkResult(b"r" * 40, 1, 1.0, {}))
            store.seal(job.job_id, 1 + number % 3)
        assert_counted()
        before, counted = used(), kept(store)
        job = store.submit("many", rubric="", priority=0)  # its record pays for nothing else
        for index in range(250):
            store.add_chunk(job.job_id, index, 1, b"x" * 40)
            store.complete(claim(store), ChunkResult(b"r" * 40, 1, 1.0, {}))
        counted += RECORD_BYTES
        assert_counted()


# ---- deleting ----


def test_deleting_a_job_frees_its_key_and_its_bytes(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(new_store(redis_url)) as store:
        lose_every_answer(monkeypatch)
        job = finished(store, "key", 5_000)
        assert store.delete(job.job_id) == job
        assert kept(store) == 0 and store.list_jobs(10) == []
        for verb in (store.cancel, lambda job_id: store.events(job_id, 0, 1)):
            with pytest.raises(UnknownJobError, match="it was never submitted, or it was deleted"):
                verb(job.job_id)
        assert keys_of(store) <= {"clock", "meta", "by_key"}
        assert finished(store, "key", 5_000).job_id != job.job_id


def test_a_full_redis_still_takes_a_deletion(tmp_path: Path) -> None:
    with running_redis(tmp_path) as url, closing(new_store(url)) as store:
        job = finished(store, "key", 5_000)
        with closing(redis.Redis.from_url(url, protocol=2)) as client:
            client.config_set("maxmemory", 1)
            with pytest.raises(EnvironmentLackError, match="is full: raise its `maxmemory`, or delete jobs"):
                store.submit("new", rubric="", priority=0)
            assert store.delete(job.job_id) == job
            client.config_set("maxmemory", 0)
        assert store.list_jobs(10) == [] and kept(store) == 0


# ---- over gRPC ----


def test_a_job_with_too_many_results_is_refused_and_keeps_them(redis_url: str) -> None:
    jobs = JobsConfig(max_result_bytes=40_000)
    with serving(redis_url, jobs=jobs, with_jobs=False) as one:
        limits = one.stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=20).limits
        assert (limits["max_result_bytes"], limits["max_result_bytes_per_job"]) == (40_000, 20_000)
        *requests, chunk, _ = submission(*[answers("1")] * 61, key="large")
        job_id = one.send(requests)[-1].job.job_id
        with one.job_worker:
            eventually(lambda: one.job(job_id).num_waiting == 0)
            with (
                pytest.raises(JobLimitError, match=r"half of jobs\.max_result_bytes = 40000; raise") as caught,
                translated(),
            ):
                one.send([requests[0], chunk])
            assert isinstance(caught.value.__cause__, grpc.RpcError)
            assert code_of(caught.value.__cause__) == "RESOURCE_EXHAUSTED"
            one.cancel(job_id)
            assert summary(one.results(job_id)) == [1.0] * 60


def reward(service: Service, *arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["reward", *map(str, arguments), "--address", service.server.address])
    assert done.exit_code == code, done.output
    return done


def test_results_given_up_are_an_error_until_the_job_is_deleted_and_submitted_again(
    redis_url: str, tmp_path: Path
) -> None:
    rows = [{"solution": str(number), "ground_truth": "1"} for number in range(100)]
    file, out = write_lines(tmp_path / "answers.jsonl", rows), tmp_path / "scores.jsonl"
    with (
        serving(redis_url, jobs=JobsConfig(max_result_bytes=25_000)) as one,
        RewardClient(one.server.address) as client,
    ):
        first = reward(one, "submit", file, "--watch").stdout.split()[1].removesuffix(":")
        while (job := one.job(first)).state != reward_pb2.Job.EXPIRED:
            job_id = one.submit(answers(*["1"] * 100)).job.job_id
            assert summary(one.results(job_id)) == [1.0] * 100
        assert job.num_scored == 100
        assert client.wait(first).state == "expired" and client.get(job_id).state == "done"
        with pytest.raises(JobError, match="is EXPIRED"):
            list(client.results(first))
        told = f"the results of job {first} were given up for those of later jobs"
        assert told in reward(one, "results", first, code=1).stderr
        assert "is EXPIRED" in reward(one, "results", first, "--out", out, code=1).stderr and not out.exists()
        assert told in reward(one, "submit", file, code=1).stderr
        assert " expired " in reward(one, "jobs").stdout
        assert reward(one, "delete", first).stdout.startswith(f"deleted: job {first} expired: 100 items: 100 scored")
        assert "there is no job" in reward(one, "results", first, code=2).stderr
        reward(one, "submit", file, "--out", out)
        assert len(out.read_text().splitlines()) == 100


def test_a_client_deletes_an_ended_job(redis_url: str) -> None:
    core = ScriptedCore()
    with serving(redis_url, core) as one, RewardClient(one.server.address) as client:
        job_id = one.submit(answers("wait")).job.job_id
        with pytest.raises(JobError, match="is RUNNING; cancel it first") as caught:
            client.delete(job_id)
        assert isinstance(caught.value.__cause__, grpc.RpcError)
        assert code_of(caught.value.__cause__) == "FAILED_PRECONDITION"
        assert reward(one, "delete", job_id, code=2).stderr.count("\n") == 1
        core.go_on.set()
        ended = client.wait(job_id)
        assert client.delete(job_id) == ended
        with pytest.raises(UnknownJobError):
            client.get(job_id)
        with pytest.raises(UnknownJobError):
            client.delete("0" * 32)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_does_not_grow_with_the_size_of_a_job(tmp_path: Path) -> None:
    """benchmarks/reward_job.py covers a million items."""
    found = measure(tmp_path, (20_000, 200_000))
    assert [job["rows"] for job in found] == [20_000, 200_000]
    assert [line for line, met in demands(found) if not met] == []


def test_a_renewal_saves_the_results_of_a_chunk_whose_thread_has_given_it_back(store: JobStore) -> None:
    submit(store, 2, 2, seal=True)
    first, second = claim(store), claim(store)
    lost = replace(second, token=second.token + 1000)
    held = [Held(first, unsaved=lambda: b"of the first"), Held(lost, unsaved=lambda: b"of a lost lease")]
    worker = JobWorker(store, ScriptedCore(), worker="one", reward=RewardConfig(), stop=threading.Event())
    assert asyncio.run(worker.loop.save(held)) == {lost.token}
    assert worker.release(first, SHUTDOWN, held[0].take_unsaved()) == "requeued"
    assert store.give_back(second, attempts=0, partial=b"", pause_seconds=0.0)
    assert {(one.index, one.partial) for one in (claim(store), claim(store))} == {(0, b"of the first"), (1, b"")}


def test_a_store_that_is_told_to_stop_does_not_wait_for_its_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "OUTAGE_SECONDS", 600.0)
    stop = threading.Event()
    with running_redis(tmp_path) as url, closing(JobStore(url, JobsConfig(namespace="stop"), stop)) as store:
        os.kill(redis.Redis.from_url(url).info("server")["process_id"], signal.SIGKILL)
        stop.set()
        with pytest.raises(UnavailableError):
            store.list_jobs(10)
