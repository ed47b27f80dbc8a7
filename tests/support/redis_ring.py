"""Shared by the buffer's tests: a real server, a run in it, and a minimal ring."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.commands.core import Script

from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.redis_server import start_redis
from tandem.services.buffer.types import Claim, Stage

SAMPLER = "rollout-0"
SCORER = "reward"
LEASE_SECONDS = 30.0
HEADERS = "[]"


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """The URL of a server that need not survive a crash, and is fast because it does not wait for the disk."""
    server = start_redis(folder)
    try:
        client = redis.Redis.from_url(server.url, protocol=2)
        client.config_set("appendfsync", "no")
        client.config_set("aof-load-truncated", "no")
        client.close()
        yield server.url
    finally:
        server.stop()


def new_run(
    url: str,
    *,
    groups_per_batch: int = 2,
    staleness_budget: int = 1,
    target_groups: int = 100,
    infrastructure: int = 1,
    data: int = 0,
    run_id: str = "",
    publishes: bool = True,
) -> Buffer:
    """A fresh run, version 0 published by incarnation 1, with one sampler LIVE."""
    buffer = Buffer(url, run_id or f"run-{uuid.uuid4().hex[:12]}")
    buffer.create(
        groups_per_batch=groups_per_batch,
        staleness_budget=staleness_budget,
        target_groups=target_groups,
        failure_budget={"infrastructure": infrastructure, "data": data},
        resume=False,
    )
    incarnation = buffer.begin_incarnation()
    buffer.register_sampler(SAMPLER, "127.0.0.1:1", 1)
    if publishes:
        buffer.publish(incarnation, 0, [SAMPLER])
    return buffer


def offer(buffer: Buffer, count: int, *, start: int | None = None) -> list[str]:
    """Offers the next `count` groups of the data and returns the ids that were admitted."""
    first = buffer.admission().cursor if start is None else start
    group_ids = [f"0-{index}" for index in range(first, first + count)]
    taken = buffer.admit([(group_id, f"prompt {group_id}".encode()) for group_id in group_ids], first + count)
    return group_ids[:taken]


def claim(buffer: Buffer, stage: Stage, n: int = 1, *, lease_seconds: float = LEASE_SECONDS) -> list[Claim]:
    """Claims up to n groups, in as many calls as they need."""
    claimed: list[Claim] = []
    worker = SAMPLER if stage == "prompts" else SCORER
    while len(claimed) < n and (more := buffer.claim(stage, worker, n - len(claimed), lease_seconds, 0)):
        claimed += more
    return claimed


def finish(buffer: Buffer, claimed: Claim) -> bool:
    """Completes a claim with a payload that names the group and the stage."""
    payload = f"{claimed.stage} {claimed.group_id}".encode()
    return buffer.complete(claimed, payload, HEADERS if claimed.stage == "generated" else "")


def move(buffer: Buffer, stage: Stage, n: int = 1) -> list[str]:
    """Claims and completes up to n groups of a stage; returns their ids."""
    claimed = claim(buffer, stage, n)
    assert all(finish(buffer, one) for one in claimed)
    return [one.group_id for one in claimed]


def score(buffer: Buffer, count: int, *, start: int | None = None) -> list[str]:
    """Admits, samples and scores `count` groups."""
    group_ids = offer(buffer, count, start=start)
    assert len(group_ids) == count
    assert move(buffer, "prompts", count) == move(buffer, "generated", count) == group_ids
    return group_ids


def train(buffer: Buffer, incarnation: int, version: int, count: int) -> list[str]:
    """Claims `count` scored groups and records them as `version`."""
    group_ids = [claimed.group_id for claimed in buffer.claim_scored(incarnation, count, 0)]
    assert len(group_ids) == count
    buffer.record(incarnation, version, group_ids)
    return group_ids


_SAVE = """
local found = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
    found[#found + 1] = key
    found[#found + 1] = redis.call('DUMP', key)
end
return found
"""
_RESTORE = """
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
    redis.call('DEL', key)
end
for number, key in ipairs(KEYS) do
    redis.call('RESTORE', key, 0, ARGV[number + 1])
end
"""


@contextmanager
def losing_writes(buffer: Buffer) -> Iterator[None]:
    """Redis forgets what is written to the run in the block, as one that restarts without its last writes."""
    before = saved_keys(buffer)
    yield
    restore_keys(buffer, before)


def saved_keys(buffer: Buffer) -> dict[bytes, bytes]:
    """All keys of the run with their values, at one moment."""
    found = buffer.connection.redis.eval(_SAVE, 0, buffer.connection.key("*"))
    return dict(zip(found[::2], found[1::2], strict=True))


def restore_keys(buffer: Buffer, saved: dict[bytes, bytes]) -> None:
    """Gives the run these keys, and no others, at one moment."""
    buffer.connection.redis.eval(_RESTORE, len(saved), *saved, buffer.connection.key("*"), *saved.values())


def lose_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loses the first reply of every call after Redis has run it, so that the client repeats the call."""
    answered = Script.__call__
    waiting: set[tuple[object, ...]] = set()

    def call(self: Script, keys: list[str], args: tuple[bytes | str | int, ...]) -> object:
        try:
            answer = answered(self, keys, args)
        except redis.ResponseError:
            answer = None
            if (self.sha, *args) in waiting:
                waiting.discard((self.sha, *args))
                raise
        if (self.sha, *args) in waiting:
            waiting.discard((self.sha, *args))
            return answer
        waiting.add((self.sha, *args))
        raise redis.ConnectionError("the answer was lost")

    monkeypatch.setattr(Script, "__call__", call)
    monkeypatch.setattr("tandem.services.buffer.connection._FIRST_PAUSE_SECONDS", 0.0)
