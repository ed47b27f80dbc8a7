"""Job results: the limit in bytes, which results are given up beyond it, which calls are refused, deletion."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import grpc
import pytest
import redis
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.reward_job import demands, measure
from tandem.protos import reward_pb2
from tandem.protos.errors import EnvironmentLackError, JobError, JobLimitError, UnknownJobError
from tandem.services.cli import app
from tandem.services.clients import RewardClient
from tandem.services.config.recipe import JobsConfig
from tandem.services.reward.jobs.store import ChunkResult, JobRecord, JobStore
from tandem.services.rpc.client import translated
from tests.support.dataset_files import write_lines
from tests.support.job_calls import claim, keys_of, new_store, submit
from tests.support.redis_ring import lose_every_answer, running_redis
from tests.support.reward_server import ScriptedCore, Service, answers, code_of, serving, submission, summary
from tests.support.waiting import eventually

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


def test_a_running_job_keeps_its_results_and_is_refused_more_beyond_half(redis_url: str) -> None:
    with closing(new_store(redis_url, max_result_bytes=40_000)) as store:
        other = finished(store, "other", 9_000)
        large = finished(store, "large", 50_000, seal=False)
        assert store.events(other.job_id, 0, 0)[0].state == "EXPIRED"
        assert kept(store) == 2 * RECORD_BYTES + 50_000, "what was taken is scored, and its results are kept"
        with pytest.raises(
            JobLimitError, match=r"results of 54096 bytes, and one job may have half of jobs\.max_result_"
        ):
            store.add_chunk(large.job_id, 1, 1, b"more")
        assert store.add_chunk(large.job_id, 0, 1, b"")[0], "it is stored, and may be sent again"
        with pytest.raises(JobLimitError, match=r"jobs\.max_result_bytes = 40000; try again"):
            store.submit("new", rubric="", priority=0)
        assert store.cancel(large.job_id).state == "CANCELLED" and len(store.events(large.job_id, 0, 1)[1]) == 1
        assert store.submit("new", rubric="", priority=0).state == "OPEN", "now that it has ended, it gives way"
        assert store.events(large.job_id, 0, 0)[0].state == "EXPIRED"


def test_a_job_does_not_give_up_its_own_results(redis_url: str) -> None:
    with closing(new_store(redis_url, max_result_bytes=40_000)) as store:
        alone = finished(store, "alone", 50_000)
        assert alone.state == "DONE" and len(store.events(alone.job_id, 0, 1)[1]) == 1
        finished(store, "next", 300)
        assert store.events(alone.job_id, 0, 0)[0].state == "EXPIRED"


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
        for number in range(400):
            job = store.submit(f"{number:0200}", rubric="r" * 100, priority=0, name="n" * 200, digest="d" * 64)
            for index in range(1 + number % 3):
                store.add_chunk(job.job_id, index, 1, b"x" * 40)
                store.complete(claim(store), ChunkResult(b"r" * 40, 1, 1.0, {}))
            store.seal(job.job_id, 1 + number % 3)
        assert_counted()
        before, counted = used(), kept(store)
        job = store.submit("many", rubric="", priority=0)  # its record pays for nothing else
        for index in range(400):
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
        assert keys_of(store) <= {"meta", "by_key"}
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
