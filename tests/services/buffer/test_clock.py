"""The clock of leases and heartbeats: setting the clock of Redis' host expires none and keeps none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tandem.services.buffer import connection
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.orders import Orders
from tandem.services.reward.jobs.store import JobStore
from tests.services.reward.conftest import new_store, submit
from tests.support import redis_ring as ring
from tests.support.waiting import eventually

HOUR_MS = 3_600_000
SET_CLOCK = """
local redis = setmetatable({ call = function(name, ...)
  local answer = redis.call(name, ...)
  if name ~= 'TIME' then return answer end
  local set_ms = redis.call('GET', string.sub(KEYS[1], 1, -5) .. 'set_ms') or 0
  return { answer[1] + set_ms / 1000, answer[2] }
end }, { __index = redis })
"""


@pytest.fixture
def buffer(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Buffer]:
    original = connection.script_text
    monkeypatch.setattr(connection, "script_text", lambda space, verb: SET_CLOCK + original(space, verb))
    buffer = ring.new_run(redis_url, infrastructure=0)
    yield buffer
    buffer.close()


def set_clock(buffer: Buffer | JobStore, by_ms: int) -> None:
    """Sets the clock of Redis' host, as the scripts see it."""
    buffer.connection.redis.set(buffer.connection.key("set_ms"), by_ms)


@pytest.mark.parametrize("by_ms", [HOUR_MS, -HOUR_MS])
def test_a_clock_that_is_set_by_an_hour_expires_no_lease_and_no_heartbeat(buffer: Buffer, by_ms: int) -> None:
    ring.offer(buffer, 4)
    scoring, sampling = ring.claim(buffer, "prompts", 2)
    assert ring.finish(buffer, scoring)
    (scoring,) = ring.claim(buffer, "generated")
    buffer.heartbeat(ring.SAMPLER, {})
    for clock in (by_ms, 0, by_ms):
        set_clock(buffer, clock)
        counts = buffer.counts()
        assert (counts["leases_expired"], counts["dropped"]) == (0, 0)
        assert [sampler.alive for sampler in buffer.samplers()] == [True]
        assert 0.0 <= buffer.silences()[ring.SAMPLER] < 30.0
        assert buffer.renew([sampling, scoring], 30.0) == []
    assert ring.finish(buffer, sampling) and ring.finish(buffer, scoring)
    assert buffer.verify() == []


@pytest.mark.parametrize("by_ms", [HOUR_MS, -HOUR_MS])
def test_a_clock_that_is_set_by_an_hour_keeps_no_lease_of_a_dead_holder(buffer: Buffer, by_ms: int) -> None:
    ring.offer(buffer, 1)
    ring.claim(buffer, "prompts", lease_seconds=0.2)
    orders = Orders(buffer.connection)
    assert orders.hold("dead", 0.2)
    set_clock(buffer, by_ms)
    eventually(lambda: buffer.counts()["leases_expired"] == 1, 10.0)
    eventually(lambda: orders.hold("next", 30.0), 10.0)
    silence = buffer.silences()[ring.SAMPLER]
    eventually(lambda: buffer.silences()[ring.SAMPLER] > silence, 10.0)


def test_a_full_redis_still_answers_calls_that_read(buffer: Buffer) -> None:
    redis = buffer.connection.redis
    before = redis.config_get("maxmemory")["maxmemory"]
    set_clock(buffer, -HOUR_MS)
    redis.config_set("maxmemory", 1)
    try:
        assert buffer.counts()["admitted"] == 0 and buffer.silences()
    finally:
        redis.config_set("maxmemory", before)


def test_leases_of_jobs_survive_a_clock_that_is_set(buffer: Buffer, redis_url: str) -> None:
    with closing(new_store(redis_url)) as store:
        submit(store, 1)
        assert store.claim("reward", 30.0, 0.0) is not None
        set_clock(store, HOUR_MS)
        assert store.claim("reward-1", 30.0, 0.0) is None
        assert store.counts()["leases_expired"] == 0
