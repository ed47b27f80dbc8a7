"""Jobs survive kills: every item has one result, and the same key is the same job."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.protos import reward_pb2
from tandem.protos.errors import UnavailableError
from tandem.services.config.recipe import JobsConfig
from tests.support.reward_process import RewardProcess
from tests.support.reward_server import Calls, Item, ScriptedCore, answers, serving, submission, summary
from tests.support.waiting import eventually

pytestmark = pytest.mark.system

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


@pytest.fixture
def folder(memory_folder: Path) -> Path:
    (memory_folder / "slow.py").write_text(SLOW)
    return memory_folder


Start = Callable[..., RewardProcess]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a replica; without a URL it starts its own Redis. All are killed after the test."""
    started: list[RewardProcess] = []

    def start(*overrides: str, redis_url: str = "", name: str = "one", lease_seconds: float = 600.0) -> RewardProcess:
        scorer = f"reward.scorer={folder / 'slow.py'}:compute_score"
        limits = (f"reward.lease_seconds={lease_seconds}", "reward.timeout_seconds=100")
        started.append(RewardProcess(folder, scorer, *limits, *overrides, redis_url=redis_url, name=name))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def chunks() -> list[list[Item]]:
    """Item n of the job is worth n / 1000."""
    numbers = [str(number) for number in range(NUM_CHUNKS * CHUNK_ITEMS)]
    return [answers(*numbers[first : first + CHUNK_ITEMS]) for first in range(0, len(numbers), CHUNK_ITEMS)]


def submit(address: str, key: str) -> reward_pb2.Job:
    """Submits the chunks that the service does not have yet."""
    with Calls(address) as one:
        reply = one.open(key)
        if reply.job.state != reward_pb2.Job.OPEN:
            return reply.job
        return one.send(submission(*chunks()[reply.next_chunk :], key=key, first=reply.next_chunk))[-1].job


def job_at(address: str, job_id: str) -> reward_pb2.Job:
    with Calls(address) as one:
        return one.job(job_id)


def assert_all_scored_once(address: str, job_id: str) -> None:
    with Calls(address) as one:
        assert summary(one.results(job_id)) == [number / 1000 for number in range(NUM_CHUNKS * CHUNK_ITEMS)]
        events = one.watch(job_id)
    job = events[-1].job
    assert (job.state, job.num_scored, job.num_waiting) == (reward_pb2.Job.DONE, NUM_CHUNKS * CHUNK_ITEMS, 0)
    assert [event.cursor for event in events[:-1]] == list(range(1, NUM_CHUNKS + 1))


def go_on(folder: Path) -> None:
    """Lets the second part of a job be scored; until then its items hang."""
    (folder / "go on").touch()


def test_a_killed_replica_resumes_its_chunks(folder: Path, start: Start, redis_url: str) -> None:
    """It restarts under the same name and resumes at once, long before its leases expire."""
    first = start("jobs.namespace=killed", redis_url=redis_url)
    job = submit(first.address, "killed")
    eventually(lambda: job_at(first.address, job.job_id).num_scored > 0)
    first.kill()
    go_on(folder)
    second = start("jobs.namespace=killed", redis_url=redis_url)
    assert submit(second.address, "killed").job_id == job.job_id, "the same key is the same job"
    assert_all_scored_once(second.address, job.job_id)
    assert submit(second.address, "killed").state == reward_pb2.Job.DONE
    assert second.terminate() == 0


def test_another_replica_takes_over_the_chunks_of_a_dead_one(folder: Path, start: Start, redis_url: str) -> None:
    options: dict[str, Any] = {"redis_url": redis_url, "lease_seconds": 2.0}
    one, two = [start("jobs.namespace=pair", name=name, **options) for name in ("one", "two")]
    job = submit(one.address, "two")
    eventually(lambda: job_at(two.address, job.job_id).num_scored > 0)
    one.kill()
    go_on(folder)
    assert_all_scored_once(two.address, job.job_id)


def test_a_job_survives_repeated_kills_of_redis(folder: Path, start: Start) -> None:
    """Redis is restarted each time, and callers only wait longer."""
    go_on(folder)
    service = start()
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
    assert service.terminate() == 0


@pytest.mark.parametrize(("grouped", "blamed"), [(False, [137]), (True, [136, 137])])
def test_only_the_item_that_kills_services_has_no_score(redis_url: str, grouped: bool, blamed: list[int]) -> None:
    """Every process that scores the item `bug` dies with its leases; the results it saved before are kept."""
    jobs = JobsConfig(namespace=f"deaths-{grouped}")
    texts = ["bug" if number == 137 else "1" for number in range(300)]
    items = [item for number, text in enumerate(texts) for item in answers(text, group=f"g{number // 2}")]
    asked = 0
    with serving(redis_url, jobs=jobs, with_jobs=False) as one:
        job_id = one.submit(items, answers("2")).job.job_id
    for _ in range(5):
        core = ScriptedCore(grouped=grouped)
        with pytest.raises(ZeroDivisionError), serving(redis_url, core, jobs=jobs) as one:
            assert one.stop.wait(20)
        asked += len(core.asked)
    with serving(redis_url, ScriptedCore(grouped=grouped), jobs=jobs) as one:
        found = one.results(job_id)
    assert summary(found) == ["crashed" if n in blamed else 1.0 for n in range(300)] + [0.0]
    assert found[137].unscored.detail.startswith("5 services in a row ended while they scored it")
    assert asked < 600, "what was scored is scored again once at most, but for the neighbours of the culprit"


def test_a_redis_outage_does_not_count_as_a_death_of_the_holder(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.services.leases.OUTAGE_PAUSE_SECONDS", 0.01)
    with serving(redis_url, ScriptedCore(), with_jobs=False) as one:
        complete, claim, losses, failures = one.store.complete, one.store.claim, [], iter(range(7))

        def gone(*arguments: Any) -> bool:
            if next(failures, None) is None:
                return complete(*arguments)
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
    assert len(losses) == 8 and max(losses) <= 1, "counted until the holder speaks again"
