"""Jobs of the reward clients: keys, resumed submissions and watches, kill -9 of the service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.protos.contracts import Scored, ScoreItem, Unscored
from tandem.protos.errors import DataError, DeadlineError, UnavailableError
from tandem.services.clients import RewardClient, job_key
from tests.support.reward_process import RewardProcess
from tests.support.scripted_reward import ScriptedReward, items_of


def test_a_submitted_job_returns_its_results(service: ScriptedReward, client: RewardClient) -> None:
    progress: list[int] = []
    job = client.submit(
        iter(items_of(*range(1000))),
        "r",
        key="mine",
        name="nightly",
        priority=3,
        on_progress=lambda j: progress.append(j.num_items),
    )
    assert (job.state, job.num_items, job.num_scored, job.name, job.priority) == ("done", 1000, 1000, "nightly", 3)
    assert progress == sorted(progress) and progress[-1] == 1000
    stored = service.jobs["mine"]
    assert list(map(len, stored.chunks)) == [256, 256, 256, 232]
    assert dict(client.results(job.job_id)) == {
        n: Scored(float(n), {"group": 256.0 if n < 768 else 232.0}) for n in range(1000)
    }
    assert client.get(job.job_id) == job == client.wait(job.job_id)
    assert [one.job_id for one in client.jobs()] == [job.job_id]
    assert client.cancel(job.job_id).state == "cancelled"


def test_the_default_key_is_a_digest_of_the_content(service: ScriptedReward, client: RewardClient) -> None:
    first = client.submit(items_of(1, 2), "r")
    assert client.submit(items_of(1, 2), "r").job_id == first.job_id
    others = [
        client.submit(items_of(1, 3), "r"),
        client.submit(items_of(1, 2), "s"),
        client.submit(iter(items_of(1, 2)), "r"),
        client.submit(items_of(1, 2), "r", priority=1),
    ]
    assert len({first.job_id, *(job.job_id for job in others)}) == 5 == len(service.jobs)
    assert job_key(items_of(1), "a") != job_key(items_of(1, 1), "a") != job_key([Unscored("limit")], "a")


@pytest.mark.parametrize("breaks", [[0], [-1], [1, -1], [2, 0, 0, -1, 5], [0] * 12, [7, 3, 3]])
def test_a_broken_submission_is_resumed(service: ScriptedReward, client: RewardClient, breaks: list[int]) -> None:
    service.breaks = list(breaks)
    job = client.submit(iter(items_of(*range(5000))), key="k")
    assert service.breaks == [] and service.num_streams == len(breaks) + 1
    assert [item.solution for item in service.jobs["k"].items] == [str(number) for number in range(5000)]
    assert job.num_items == 5000


@pytest.mark.usefixtures("no_retries")
def test_another_client_resumes_a_submission_with_the_same_items(service: ScriptedReward) -> None:
    service.breaks = [6] + [-1] * 500
    everything = items_of(*range(5000))
    with RewardClient(retry_seconds=0.05) as client, pytest.raises(UnavailableError):
        client.submit(iter(everything), key="k")
    stored = len(service.jobs["k"].chunks)
    assert 6 <= stored < 20
    service.breaks, service.num_chunks_received = [], 0
    with RewardClient() as client:
        assert client.submit(iter(everything), key="k").num_items == 5000
    assert service.num_chunks_received == 20 - stored
    assert [item.solution for item in service.jobs["k"].items] == [str(number) for number in range(5000)]


@pytest.mark.usefixtures("no_retries")
def test_a_key_whose_job_holds_other_items_is_refused(service: ScriptedReward) -> None:
    for other in (
        items_of(*range(100)),
        [*items_of(*range(100)), *items_of(*range(300), group="g"), *items_of(*range(500))],
    ):
        service.jobs.clear()
        service.breaks = [2] + [-1] * 500
        with RewardClient(retry_seconds=0.02) as client, pytest.raises(UnavailableError):
            client.submit(iter(items_of(*range(1000))), key="k")
        service.breaks = []
        with RewardClient() as client, pytest.raises(DataError, match="already holds 768 items in 3 chunks"):
            client.submit(iter(other), key="k")


def test_a_broken_watch_resumes_after_the_last_event(service: ScriptedReward, client: RewardClient) -> None:
    job = client.submit(iter(items_of(*range(2000))))
    service.breaks = [3, 0, -1, 2]
    seen = [number for number, _ in client.results(job.job_id)]
    assert sorted(seen) == list(range(2000)) and len(seen) == 2000
    cursor = next(event.cursor for event in client.watch(job.job_id, with_results=True) if event.cursor == 4)
    rest = [event for event in client.watch(job.job_id, with_results=True, after_cursor=cursor) if event.results]
    assert len(rest) == 4


@pytest.mark.usefixtures("no_retries")
def test_a_watch_of_a_job_that_does_not_end_has_a_deadline(service: ScriptedReward, client: RewardClient) -> None:
    service.breaks = [1] + [-1] * 500
    with RewardClient(client.addresses, retry_seconds=0.01) as hasty, pytest.raises(UnavailableError):
        hasty.submit(iter(items_of(*range(1000))), key="k")
    service.breaks = []
    with pytest.raises(DeadlineError, match="it goes on"):
        list(client.watch("job-0", timeout_seconds=0.3))


# --- the real service ------------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.timeout(240)
def test_a_submission_and_a_watch_survive_kill_9_of_the_service(tmp_path: Path) -> None:
    """Every item is scored once, though the service is killed during the submission and again during the watch."""
    far_enough = threading.Event()

    def numbers() -> Iterator[ScoreItem]:
        for number in range(20_000):
            if number == 5_000:
                far_enough.set()
                dead.wait(60.0)
            yield ScoreItem("test", str(number % 3), str(number % 2))

    dead = threading.Event()
    service = RewardProcess(tmp_path)
    with RewardClient(service.address) as client, ThreadPoolExecutor(1) as thread:
        try:
            submitting = thread.submit(client.submit, numbers(), '[[components]]\nscorer = "exact"', key="k")
            assert far_enough.wait(60.0)
            service.kill()
            dead.set()
            service = RewardProcess(tmp_path, port=service.port)
            job = submitting.result(timeout=100.0)
            seen = []
            for number, score in client.results(job.job_id):
                if not seen:
                    service.kill()
                    service = RewardProcess(tmp_path, port=service.port)
                seen.append(number)
                assert isinstance(score, Scored) and score.value == float(number % 3 == number % 2)
            assert sorted(seen) == list(range(20_000))
            assert client.submit([], '[[components]]\nscorer = "exact"', key="k").job_id == job.job_id
        finally:
            service.kill()
