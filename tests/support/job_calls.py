"""Short calls for the tests of the job store."""

from __future__ import annotations

import uuid
from typing import Any

from tandem.services.config.recipe import JobsConfig
from tandem.services.reward.jobs.store import ChunkClaim, ChunkResult, JobRecord, JobStore

LEASE_SECONDS = 300.0


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
