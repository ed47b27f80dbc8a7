"""What faults are made of: the proxy before Redis, and a Redis that forgets. The disk is in `test_disk.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tandem.protos.errors import EnvironmentLackError
from tandem.services.chaos import redis as chaos_redis
from tandem.services.chaos.processes import service_of
from tandem.services.chaos.proxy import RedisProxy, check_passable
from tandem.services.chaos.redis import OwnRedis
from tandem.services.chaos.schedule import SUPERVISOR
from tandem.services.process import PROCESS_MARK_VARIABLE, in_thread
from tests.support.processes import has_ended, run_python
from tests.support.waiting import eventually

LONG_SECONDS = 60.0


class Proxy:
    """A proxy whose callers count as the service that was named last."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self._caller = ""
        self._clients: dict[str, redis.Redis] = {}
        self.of_pids: list[int] = []
        self.proxy = RedisProxy(folder / "redis.sock", redis_url, self._name_of)

    def client(self, service: str) -> redis.Redis:
        """The service's client, which keeps its connection and makes a new one if that is broken."""
        self._caller = service
        options = {"protocol": 2, "socket_timeout": 0.5, "retry": Retry(NoBackoff(), 0)}
        return self._clients.setdefault(service, redis.Redis.from_url(self.proxy.url, **options))

    def answers(self, service: str) -> bool:
        try:
            return bool(self.client(service).ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def _name_of(self, pid: int) -> str:
        self.of_pids.append(pid)
        return self._caller


@pytest.fixture
def proxied(memory_folder: Path, redis_url: str) -> Iterator[Proxy]:
    made = Proxy(memory_folder, redis_url)
    with made.proxy:
        yield made


def test_bytes_pass_both_ways_and_the_caller_is_known_by_its_process(proxied: Proxy, redis_url: str) -> None:
    large = os.urandom(3 << 20)
    client = proxied.client("feed")
    assert client.set("large", large) and client.get("large") == large
    assert redis.Redis.from_url(redis_url).get("large") == large, "it is the same Redis"
    assert proxied.of_pids == [os.getpid()]


def test_a_cut_ends_the_connections_of_one_service_until_it_is_restored(proxied: Proxy) -> None:
    assert proxied.answers("feed") and proxied.answers("reward")
    proxied.proxy.cut("feed")
    assert not proxied.answers("feed") and not proxied.answers("feed") and proxied.answers("reward")
    proxied.proxy.restore("feed")
    assert proxied.answers("feed")


def test_a_client_learns_at_once_that_redis_has_died(memory_folder: Path) -> None:
    with OwnRedis(memory_folder) as server, RedisProxy(memory_folder / "proxy.sock", server.url, service_of) as proxy:
        client = redis.Redis.from_url(proxy.url, protocol=2, socket_timeout=LONG_SECONDS, retry=Retry(NoBackoff(), 0))
        client.ping()
        waits = in_thread("waits", client.blpop, ["nothing"], 0)
        eventually(lambda: redis.Redis.from_url(server.url).info("clients")["blocked_clients"] == 1)
        server.kill()
        with pytest.raises(redis.ConnectionError):
            waits.result(LONG_SECONDS / 2)


def test_a_slow_service_waits_and_the_others_do_not(proxied: Proxy) -> None:
    assert proxied.answers("feed") and proxied.answers("reward")
    proxied.proxy.slow("feed", LONG_SECONDS)
    assert not proxied.answers("feed") and proxied.answers("reward")
    proxied.proxy.restore("feed")
    assert proxied.answers("feed")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://me:p%40ss@host:6380/3", "unix://me:p%40ss@{file}?db=3"),
        ("redis://host", "unix://{file}"),
        ("unix:///run/redis.sock?db=2", "unix://{file}?db=2"),
    ],
)
def test_the_url_of_the_proxy_names_the_same_user_and_database(memory_folder: Path, url: str, expected: str) -> None:
    file = memory_folder / "redis.sock"
    with RedisProxy(file, url, service_of) as proxy:
        assert proxy.url == expected.format(file=file)


def test_a_redis_behind_tls_is_refused() -> None:
    with pytest.raises(EnvironmentLackError, match="leave out cut and slow"):
        check_passable("rediss://host:6379/0")


def test_a_process_belongs_to_the_service_in_its_environment() -> None:
    script = "import os; from tandem.services.chaos.processes import service_of; print(service_of(os.getpid()))"
    done = run_python("-c", script, **{PROCESS_MARK_VARIABLE: "0123:rollout-1"})
    assert done.stdout.strip() == "rollout-1", done.stderr
    assert service_of(os.getpid()) == SUPERVISOR


def test_a_redis_restarts_without_what_it_wrote_in_its_last_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_redis, "LOST_SECONDS", 0.0)  # up to the last noted size
    with OwnRedis(tmp_path) as server:
        client = redis.Redis.from_url(server.url, protocol=2)
        client.set("kept", 1)
        server.note_size()
        client.set("lost", 1)
        assert server.restart_without_last_second() > 0
        assert (client.get("kept"), client.get("lost")) == (b"1", None)
        for _ in range(100):
            client.set("later", 1)
        server.kill()
        eventually(lambda: has_ended(server.pid))
        server.restart_if_dead()
        assert client.get("later") == b"1", "a restart loses nothing"
        server.note_size()
        client.bgrewriteaof()
        eventually(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
        assert server.restart_without_last_second() == 0, "the noted size is that of the file before"
        assert client.get("later") == b"1"
