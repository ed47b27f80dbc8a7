"""The embedded Redis is restarted as long as the run advances between its deaths; a long outage ends the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import redis

from tandem.protos.errors import EnvironmentLackError, UnavailableError
from tandem.services.buffer.redis_server import EmbeddedRedis
from tandem.services.launchers.process_group import ProcessGroup
from tandem.services.launchers.supervisor import OutageReport
from tandem.services.run import redis_child
from tandem.services.run.redis_child import RedisChild
from tests.support.run_inputs import recipe_of, small_values
from tests.support.waiting import eventually


class Server:
    """A restarted Redis, and what is said about it."""

    def __init__(self, folder: Path) -> None:
        self.batches = 0
        self.silence = 0.0
        self.said: list[str] = []
        self.child = RedisChild(
            folder, report=self.said.append, progress=lambda: self.batches, silence=lambda: self.silence
        )

    def kill(self) -> None:
        os.kill(self.child._server.pid, signal.SIGKILL)
        eventually(lambda: not self.child._server.alive)

    def restarted(self) -> bool:
        self.child.restart_if_dead()
        return self.child._server.alive


@pytest.fixture
def server(memory_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(redis_child, "FIRST_DELAY_SECONDS", 0.01)
    made = Server(memory_folder)
    with made.child:
        yield made


def test_redis_may_die_as_often_as_it_likes_while_the_run_advances(server: Server) -> None:
    for _ in range(redis_child.MOST_DEATHS + 1):
        server.kill()
        eventually(server.restarted)
        server.batches += 1
    assert len(server.said) == redis_child.MOST_DEATHS + 1


def test_the_fifth_death_without_progress_ends_it(server: Server) -> None:
    for _ in range(redis_child.MOST_DEATHS - 1):
        server.kill()
        eventually(server.restarted)
    server.kill()
    with pytest.raises(UnavailableError, match=r"Redis died 5 times in a row without progress; see .*redis\.log"):
        server.restarted()


def test_a_restart_waits_for_its_delay(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_child, "FIRST_DELAY_SECONDS", 600.0)
    monkeypatch.setattr(redis_child, "LONGEST_DELAY_SECONDS", 600.0)
    server.kill()
    assert not any(server.restarted() for _ in range(3))
    assert server.said == ["Redis died; restarting it from its append-only file in 600 s"], "said once"


def test_a_redis_that_hangs_is_killed_and_restarted_with_its_data(server: Server) -> None:
    client = redis.Redis.from_url(server.child.url)
    client.set("kept", 1)
    hung, url = server.child._server.pid, server.child.url
    server.child._started_at -= 1000.0
    os.kill(hung, signal.SIGSTOP)
    server.silence = redis_child.SILENT_SECONDS - 1.0
    assert server.restarted() and server.child._server.pid == hung, "it may still answer"
    server.silence = redis_child.SILENT_SECONDS + 1.0
    eventually(lambda: server.restarted() and server.child._server.pid != hung)
    assert server.said == [
        "Redis has not answered for 60 s; it is killed",
        "Redis died; restarting it from its append-only file in 0.01 s",
    ]
    assert server.child.url == url and client.get("kept") == b"1"
    for _ in range(3):  # its users have not asked it yet
        server.restarted()
    assert len(server.said) == 2


def test_a_redis_that_answers_is_not_killed_for_the_silence_of_who_asks_it(server: Server) -> None:
    first = server.child._server.pid
    server.silence = 1000.0  # the supervisor itself was stopped
    server.child._started_at -= 1000.0
    assert server.restarted() and server.child._server.pid == first and server.said == []


def test_a_redis_that_ends_as_it_starts_is_started_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    start = iter([EnvironmentLackError("redis-server ended as it started: killed"), redis_child.start_redis])

    def started(folder: Path) -> EmbeddedRedis:
        outcome = next(start)
        if isinstance(outcome, EnvironmentLackError):
            raise outcome
        return outcome(folder)

    monkeypatch.setattr(redis_child, "start_redis", started)
    server.kill()
    eventually(server.restarted)
    died = "Redis died; restarting it from its append-only file in"
    assert server.said == [f"{died} 0.01 s", "redis-server ended as it started: killed", f"{died} 0.02 s"]


def test_a_redis_that_cannot_start_any_more_is_given_up_with_the_cause(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.child._started_at -= 1000.0  # it worked for a long time
    monkeypatch.setattr(redis_child, "start_redis", Mock(side_effect=EnvironmentLackError("its file is damaged")))
    server.kill()
    with pytest.raises(UnavailableError, match=r"died 5 times in a row without progress \(its file is damaged\); see"):
        eventually(server.restarted)
    assert server.said.count("its file is damaged") == redis_child.MOST_DEATHS - 1


@pytest.fixture
def outage(tmp_path: Path) -> tuple[OutageReport, list[str], Callable[[float], None]]:
    """The report of a run, what it says, and a function that sets how long Redis has been silent."""
    said: list[str] = []
    processes = ProcessGroup(report=said.append)
    recipe = recipe_of(small_values(tmp_path), run={"redis_outage_seconds": 60.0})

    def silent_for(seconds: float) -> None:
        processes.redis_silence = lambda: seconds

    return OutageReport(recipe, "unix://redis.sock", processes), said, silent_for


def test_an_outage_is_said_once_and_its_end_too(
    outage: tuple[OutageReport, list[str], Callable[[float], None]],
) -> None:
    report, said, silent_for = outage
    for seconds in (0.5, 2.0, 6.0, 7.0, 64.0, 0.2, 1.0, 6.0):
        silent_for(seconds)
        report.check()
    away = "Redis at unix://redis.sock does not answer; the services wait for it up to 60 s (run.redis_outage_seconds)"
    assert said == [away, "Redis at unix://redis.sock answers again", away]


def test_an_outage_that_the_services_no_longer_wait_for_ends_the_run(
    outage: tuple[OutageReport, list[str], Callable[[float], None]],
) -> None:
    report, _, silent_for = outage
    silent_for(66.0)
    with pytest.raises(UnavailableError, match="has not answered for 66 s; once it answers, go on with: tandem run"):
        report.check()
