"""Jobs survive kills: every item has one result, and the same key is the same job."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tandem.protos import reward_pb2
from tandem.protos.errors import UnavailableError
from tandem.reward.scoring import CompiledRubric
from tandem.services.buffer.redis_server import start_redis
from tandem.services.config.jobs import JobsConfig
from tandem.services.rpc.client import connect
from tests.support.reward_process import RewardProcess
from tests.support.reward_server import (
    Item,
    Request,
    ScriptedCore,
    Stub,
    answers,
    serving,
    submission,
    summary,
)
from tests.support.waiting import eventually

NUM_CHUNKS = 60
CHUNK_ITEMS = 5

SLOW = """
import pathlib, time

GO_ON = pathlib.Path(__file__).with_name("go on")

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.002)
    while int(solution_str) >= 100 and not GO_ON.exists():
        time.sleep(0.01)
    return float(solution_str) / 1000.0
"""


@pytest.fixture()
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the machine has one: a killed process loses nothing there either, and slow disks do not
    slow the test.
    """
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=where, prefix="tandem-") as made:
        (Path(made) / "slow.py").write_text(SLOW)
        yield Path(made)


def replica(folder: Path, *, redis_url: str = "", name: str = "one", lease_seconds: float = 600.0) -> RewardProcess:
    scorer = f"reward.scorer={folder / 'slow.py'}:compute_score"
    limits = (f"reward.lease_seconds={lease_seconds}", "reward.timeout_seconds=100")
    return RewardProcess(folder, scorer, *limits, redis_url=redis_url, name=name)


def chunks() -> list[list[Item]]:
    """Item n of the job is worth n / 1000."""
    numbers = [str(number) for number in range(NUM_CHUNKS * CHUNK_ITEMS)]
    return [answers(*numbers[first : first + CHUNK_ITEMS]) for first in range(0, len(numbers), CHUNK_ITEMS)]


def submit(address: str, key: str) -> reward_pb2.Job:
    """Submits the chunks that the service does not have yet."""
    with connect(address) as channel:
        stub = Stub(channel)
        (reply,) = stub.SubmitJob(iter([Request(header=Request.Header(idempotency_key=key))]), timeout=60)
        if reply.job.state != reward_pb2.Job.OPEN:
            return reply.job
        rest = submission(*chunks()[reply.next_chunk :], key=key, first=reply.next_chunk)
        return list(stub.SubmitJob(rest, timeout=60))[-1].job


def job_at(address: str, job_id: str) -> reward_pb2.Job:
    with connect(address) as channel:
        return Stub(channel).GetJob(reward_pb2.GetJobRequest(job_id=job_id), timeout=60)


def assert_all_scored_once(address: str, job_id: str) -> None:
    found: dict[int, float] = {}
    with connect(address) as channel:
        request = reward_pb2.WatchJobRequest(job_id=job_id, with_results=True)
        events = list(Stub(channel).WatchJob(request, timeout=60))
    for event in events:
        for number, item in enumerate(event.results.items, event.results.first_item):
            assert number not in found, f"item {number} has two results"
            assert item.WhichOneof("result") == "scored", item
            found[number] = item.scored.value
    assert found == {number: number / 1000 for number in range(NUM_CHUNKS * CHUNK_ITEMS)}
    job = events[-1].job
    assert (job.state, job.num_scored, job.num_waiting) == (reward_pb2.Job.DONE, NUM_CHUNKS * CHUNK_ITEMS, 0)
    assert [event.cursor for event in events[:-1]] == list(range(1, NUM_CHUNKS + 1))


def go_on(folder: Path) -> None:
    """Lets the second part of a job be scored; until then its items hang."""
    (folder / "go on").touch()


def test_a_killed_replica_resumes_its_chunks(folder: Path) -> None:
    """It restarts under the same name and resumes at once, long before its leases expire."""
    redis = start_redis(folder)
    first = replica(folder, redis_url=redis.url)
    try:
        job = submit(first.address, "killed")
        eventually(lambda: job_at(first.address, job.job_id).num_scored > 0)
        first.kill()
        go_on(folder)
        second = replica(folder, redis_url=redis.url)
        try:
            assert submit(second.address, "killed").job_id == job.job_id, "the same key is the same job"
            assert_all_scored_once(second.address, job.job_id)
            assert submit(second.address, "killed").state == reward_pb2.Job.DONE
        finally:
            assert second.terminate() == 0
    finally:
        first.kill()
        redis.stop()


def test_another_replica_takes_over_the_chunks_of_a_dead_one(folder: Path) -> None:
    redis = start_redis(folder)
    pair = [replica(folder, redis_url=redis.url, name=name, lease_seconds=2.0) for name in ("one", "two")]
    try:
        job = submit(pair[0].address, "two")
        eventually(lambda: job_at(pair[1].address, job.job_id).num_scored > 0)
        pair[0].kill()
        go_on(folder)
        assert_all_scored_once(pair[1].address, job.job_id)
    finally:
        for one in pair:
            one.kill()
        redis.stop()


def test_a_job_survives_repeated_kills_of_redis(folder: Path) -> None:
    """Redis is restarted each time, and callers only wait longer."""
    go_on(folder)
    service = replica(folder)
    try:
        job = submit(service.address, "redis")
        for _ in range(3):
            [child] = [one for one in psutil.Process(service.process.pid).children() if "redis" in one.name()]
            before = job_at(service.address, job.job_id)
            child.send_signal(signal.SIGKILL)
            child.wait(timeout=20)
            after = job_at(service.address, job.job_id)
            assert after.num_scored >= before.num_scored and after.num_items == before.num_items
        assert submit(service.address, "redis").job_id == job.job_id
        assert_all_scored_once(service.address, job.job_id)
    finally:
        assert service.terminate() == 0


def test_a_submission_resumes_after_every_process_was_killed(folder: Path) -> None:
    """Acknowledged chunks are there after the restart, and the submission resumes after them."""
    go_on(folder)
    service = replica(folder)
    stored, key = 0, "everything"

    def requests() -> Iterator[Request]:
        for request in submission(*chunks(), key=key):
            eventually(lambda part=request.chunk: stored >= 20 or part.index <= stored)
            if stored >= 20:
                service.kill()  # and its Redis
            yield request

    with connect(service.address) as channel, pytest.raises(grpc.RpcError):
        for reply in Stub(channel).SubmitJob(requests(), timeout=60):
            stored, job = reply.next_chunk, reply.job
    again = replica(folder)
    try:
        found = job_at(again.address, job.job_id)
        assert found.num_items >= stored * CHUNK_ITEMS and found.num_scored >= job.num_scored
        assert submit(again.address, key).job_id == job.job_id
        assert_all_scored_once(again.address, job.job_id)
    finally:
        service.kill()
        assert again.terminate() == 0


class GroupedCore(ScriptedCore):
    """Its scorer compares the items of a group."""

    def compile(self, text: str) -> CompiledRubric:
        return replace(super().compile(text), grouped=True)


@pytest.mark.parametrize(("core_of", "blamed"), [(ScriptedCore, [137]), (GroupedCore, [136, 137])])
def test_only_the_item_that_kills_services_has_no_score(
    folder: Path, core_of: type[ScriptedCore], blamed: list[int]
) -> None:
    """Every process that scores the item `bug` dies with its leases; the results it saved before are kept."""
    redis, jobs = start_redis(folder), JobsConfig(namespace="deaths")
    texts = ["bug" if number == 137 else "1" for number in range(300)]
    items = [item for number, text in enumerate(texts) for item in answers(text, group=f"g{number // 2}")]
    asked = 0
    try:
        with serving(redis.url, jobs=jobs, with_jobs=False) as one:
            job_id = one.submit(items, answers("2")).job.job_id
        for _ in range(5):
            core = core_of()
            with pytest.raises(ZeroDivisionError), serving(redis.url, core, jobs=jobs) as one:
                assert one.stop.wait(20)
            asked += len(core.asked)
        with serving(redis.url, core_of(), jobs=jobs) as one:
            found = one.results(job_id)
    finally:
        redis.stop()
    assert summary(found) == ["crashed" if n in blamed else 1.0 for n in range(300)] + [0.0]
    assert found[137].unscored.detail.startswith("5 services in a row ended while they scored it")
    assert asked < 600, "what was scored is scored again once at most, but for the neighbours of the culprit"


def test_a_redis_outage_does_not_count_as_a_death_of_the_holder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.leases.OUTAGE_PAUSE_SECONDS", 0.01)
    redis, core = start_redis(folder), ScriptedCore()
    try:
        with serving(redis.url, core, with_jobs=False) as one:
            complete, claim, losses, failures = one.store.complete, one.store.claim, [], iter(range(7))

            def gone(claimed: Any, *arguments: Any, **more: Any) -> bool:
                if next(failures, None) is None:
                    return complete(claimed, *arguments, **more)
                assert one.store.register("one") == 1, "its lease ran out meanwhile"
                raise UnavailableError("Redis is away")

            def seen(*arguments: Any) -> Any:
                claimed = claim(*arguments)
                losses.extend([claimed.losses] if claimed else [])
                return claimed

            monkeypatch.setattr(one.store, "complete", gone)
            monkeypatch.setattr(one.store, "claim", seen)
            job_id = one.submit(answers("1", "2")).job.job_id
            with one.job_worker:
                assert summary(one.results(job_id)) == [1.0, 0.0]
    finally:
        redis.stop()
    assert len(losses) == 8 and max(losses) <= 1, "counted until the holder speaks again"
