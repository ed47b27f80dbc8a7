"""The durability check of a user's Redis: one that evicts is refused, one that may lose writes gets a warning."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from tandem.protos.errors import ConfigError, EnvironmentLackError
from tandem.services.buffer.connection import RUNS, Connection
from tandem.services.buffer.durability import RedisSettings, check_room, check_settings, read_settings, weaknesses
from tandem.services.buffer.redis_server import start_redis
from tandem.services.commands import doctor
from tandem.services.config.recipe import JobsConfig, ServiceConfig
from tandem.services.reward.standalone import main as serve_alone
from tandem.services.run import estimates, preflight
from tests.support.run_inputs import recipe_of, small_values

Change = Callable[..., None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """With good settings."""
    started = start_redis(tmp_path_factory.mktemp("redis"))
    with closing(redis.Redis.from_url(started.url, protocol=2)) as client:
        client.config_set("aof-load-truncated", "no")  # of the embedded Redis, a start mends the log
    yield started.url
    started.stop()


@pytest.fixture()
def change(server: str) -> Iterator[Change]:
    """Changes settings of the server until the end of the test."""
    before: dict[str, str] = {}
    with closing(redis.Redis.from_url(server, protocol=2)) as client:

        def set_to(**settings: Any) -> None:
            for name, value in settings.items():
                name = name.replace("_", "-")
                before.setdefault(name, client.config_get(name)[name])
                client.config_set(name, value)

        yield set_to
        for name, value in before.items():
            client.config_set(name, value)


@pytest.fixture(scope="module")
def connection(server: str) -> Iterator[Connection]:
    with closing(Connection(server, "durability", RUNS)) as connection:
        yield connection


GOOD = RedisSettings(
    appendonly=True,
    appendfsync="always",
    aof_load_truncated=False,
    maxmemory_bytes=0,
    maxmemory_policy="noeviction",
)
WEAK = [
    ({"appendfsync": "everysec"}, "appendfsync is everysec: what it acknowledged within the last second is lost"),
    ({"appendfsync": "no"}, "appendfsync is no: what it acknowledged within the last half minute is lost"),
    ({"appendfsync": ""}, "appendfsync could not be checked: it refuses CONFIG GET"),
    ({"appendonly": False}, "appendonly is no: when it ends, groups and jobs are lost; set `appendonly yes`"),
    ({"appendonly": False, "appendfsync": "", "aof_load_truncated": True}, "appendonly is no"),
    ({"aof_load_truncated": True}, "aof-load-truncated is yes: once its log has ended within a write, a later start"),
    ({"maxmemory_policy": "allkeys-lru"}, "maxmemory-policy is allkeys-lru: groups and jobs are lost without a word"),
]


@pytest.mark.parametrize(("changes", "said"), WEAK)
def test_each_weak_setting_is_reported_with_its_remedy(changes: dict[str, Any], said: str) -> None:
    assert weaknesses(GOOD) == []
    (found,) = weaknesses(RedisSettings(**{name: getattr(GOOD, name) for name in GOOD.__slots__} | changes))
    assert str(found).startswith(said) and "\n" not in str(found)
    assert found.remedy.endswith("there") or "appendfsync always" in found.remedy


def test_a_redis_with_good_settings_has_no_weakness(connection: Connection) -> None:
    assert read_settings(connection) == GOOD and check_settings(connection) == []


def test_a_redis_that_may_lose_writes_gets_a_warning(connection: Connection, change: Change) -> None:
    change(appendfsync="everysec")
    (line,) = check_settings(connection)
    assert line.startswith(f"Redis at {connection.place}: appendfsync is everysec") and "appendfsync always" in line
    change(appendfsync="always", aof_load_truncated="yes")
    (line,) = check_settings(connection)
    assert "aof-load-truncated is yes" in line and line.endswith("set `aof-load-truncated no` there")
    change(appendonly="no", maxmemory_policy="volatile-lru")
    policy, appendonly = check_settings(connection)
    assert "once it is given a maxmemory" in policy and "appendonly is no" in appendonly


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_redis_that_evicts_is_refused(connection: Connection, change: Change, policy: str) -> None:
    change(maxmemory=1 << 30)
    assert check_settings(connection) == []
    change(maxmemory_policy=policy)
    with pytest.raises(ConfigError, match=f"maxmemory-policy is {policy}: .* set `maxmemory-policy noeviction`"):
        check_settings(connection)


def test_a_server_that_refuses_config_is_reported_as_unchecked(server: str) -> None:
    """CONFIG is refused by an access list, as on a managed server, or renamed."""
    with closing(redis.Redis.from_url(server, protocol=2)) as client:
        client.execute_command("ACL", "SETUSER", "guest", "on", ">secret", "~*", "&*", "+@all", "-config")
        guest = server.replace("unix://", "unix://guest:secret@")
        try:
            with closing(Connection(guest, "durability", RUNS)) as connection:
                (line,) = check_settings(connection)
        finally:
            client.execute_command("ACL", "DELUSER", "guest")
    assert "appendfsync could not be checked" in line and "`aof-load-truncated no`" in line and "secret" not in line


# ---- where Redis is checked ----


def test_a_run_checks_redis_before_it_starts(
    server: str, change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(small_values(tmp_path), run={"redis_url": server})
    monkeypatch.delenv("TANDEM_REDIS_URL", raising=False)
    preflight.check_redis(recipe)
    assert capsys.readouterr().err == ""
    change(appendfsync="everysec")
    preflight.check_redis(recipe)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tandem: Redis at ") and "appendfsync is everysec" in line
    change(maxmemory=1 << 30, maxmemory_policy="allkeys-lru")
    with pytest.raises(ConfigError, match="allkeys-lru"):
        preflight.check_redis(recipe)


def test_the_doctor_reports_durability_of_redis(server: str, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_REDIS_URL", server)
    assert doctor.check_redis_server().verdict == "ok"
    change(appendfsync="everysec")
    found = doctor.check_redis_server()
    assert found.verdict == "note" and "appendfsync is everysec" in found.detail
    assert found.remedy == "set `appendfsync always` there"
    change(maxmemory=1 << 30, maxmemory_policy="allkeys-lru")
    found = doctor.check_redis_server()
    assert found.verdict == "lack" and "allkeys-lru" in found.detail and "noeviction" in found.remedy


class LookedAtError(Exception):
    """Ends a service once it has checked its Redis."""


@pytest.fixture()
def looking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Starts a reward service and stops it just before it would serve."""

    def ended(*_arguments: object, **_more: object) -> None:
        raise LookedAtError

    monkeypatch.setattr("tandem.services.reward.standalone.stop_event", lambda: None)
    monkeypatch.setattr("tandem.services.reward.standalone.RewardServicer", ended)

    def look(redis_url: str = "", **jobs: int) -> None:
        config = ServiceConfig(jobs=JobsConfig(**jobs))  # type: ignore[arg-type]
        with pytest.raises(LookedAtError):
            serve_alone(config, host="127.0.0.1", redis_url=redis_url, folder=tmp_path)

    return look


def test_a_reward_service_checks_redis_before_it_serves(
    server: str, change: Change, looking: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    looking(server)
    assert capsys.readouterr().out == ""
    change(appendfsync="no")
    looking(server)
    assert "reward: WARNING: Redis at " in (said := capsys.readouterr().out) and "appendfsync is no" in said
    change(maxmemory=1 << 30)
    looking(server)
    refused = r"jobs may take 2048\.0 MiB, and its maxmemory is 1024\.0 MiB: raise maxmemory"
    with pytest.raises(ConfigError, match=refused):
        looking(server, max_unscored_bytes=1 << 30, max_result_bytes=1 << 30)
    change(maxmemory_policy="allkeys-lfu")
    with pytest.raises(ConfigError, match="allkeys-lfu"):
        looking(server)


# ---- memory and disk ----


def test_jobs_and_groups_must_fit_into_maxmemory_together(connection: Connection, change: Change) -> None:
    check_room(connection, 1 << 50)  # the server has no limit
    change(maxmemory=100 << 20)
    check_room(connection, 60 << 20, 20 << 20)
    refused = r"jobs may take 60\.0 MiB, groups 21\.0 MiB, and its maxmemory is 100\.0 MiB"
    with pytest.raises(ConfigError, match=refused):
        check_room(connection, 60 << 20, 21 << 20)


def test_an_embedded_redis_needs_memory_and_disk_for_both_limits(
    looking: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = SimpleNamespace(free=3 * (800 << 20))
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda: 800 << 20)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _place: disk)
    looking()
    memory = r"jobs may take 1\.1 GB, .* lower jobs\.max_unscored_bytes or jobs\.max_r"
    with pytest.raises(EnvironmentLackError, match=memory):
        looking(max_result_bytes=800 << 20)
    disk.free = 1 << 30
    room = r"1\.1 GB free, and Redis writes up to 2\.4 GB for jobs; .* --folder"
    with pytest.raises(EnvironmentLackError, match=room):
        looking()
    looking(max_unscored_bytes=1 << 26)
    (tmp_path / "redis" / "grown").write_bytes(b"")
    os.truncate(tmp_path / "redis" / "grown", 2 << 30)  # the log's size
    looking()


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.reward.standalone.stop_event", lambda: None)
    monkeypatch.setattr("tandem.services.reward.standalone.check_job_room", lambda *_: None)
    folder = tmp_path / "file"
    folder.write_text("")
    refused = r"--folder .*/file: Not a directory; name a folder that can be written"
    with pytest.raises(EnvironmentLackError, match=refused):
        serve_alone(ServiceConfig(), host="127.0.0.1", redis_url="", folder=folder)


def test_a_run_that_serves_jobs_counts_their_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_REDIS_URL", raising=False)
    monkeypatch.setattr(preflight, "gpu_ids", lambda: ())
    values = small_values(tmp_path)
    plain, offering = recipe_of(values), recipe_of(values, reward={"port": 50051})
    elsewhere = recipe_of(values, reward={"port": 50051}, run={"redis_url": "unix:///nowhere"})
    facts, limit = preflight.check_models(plain), plain.jobs.redis_bytes
    assert estimates.disk_need_bytes(offering, facts) == estimates.disk_need_bytes(plain, facts) + 3 * limit
    assert estimates.disk_need_bytes(elsewhere, facts) == estimates.disk_need_bytes(plain, facts)
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda: 2.5e9)
    preflight.check_memory(plain, facts)
    preflight.check_memory(elsewhere, facts)
    needed = r"jobs up to 0\.8 GB, 2\.5 GB are free; .* or jobs\.max_unscored_bytes"
    with pytest.raises(EnvironmentLackError, match=needed):
        preflight.check_memory(offering, facts)
    monkeypatch.setattr(preflight, "free_memory_bytes", lambda: 3e9)
    preflight.check_memory(offering, facts)
