"""A Redis that is away for a while: every kind of refusal is waited out. Leases that end with their holders."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
import redis
from redis._parsers.base import BaseParser

from tandem.protos.errors import EnvironmentLackError, UnavailableError
from tandem.services.buffer import connection
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.redis_server import EmbeddedRedis, start_redis
from tandem.services.process import in_thread
from tests.support import redis_ring as ring
from tests.support.waiting import CountingLock, eventually

PATIENCE_SECONDS = 600.0
"""Longer than a test may take: a call that does not end with the outage fails the test."""


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(connection, "_TOLD_AFTER_SECONDS", 0.1)
    caplog.set_level("INFO")


@pytest.fixture
def server(memory_folder: Path) -> Iterator[EmbeddedRedis]:
    started = start_redis(memory_folder)
    yield started
    with suppress(ProcessLookupError):
        os.kill(started.pid, signal.SIGCONT)
    started.stop()


def patient(buffer: Buffer, url: str, stop: threading.Event | None = None) -> Buffer:
    """A buffer of the same run that waits as a service does."""
    return Buffer(url, buffer.run_id, outage_seconds=PATIENCE_SECONDS, stop=stop)


@pytest.mark.parametrize(
    "reply",
    [
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "READONLY You can't write against a read only replica.",
        "READONLY You can't write against a read only replica. script: 5d3, on @user_script:12.",
        "ERR Error running script (call to f_5d3): @user_script:12: @user_script: 12: -READONLY You can't write.",
        "NOREPLICAS Not enough good replicas to write.",
        "ERR Error running script (call to f_5d3): @user_script:12: @user_script: 12: -NOREPLICAS Not enough replicas.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "CLUSTERDOWN The cluster is down",
        "LOADING Redis is loading the dataset in memory",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    ],
)
def test_a_passing_refusal_is_repeated_and_one_that_stays_is_an_outage(redis_url: str, reply: str) -> None:
    with closing(Buffer(redis_url, "refused")) as buffer:
        replies = iter([reply, reply])

        def call() -> str:
            for refusal in replies:
                raise BaseParser.parse_error(refusal)
            return "answer"

        assert buffer.connection.retried(call) == "answer"

        def refuses() -> None:
            raise BaseParser.parse_error(reply)

        with pytest.raises(UnavailableError, match=r"refuses for now: |cannot be reached: ") as caught:
            buffer.connection.retried(refuses, 0.0)
        assert "\n" not in str(caught.value)


def test_other_refusals_are_no_outage(redis_url: str) -> None:
    with closing(Buffer(redis_url, "refused", outage_seconds=PATIENCE_SECONDS)) as buffer:
        for reply, error in {
            "MISCONF Errors writing to the AOF file: No space left on device": EnvironmentLackError,
            "ERR user_script:3: attempt to index nil: BUSY": redis.ResponseError,
            "BUSYKEY Target key name already exists.": redis.ResponseError,
        }.items():

            def refuses(reply: str = reply) -> None:
                raise BaseParser.parse_error(reply)

            with pytest.raises(error):
                buffer.connection.retried(refuses)


def _read_only(client: redis.Redis) -> Callable[[], object]:
    client.replicaof("127.0.0.1", 1)
    return lambda: client.replicaof("NO", "ONE")  # type: ignore[arg-type]


def _without_replicas(client: redis.Redis) -> Callable[[], object]:
    client.config_set("min-replicas-to-write", 1)
    return lambda: client.config_set("min-replicas-to-write", 0)


def _without_master(client: redis.Redis) -> Callable[[], object]:
    client.config_set("replica-serve-stale-data", "no")
    return _read_only(client)


def _busy(client: redis.Redis) -> Callable[[], object]:
    client.config_set("lua-time-limit", 1)
    running = in_thread("endless script", client.eval, "while true do end", 0)

    def end() -> None:
        eventually(lambda: _killed(client))
        assert isinstance(running.exception(20), redis.ResponseError)

    return end


def _killed(client: redis.Redis) -> bool:
    with suppress(redis.ResponseError):  # it is not known as slow yet
        client.script_kill()
        return True
    return False


@pytest.mark.parametrize("refuse", [_read_only, _without_replicas, _without_master, _busy])
def test_a_call_waits_until_a_real_redis_takes_writes_again(
    server: EmbeddedRedis, refuse: Callable[[redis.Redis], Callable[[], object]], caplog: pytest.LogCaptureFixture
) -> None:
    buffer = ring.new_run(server.url)
    refused = patient(buffer, server.url)
    ring.offer(refused, 1)
    client = redis.Redis.from_url(server.url, protocol=2, socket_timeout=20.0)
    accept = refuse(client)
    claiming = in_thread("claim", ring.claim, refused, "prompts")
    eventually(lambda: "refuses for now" in caplog.text)
    assert not claiming.done()
    accept()
    [claimed] = claiming.result(20)
    assert ring.finish(refused, claimed) and refused.verify() == []
    assert "answers again" in caplog.text
    client.close()


def test_after_a_failover_a_service_goes_on_at_the_server_that_has_the_address_now(
    server: EmbeddedRedis, memory_folder: Path
) -> None:
    """The earlier master lives, as a replica, and keeps its connections."""
    address = memory_folder / "address"

    def name(named: EmbeddedRedis) -> None:
        address.unlink(missing_ok=True)
        address.symlink_to(unquote(urlsplit(named.url).path))

    name(server)
    run = ring.new_run(server.url)
    buffer = patient(run, f"unix://{quote(str(address))}")
    ring.offer(buffer, 1)
    successor = start_redis(memory_folder / "successor")
    try:
        with closing(Buffer(successor.url, run.run_id)) as copy:
            ring.restore_keys(copy, ring.saved_keys(run))
            _read_only(run.connection.redis)
            name(successor)
            [claimed] = in_thread("claim", ring.claim, buffer, "prompts").result(20)
            assert ring.finish(buffer, claimed)
            assert copy.counts()["generated_waiting"] == 1 and copy.verify() == []
    finally:
        successor.stop()


def test_a_redis_that_hangs_is_asked_again_and_each_call_takes_effect_once(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_SOCKET_SECONDS", 0.25)
    run = ring.new_run(server.url)
    buffer = patient(run, server.url)
    ring.offer(buffer, 2)
    [held] = ring.claim(buffer, "prompts")
    calls: list[Future[object]]
    os.kill(server.pid, signal.SIGSTOP)
    calls = [
        in_thread("claim", ring.claim, buffer, "prompts"),
        in_thread("complete", ring.finish, buffer, held),
        in_thread("heartbeat", buffer.heartbeat, ring.SAMPLER, {}),
    ]
    eventually(lambda: "waits for it up to 600 s" in caplog.text)
    assert not any(call.done() for call in calls), "one time-out of the socket is not the end"
    os.kill(server.pid, signal.SIGCONT)
    claimed, accepted, _ = (call.result(20) for call in calls)
    assert accepted and isinstance(claimed, list) and [one.group_id for one in claimed] == ["0-1"]
    counts = buffer.counts()
    assert (counts["prompts_leased"], counts["generated_waiting"], counts["stale_results_refused"]) == (1, 1, 0)
    assert caplog.text.count("waits for it") == 1, "once in an outage, whoever waits"


def test_a_service_starts_in_an_outage_and_a_stop_ends_its_wait(
    server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    run = ring.new_run(server.url)
    stop = threading.Event()
    server.stop()
    starting = in_thread("start", patient, run, server.url, stop)
    eventually(lambda: "waits for it up to" in caplog.text)
    assert not starting.done()
    stop.set()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        starting.result(20)


def test_a_service_that_stops_in_an_outage_waits_once_for_all_its_calls(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    buffer = patient(ring.new_run(server.url), server.url, stop)
    server.stop()
    stop.set()
    with pytest.raises(UnavailableError, match="cannot be reached") as first:
        buffer.counts()
    attempts: list[None] = []
    with pytest.raises(UnavailableError, match="cannot be reached") as second:
        buffer.connection.retried(lambda: attempts.append(None))
    assert attempts == [] and str(second.value) == str(first.value)
    monkeypatch.setattr(connection, "_STOPPING_SECONDS", 0.0)
    assert buffer.connection.retried(lambda: "an answer") == "an answer", "some time later it asks again"


def test_the_calls_of_a_trainer_wait_once_for_an_outage(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, lock, begun = ring.new_run(redis_url), CountingLock(), []
    original, is_over = connection.Connection.run, threading.Event()

    def run(self: connection.Connection, verb: str, *arguments: bytes | str | int) -> object:
        begun.append(verb)
        if len(begun) > 1:
            return original(self, verb, *arguments)
        assert is_over.wait(20)
        raise UnavailableError("Redis cannot be reached")

    monkeypatch.setattr(connection.Connection, "run", run)
    monkeypatch.setattr(buffer._trainer, "_lock", lock)
    calls = [in_thread("call", buffer.check_incarnation, 1) for _ in range(3)]
    eventually(lambda: lock.num_asked == 3)
    is_over.set()
    assert [str(call.exception(20)) for call in calls] == 3 * ["Redis cannot be reached"]
    assert begun == ["check_incarnation"]
    buffer.check_incarnation(1)
    assert len(begun) == 2, "a later call asks Redis again"


def _age_heartbeat(buffer: Buffer, seconds: float) -> None:
    """Moves the sampler's last heartbeat into the past."""
    buffer.connection.redis.hincrby(buffer.connection.key("beats"), ring.SAMPLER, int(-1000 * seconds))


def _lose_lease(buffer: Buffer, silence: float) -> str:
    """Lets the lease of the next group expire while its holder is silent; returns the group's id."""
    [claim] = ring.claim(buffer, "prompts", lease_seconds=0.005)
    _age_heartbeat(buffer, silence)
    time.sleep(0.01)
    buffer.counts()
    _age_heartbeat(buffer, -silence)
    return claim.group_id


def test_a_lease_that_expires_with_a_silent_holder_costs_no_budget(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, infrastructure=0)
    ring.offer(buffer, 1)
    for silence in (60.0, 11.0, 4.0):  # a short lease ends soon after its holder
        _lose_lease(buffer, silence)
    assert buffer.counts()["prompts_waiting"] == 1
    _lose_lease(buffer, 0.0)
    assert buffer.counts()["dropped:lease_expired"] == 1, "its holder is alive"
    assert buffer.verify() == []


def test_a_group_that_ends_every_holder_lets_others_pass_and_is_dropped_in_the_end(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, infrastructure=0)
    [deadly, *_] = ring.offer(buffer, 3)
    held = [_lose_lease(buffer, 11.0) for _ in range(4)]
    assert held == [deadly, deadly, deadly, "0-1"], "after three holders it waits behind the others"
    for died in range(3, 17):
        assert buffer.counts()["dropped"] == 0, died
        assert deadly in [one.group_id for one in ring.claim(buffer, "prompts", 3)]
        buffer.connection.redis.zadd(buffer.connection.key("prompts_leased"), {deadly: 1})  # expired
        _age_heartbeat(buffer, 11.0)
        buffer.counts()
        buffer.register_sampler(ring.SAMPLER, "127.0.0.1:1", 1)
        buffer.publish(1, 0, [ring.SAMPLER])
    assert buffer.counts()["dropped:holders_lost"] == 1
    assert "services ended while they held the group" in buffer.drop_errors()["holders_lost"]
    assert buffer.verify() == []
