"""The store of reward jobs against a Python twin: both behave the same under random calls in random order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from tandem.protos.errors import DataError, JobError, JobExistsError, JobLimitError, UnknownJobError
from tandem.services.reward.jobs.store import CANCELLED, ChunkClaim, ChunkResult
from tests.services.reward.conftest import LEASE_SECONDS, expire, new_store

LIMIT = 8000
OVERHEAD = 1024
RESULT_LIMIT = 40_000
RESULT_OVERHEAD = 256
RECORD = 4096
WORKERS = ("one", "two")


@dataclass
class TwinChunk:
    num_items: int
    items: bytes
    first_item: int
    place: int
    state: str = "waiting"
    worker: str = ""
    token: int = 0
    attempts: int = 0
    losses: int = 0
    lost: set[int] = field(default_factory=set)
    under_way: int = 0
    partial: bytes = b""

    @property
    def num_bytes(self) -> int:
        return len(self.items) + OVERHEAD


@dataclass
class TwinJob:
    job_id: str
    priority: int
    state: str = "OPEN"
    rank: int = 0
    chunks: list[TwinChunk] = field(default_factory=list)
    results: list[bytes] = field(default_factory=list)
    num_scored: int = 0
    unscored: dict[str, int] = field(default_factory=dict)
    kept: int = RECORD

    @property
    def goes_on(self) -> bool:
        return self.state in ("OPEN", "RUNNING")

    @property
    def open_chunks(self) -> list[TwinChunk]:
        return [one for one in self.chunks if one.state != "ended"] if self.goes_on else []


class Jobs(RuleBasedStateMachine):
    """The store and its twin under random calls; both must return the same and hold the same state."""

    url = ""
    keys = Bundle("keys")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.store = new_store(self.url)
        self.store.connection.run("configure", 10**9, LIMIT, RESULT_LIMIT)
        self.jobs: dict[str, TwinJob] = {}
        self.deleted: list[TwinJob] = []
        self.ended: list[TwinJob] = []
        """Jobs that can give up results, in the order in which they ended."""
        self.sums = dict.fromkeys(("jobs_expired", "items_ended", "leases_expired", "stale_results_refused"), 0)
        self.served: dict[int, int] = {}
        self.numbers = itertools.count()

    def teardown(self) -> None:
        self.store.close()

    @initialize(target=keys)
    def begin(self) -> Any:
        return self.submit_job(0)

    @rule(target=keys, priority=st.sampled_from([0, 0, 5, -5]))
    def submit_job(self, priority: int) -> Any:
        key = f"key-{next(self.numbers)}"
        self._give_up()
        if self.kept > RESULT_LIMIT:
            with pytest.raises(JobLimitError, match=f"jobs.max_result_bytes = {RESULT_LIMIT}; try again"):
                self.store.submit(key, rubric="", priority=priority)
            return multiple()
        self.jobs[key] = TwinJob(self.store.submit(key, rubric="", priority=priority).job_id, priority)
        return key

    @rule(key=keys)
    def submit_again(self, key: str) -> None:
        job = self.jobs[key]
        assert self.store.submit(key, rubric="", priority=job.priority).job_id == job.job_id
        with pytest.raises(JobExistsError):
            self.store.submit(key, rubric="", priority=job.priority + 1)

    @rule(
        key=keys,
        offset=st.sampled_from([0, 0, 0, 0, -1, 1]),
        num_items=st.integers(1, 5),
        size=st.one_of(st.integers(0, 3000), st.just(2 * LIMIT)),
    )
    def add_chunk(self, key: str, offset: int, num_items: int, size: int) -> None:
        job, items = self.jobs[key], f"{next(self.numbers):0{size}}".encode()
        index = len(job.chunks) + offset
        if index < 0:
            return
        if offset >= 0 and (job.state != "OPEN" or offset == 1):
            told = f"chunk {index} came before chunk {len(job.chunks)}"
            if job.state != "OPEN":
                told = f"is {job.state} with {len(job.chunks)} chunks and takes no more"
            with pytest.raises(JobError if job.state != "OPEN" else DataError, match=told):
                self.store.add_chunk(job.job_id, index, num_items, items)
            return
        room = self._has_room(job, len(items) + OVERHEAD)
        assert self.store.has_room(job.job_id, len(items))[0] == (room or job.state != "OPEN")
        if offset == 0 and room and self._is_beyond_results(job):
            with pytest.raises(JobLimitError, match="max_result_bytes"):
                self.store.add_chunk(job.job_id, index, num_items, items)
            return
        stored, _ = self.store.add_chunk(job.job_id, index, num_items, items)
        assert stored == (offset < 0 or room)
        if offset == 0 and stored:
            start = max(self.served.get(job.priority, 0), job.rank)
            first = sum(chunk.num_items for chunk in job.chunks)
            job.chunks.append(TwinChunk(num_items, items, first, start))
            job.rank = start + num_items

    def _has_room(self, job: TwinJob, size: int) -> bool:
        total = sum(chunk.num_bytes for one in self.jobs.values() for chunk in one.open_chunks)
        own = sum(chunk.num_bytes for chunk in job.open_chunks)
        return (total == 0 or total + size <= LIMIT) and (own == 0 or own + size <= LIMIT / 2)

    @property
    def kept(self) -> int:
        return sum(job.kept for job in self.jobs.values())

    def _is_beyond_results(self, job: TwinJob) -> bool:
        if job.kept > RESULT_LIMIT / 2:
            return True
        self._give_up()
        return self.kept > RESULT_LIMIT

    def _give_up(self, spared: TwinJob | None = None) -> None:
        for job in list(self.ended):
            if job is not spared and self.kept > RESULT_LIMIT:
                job.state, job.kept = "EXPIRED", RECORD
                self.ended.remove(job)
                self.sums["jobs_expired"] += 1

    @rule(key=keys, offset=st.sampled_from([0, 0, 1]))
    def seal(self, key: str, offset: int) -> None:
        job = self.jobs[key]
        if job.state == "CANCELLED" or offset:
            known, told = len(job.chunks), f"job {job.job_id} is CANCELLED"
            if job.state != "CANCELLED":
                told = f"has {known} chunks, the seal says {known + offset}"
            with pytest.raises(JobError if job.state == "CANCELLED" else DataError, match=told):
                self.store.seal(job.job_id, known + offset)
            return
        self.store.seal(job.job_id, len(job.chunks))
        if job.state == "OPEN":
            job.state = "RUNNING"
            self._end(job)

    def _end(self, job: TwinJob) -> None:
        if job.state == "RUNNING" and not job.open_chunks:
            job.state = "DONE"
            self.ended += [job] if job.results else []

    @rule(target=claims, worker=st.sampled_from(WORKERS))
    def claim(self, worker: str) -> Any:
        waiting = [
            (-job.priority, chunk.place, f"{job.job_id}:{index}", job, chunk)
            for job in self.jobs.values()
            for index, chunk in enumerate(job.chunks)
            if job.goes_on and chunk.state == "waiting"
        ]
        claimed = self.store.claim(worker, LEASE_SECONDS, 0)
        if not waiting:
            assert claimed is None
            return multiple()
        _, place, name, job, chunk = min(waiting, key=lambda one: one[:3])
        assert claimed is not None and f"{claimed.job_id}:{claimed.index}" == name
        found = (claimed.first_item, claimed.attempts, claimed.losses, claimed.under_way, claimed.partial)
        assert found == (chunk.first_item, chunk.attempts, chunk.losses, chunk.under_way, chunk.partial)
        assert claimed.items == chunk.items
        chunk.state, chunk.worker, chunk.token = "leased", worker, claimed.token
        self.served[job.priority] = max(place, self.served.get(job.priority, 0))
        return claimed

    def _current(self, claimed: ChunkClaim, *, alive: bool = True) -> tuple[TwinJob, TwinChunk, bool]:
        [job] = [one for one in (*self.jobs.values(), *self.deleted) if one.job_id == claimed.job_id]
        chunk = job.chunks[claimed.index]
        current = job.goes_on and chunk.state == "leased" and chunk.token == claimed.token
        if alive and claimed.token in chunk.lost:  # the worker that asks did not die
            chunk.lost.discard(claimed.token)
            chunk.losses -= 1
        return job, chunk, current

    @rule(claimed=claims, failed=st.integers(0, 5), size=st.sampled_from([1, 100, 9000, 2 * RESULT_LIMIT]))
    def complete(self, claimed: ChunkClaim, failed: int, size: int) -> None:
        job, chunk, current = self._current(claimed)
        failed = min(failed, chunk.num_items)
        result = f"{claimed.index:0{size}}".encode()
        reasons = {"timeout": failed} if failed else {}
        scored = chunk.num_items - failed
        accepted = self.store.complete(claimed, ChunkResult(result, scored, 0.5 * scored, reasons))
        assert accepted == current
        self.sums["stale_results_refused"] += not current
        if current:
            chunk.state = "ended"
            self.sums["items_ended"] += chunk.num_items
            job.results.append(result)
            job.kept += len(result) + RESULT_OVERHEAD
            job.num_scored += scored
            if failed:
                job.unscored["timeout"] = job.unscored.get("timeout", 0) + failed
            self._end(job)
            self._give_up(spared=job)

    @rule(claimed=claims, partial=st.sampled_from([b"", b"some"]))
    def give_back(self, claimed: ChunkClaim, partial: bytes) -> None:
        _, chunk, current = self._current(claimed)
        attempts = claimed.attempts + 1
        assert current == self.store.give_back(claimed, attempts=attempts, partial=partial, pause_seconds=0.0)
        if current:
            chunk.state, chunk.attempts, chunk.under_way = "waiting", attempts, 0
            chunk.partial = partial or chunk.partial

    @rule(claimed=claims, under_way=st.integers(0, 3), cleared=st.booleans())
    def save(self, claimed: ChunkClaim, under_way: int, cleared: bool) -> None:
        _, chunk, current = self._current(claimed)
        assert current == self.store.save(claimed, partial=b"saved", under_way=under_way, cleared=cleared)
        if current:
            chunk.partial, chunk.under_way = b"saved", under_way
            if cleared:
                chunk.losses, chunk.lost = 0, set()

    @rule(claimed=claims)
    def renew(self, claimed: ChunkClaim) -> None:
        lost = [] if self._current(claimed)[2] else [claimed.token]
        assert self.store.renew([claimed], LEASE_SECONDS) == lost

    @rule(claimed=claims, noticed=st.booleans())
    def lease_runs_out(self, claimed: ChunkClaim, noticed: bool) -> None:
        _, chunk, current = self._current(claimed, alive=False)
        if current:
            expire(self.store, claimed)
            # Redis was away, and nobody has taken it; or another call sees the expired leases.
            assert self.store.renew([] if noticed else [claimed], LEASE_SECONDS) == []
            if noticed:
                self._lose(chunk)

    def _lose(self, chunk: TwinChunk) -> None:
        chunk.lost.add(chunk.token)
        chunk.state, chunk.losses = "waiting", chunk.losses + 1
        self.sums["leases_expired"] += 1

    @rule(worker=st.sampled_from(WORKERS))
    def worker_starts_anew(self, worker: str) -> None:
        held = [c for job in self.jobs.values() for c in job.open_chunks if c.state == "leased" and c.worker == worker]
        assert self.store.register(worker) == len(held)
        for chunk in held:
            self._lose(chunk)

    @rule(key=keys)
    def cancel(self, key: str) -> None:
        job = self.jobs[key]
        assert self.store.cancel(job.job_id) == self.store.cancel(job.job_id)
        if job.goes_on:
            if waiting := sum(chunk.num_items for chunk in job.open_chunks):
                job.unscored[CANCELLED] = waiting
                self.sums["items_ended"] += waiting
            job.state = "CANCELLED"
            self.ended += [job] if job.results else []

    @rule(target=keys, key=consumes(keys))
    def delete(self, key: str) -> Any:
        job = self.jobs[key]
        if job.goes_on:
            with pytest.raises(JobError, match=f"is {job.state}; cancel it first"):
                self.store.delete(job.job_id)
            return key
        was = self.store.delete(job.job_id)
        assert (was.job_id, was.state, was.result_bytes) == (job.job_id, job.state, job.kept)
        assert self.store.delete(job.job_id) == was, "whose answer was lost"
        with pytest.raises(UnknownJobError):
            self.store.events(job.job_id, 0, 0)
        self.deleted.append(self.jobs.pop(key))
        if job in self.ended:
            self.ended.remove(job)
        return multiple()

    @invariant()
    def they_look_the_same(self) -> None:
        listed = self.store.list_jobs(1000)
        assert [job.job_id for job in listed] == [job.job_id for job in reversed(self.jobs.values())]
        for found, job in zip(listed, reversed(self.jobs.values()), strict=True):
            num_items = sum(chunk.num_items for chunk in job.chunks)
            assert (found.state, found.num_items, found.num_chunks) == (job.state, num_items, len(job.chunks))
            assert (found.num_scored, found.num_unscored) == (job.num_scored, job.unscored)
            assert found.sum_values == 0.5 * job.num_scored
            assert found.num_waiting == sum(chunk.num_items for chunk in job.open_chunks)
            assert found.result_bytes == job.kept
            if found.state == "EXPIRED":
                with pytest.raises(JobError, match="is EXPIRED: its results were given up"):
                    self.store.events(job.job_id, len(job.results) - 1, 1)
                assert self.store.events(job.job_id, len(job.results), 1)[1] == []
            else:
                assert self.store.events(job.job_id, 0, 1 << 20)[1] == job.results, "each is told once, in order"
            assert found.ended == (found.finished_at > 0) == (found.expires_at > 0)
        chunks = [chunk for job in self.jobs.values() for chunk in job.open_chunks]
        counts = self.store.counts()
        assert counts["result_bytes"] == self.kept and {name: counts[name] for name in self.sums} == self.sums
        assert counts["unscored_bytes"] == sum(chunk.num_bytes for chunk in chunks)
        assert counts["chunks_waiting"] + counts["chunks_leased"] == len(chunks)


def test_the_store_and_its_twin_agree_at_every_step(redis_url: str) -> None:
    class Here(Jobs):
        pass

    Here.url = redis_url
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Here, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=checks)
    )
