"""A service with the real core, shared by tests that leave nothing behind; groups to score; calls of the job store."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.types import Prompt, SamplingParameters, Segment, Trajectory, TrajectoryGroup, VersionSpan
from tandem.services.buffer.buffer import Buffer
from tandem.services.config.recipe import JobsConfig
from tandem.services.reward.jobs.store import ChunkClaim, ChunkResult, JobRecord, JobStore
from tests.support.redis_ring import claim as claim_groups
from tests.support.redis_ring import new_run
from tests.support.reward_server import Service, serving

LEASE_SECONDS = 300.0
SAMPLING = SamplingParameters(max_tokens=4)


@pytest.fixture(scope="module")
def service(redis_url: str) -> Iterator[Service]:
    with serving(redis_url) as one:
        yield one


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.reward.pauses.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("tandem.services.reward.pauses.LONGEST_PAUSE_SECONDS", 0.01)


# ---- groups ----


def trajectory(number: int, text: str, *, earned: float = 0.0, **more: Any) -> Trajectory:
    segment = Segment(
        np.array([1, 2, 3], np.int32),
        np.array([0, -1, -2], np.float32),
        np.array([0, 1, 1], np.uint8),
        (VersionSpan(1, 1, 0),),
    )
    fields = {"role": "policy", "finish_reason": "stop", "sampling": SAMPLING, "earned_reward": earned, **more}
    return Trajectory(trajectory_id=number, segments=(segment,), text=text, **fields)


def generate(buffer: Buffer, groups: Sequence[Sequence[Trajectory]]) -> list[str]:
    """Admits and samples groups; the ground truth is "1"."""
    first = buffer.admission().cursor
    more: dict[str, Any] = {"data_source": "d", "ground_truth": "1"}
    ids = np.array([1], np.int32)
    prompts = [
        Prompt(0, first + n, ids, len(rows), SAMPLING, extra_info={"n": n}, **more) for n, rows in enumerate(groups)
    ]
    assert buffer.admit([(p.group_id, b"") for p in prompts], first + len(groups)) == len(groups)
    by_id = {p.group_id: TrajectoryGroup(p, tuple(rows)) for p, rows in zip(prompts, groups, strict=True)}
    for one in claim_groups(buffer, "prompts", len(groups)):
        assert buffer.complete(one, encode_group(by_id[one.group_id]))
    return list(by_id)


def answers(*texts: str) -> list[Trajectory]:
    return [trajectory(number, text) for number, text in enumerate(texts)]


def collect(buffer: Buffer, number: int, seconds: float = 20.0) -> dict[str, TrajectoryGroup]:
    """The next `count` scored groups by id."""
    incarnation = buffer.begin_incarnation()
    found: dict[str, TrajectoryGroup] = {}
    deadline = time.monotonic() + seconds
    while len(found) < number:
        assert time.monotonic() < deadline, f"{len(found)} of {number} groups: {buffer.counts()}"
        for one in buffer.claim_scored(incarnation, number - len(found), 1.0):
            group = decode_group(buffer.read([one.group_id])[0])
            assert [header.reward for header in one.headers] == [row.reward for row in group.scored_rows]
            found[one.group_id] = group
    return found


def rewards(group: TrajectoryGroup) -> list[float | None]:
    return [row.reward for row in group.scored_rows]


def run_of(redis_url: str, **options: int) -> Buffer:
    return new_run(redis_url, **{"groups_per_batch": 20, "infrastructure": 3, "data": 3, **options})


# ---- jobs in Redis ----


def new_store(url: str, **config: Any) -> JobStore:
    return JobStore(url, JobsConfig(namespace=f"test-{uuid.uuid4().hex[:12]}", **config))


def submit(store: JobStore, *chunks: int, key: str = "key", priority: int = 0, seal: bool = False) -> JobRecord:
    """Submits a job with one chunk per number, which is its number of items."""
    job = store.submit(key, rubric="", priority=priority)
    for index, number in enumerate(chunks):
        stored, job = store.add_chunk(job.job_id, index, number, f"{key} {index}".encode())
        assert stored
    return store.seal(job.job_id, len(chunks)) if seal else job


def claim(store: JobStore, worker: str = "one") -> ChunkClaim:
    claimed = store.claim(worker, LEASE_SECONDS, 0)
    assert claimed is not None
    return claimed


def finish(store: JobStore, claimed: ChunkClaim, num_items: int) -> bool:
    return store.complete(claimed, ChunkResult(b"scored", num_items, 0.5 * num_items, {}))


def expire(store: JobStore, claimed: ChunkClaim) -> None:
    """Makes the lease expire now."""
    store.connection.redis.zadd(store.connection.key("leased"), {f"{claimed.job_id}:{claimed.index}": 0}, xx=True)


def keys_of(store: JobStore) -> set[str]:
    """The keys that the store has in Redis, without its prefix and without replies, which are kept for a minute."""
    found = store.connection.redis.scan_iter(f"*{store.connection.name}*")
    names = {key.decode().removeprefix(store.connection.prefix) for key in found}
    return {name for name in names if not name.startswith("answer:")}
