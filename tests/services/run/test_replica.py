"""Replicas that are started without a number take the smallest free one, and keep it from others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path

import pytest

from tandem.services.buffer import connection
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.redis_server import start_redis
from tandem.services.run import replica
from tandem.services.run.replica import free_replica_number, given_replica_number, replica_name
from tandem.services.trainer.evaluation import reward_addresses
from tests.support.paths import ROOT
from tests.support.redis_ring import new_run
from tests.support.waiting import eventually

Free = Callable[[str], AbstractContextManager[int]]

HOLD = """
import sys, time
from tandem.services.run.replica import free_replica_number
with free_replica_number(sys.argv[1], sys.argv[2], "rollout") as number:
    print(number, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def buffer(redis_url: str) -> Iterator[Buffer]:
    with closing(new_run(redis_url)) as buffer:
        yield buffer


@pytest.fixture
def free(redis_url: str, buffer: Buffer) -> Free:
    return partial(free_replica_number, redis_url, buffer.run_id)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every process asks from a host of its own, as containers do."""
    names = iter(f"container-{n}" for n in range(100))
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    yield "container"


def test_each_takes_the_smallest_number_that_is_free(free: Free, hosts: str) -> None:
    with free("rollout") as first:
        with free("rollout") as second, free("reward") as scorer:
            assert (first, second, scorer) == (0, 1, 0)
        with free("rollout") as again:
            assert again == 1, "it was given back"
    assert [replica_name("reward", n) for n in (0, 1)] == ["reward", "reward-1"]
    assert replica_name("rollout", 0) == "rollout-0"


def test_a_process_that_fails_gives_its_number_back(buffer: Buffer, free: Free, hosts: str) -> None:
    with pytest.raises(RuntimeError, match="no model"), free("rollout") as number:
        raise RuntimeError("no model")
    assert number == 0 and buffer.connection.redis.get(buffer.connection.key("number:rollout-0")) is None


def test_a_number_is_held_for_longer_than_its_lease(
    buffer: Buffer, free: Free, hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_RENEWAL_SECONDS", 0.05)
    with free("rollout"):
        key = buffer.connection.key("number:rollout-0")
        for _ in range(2):
            assert buffer.connection.redis.expire(key, 5)
            eventually(lambda: buffer.connection.redis.ttl(key) > 5)


def test_a_process_that_was_killed_gets_its_number_back(redis_url: str, buffer: Buffer) -> None:
    command = [sys.executable, "-c", HOLD, redis_url, buffer.run_id]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start() as killed:
        assert killed.stdout is not None and killed.stdout.readline() == "0\n"
        killed.send_signal(signal.SIGKILL)
    with start() as again:
        assert again.communicate(timeout=60)[0] == "0\n"


def test_a_process_whose_number_was_taken_ends(redis_url: str, buffer: Buffer) -> None:
    command = [sys.executable, "-c", HOLD, redis_url, buffer.run_id]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        buffer.connection.redis.set(buffer.connection.key("number:rollout-0"), '{"host": "another"}')
        assert process.wait(30) == 1


def test_a_number_that_a_launcher_gave_is_held_at_once_and_kept_from_others(
    redis_url: str, buffer: Buffer, free: Free, hosts: str
) -> None:
    buffer.connection.redis.set(buffer.connection.key("number:environments-1"), '{"host": "of one that was killed"}')
    service = "environments"
    with given_replica_number(redis_url, buffer.run_id, service, 1), free(service) as first, free(service) as third:
        assert (first, third) == (0, 2)
    with free(service), free(service) as again:
        assert again == 1, "it was given back"


def test_a_process_that_ends_does_not_wait_for_a_redis_that_is_away(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "OUTAGE_SECONDS", 600.0)  # a wait for it fails the test
    server = start_redis(memory_folder)
    with closing(new_run(server.url)) as buffer, free_replica_number(server.url, buffer.run_id, "rollout"):
        server.stop()


def test_evaluation_asks_every_reward_service_that_is_alive(buffer: Buffer) -> None:
    buffer.register_service("reward", "127.0.0.1:1")
    buffer.register_service("reward-1", "127.0.0.1:2")
    assert reward_addresses(buffer) == ["127.0.0.1:1", "127.0.0.1:2"]
    buffer.connection.redis.hset(buffer.connection.key("beats"), "reward", 0)
    assert reward_addresses(buffer) == ["127.0.0.1:2"], "the first one has been silent"
    buffer.connection.redis.hset(buffer.connection.key("beats"), "reward-1", 0)
    assert reward_addresses(buffer) == ["127.0.0.1:1", "127.0.0.1:2"], "they may be restarting"
