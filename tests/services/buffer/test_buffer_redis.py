"""The buffer and its Redis: keys, footprint, memory, outages and unreachable addresses."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import redis

from tandem.protos.errors import (
    ConfigError,
    EnvironmentLackError,
    UnavailableError,
)
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.durability import check_room
from tandem.services.buffer.redis_server import start_redis
from tests.support import redis_ring as ring


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


def test_a_url_of_another_kind_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match="redis_url") as caught:
        Buffer("http://user:secret@host/0", "run")
    assert "secret" not in str(caught.value)


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
