"""The laws of reward jobs in Redis: every item ends exactly once, a late result is refused, a chunk is stored once, limits hold."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from protos.errors import DataError, JobError, JobExistsError, LedgerError, UnknownJobError
from services.jobs.config import JobsConfig
from services.jobs.store import CANCELLED, ChunkClaim, JobRecord, JobStore
from tests.redis_ring import lose_every_answer, running_redis
from tests.reward_ring import eventually

LEASE_SECONDS = 300.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture()
def store(url: str) -> Iterator[JobStore]:
    made = new_store(url)
    yield made
    made.close()


def new_store(url: str, **config: Any) -> JobStore:
    return JobStore(url, JobsConfig(namespace=f"test-{uuid.uuid4().hex[:12]}", **config))


def submit(store: JobStore, *chunks: int, key: str = "key", priority: int = 0, seal: bool = False) -> JobRecord:
    """A job with chunks of so many items each."""
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
    return store.complete(claimed, b"scored", num_scored=num_items, sum_values=0.5 * num_items, num_unscored={})


def expire(store: JobStore, claimed: ChunkClaim) -> None:
    """As if the lease had run out."""
    store._redis.zadd(store._key("leased"), {f"{claimed.job_id}:{claimed.index}": 0}, xx=True)


# ---- one verb at a time ----


def test_a_job_from_its_header_to_its_last_result(store: JobStore) -> None:
    job = submit(store, 3, 2, seal=True)
    assert (job.state, job.num_items, job.num_waiting, job.num_chunks, job.finished_at) == ("RUNNING", 5, 5, 2, 0.0)
    first, second = claim(store), claim(store)
    assert (first.index, first.first_item, first.items) == (0, 0, b"key 0")
    assert (second.index, second.first_item, second.items) == (1, 3, b"key 1")
    assert store.claim("one", LEASE_SECONDS, 0) is None
    assert store.complete(second, b"second", num_scored=2, sum_values=0.25, num_unscored={})
    assert store.complete(first, b"first", num_scored=1, sum_values=1.0, num_unscored={"timeout": 1, "crashed": 1})
    job, results = store.events(job.job_id, 0, 1 << 20)
    assert results == [b"second", b"first"], "in the order of completion"
    assert (job.state, job.num_scored, job.sum_values, job.num_waiting) == ("DONE", 3, 1.25, 0)
    assert job.num_unscored == {"timeout": 1, "crashed": 1}
    assert job.created_at <= job.finished_at < job.expires_at
    assert store.events(job.job_id, 1, 1 << 20)[1] == [b"first"] and store.events(job.job_id, 2, 1 << 20)[1] == []
    assert store.events(job.job_id, 0, 1)[1] == [b"second"], "one at least"
    assert store.events(job.job_id, 0, 0)[1] == []
    left = {key.decode().removeprefix(store._prefix) for key in store._redis.scan_iter(f"*{store.run_id}*")}
    assert not {name for name in left if name.startswith(("items:", "chunks:", "partials:"))}, "payloads are gone"


def test_the_same_key_is_the_same_job(store: JobStore) -> None:
    job = store.submit("key", rubric="a", priority=3, name="first", digest="d")
    again = store.submit("key", rubric="a", priority=3, name="second", digest="e")
    assert again == job and again.name == "first"
    with pytest.raises(JobExistsError, match=f"job {job.job_id} has this idempotency_key and another rubric"):
        store.submit("key", rubric="b", priority=3)
    with pytest.raises(JobExistsError, match="another priority"):
        store.submit("key", rubric="a", priority=4)
    assert store.submit("1e3", rubric="a", priority=3).job_id != job.job_id
    assert store.submit("1000", rubric="a", priority=3).idempotency_key == "1000"
    assert len(store.list_jobs(10)) == 3


def test_a_chunk_is_stored_once_and_in_order(store: JobStore) -> None:
    job = submit(store, 3)
    stored, again = store.add_chunk(job.job_id, 0, 7, b"other")
    assert stored and again == job
    with pytest.raises(DataError, match="chunk 2 came before chunk 1"):
        store.add_chunk(job.job_id, 2, 1, b"")
    with pytest.raises(DataError, match="has 1 chunks, the seal says 2"):
        store.seal(job.job_id, 2)
    sealed = store.seal(job.job_id, 1)
    assert store.seal(job.job_id, 1) == sealed
    assert store.add_chunk(job.job_id, 0, 3, b"")[0], "known for ever"
    with pytest.raises(JobError, match="is RUNNING with 1 chunks and takes no more"):
        store.add_chunk(job.job_id, 1, 1, b"")
    assert claim(store).items == b"key 0"


def test_a_job_without_items_is_done_when_it_is_sealed(store: JobStore) -> None:
    assert submit(store, seal=True).state == "DONE"


@pytest.mark.parametrize("job_id", ["0" * 32, "", "x", "../../etc", "0" * 31 + "\n", "é" * 32])
def test_a_job_that_is_not_there_is_named(store: JobStore, job_id: str) -> None:
    for verb in (
        lambda: store.events(job_id, 0, 1),
        lambda: store.cancel(job_id),
        lambda: store.seal(job_id, 0),
        lambda: store.add_chunk(job_id, 0, 1, b""),
        lambda: store.has_room(job_id, 1),
    ):
        with pytest.raises(UnknownJobError, match="there is no job"):
            verb()


def test_a_late_result_is_refused_and_counted(store: JobStore) -> None:
    submit(store, 2, seal=True)
    late = claim(store)
    expire(store, late)
    fresh = claim(store, "two")
    assert fresh.token > late.token and (fresh.losses, fresh.attempts) == (1, 0)
    assert not finish(store, late, 2) and store.renew([late, fresh], LEASE_SECONDS) == [late.token]
    assert not store.give_back(late, attempts=1, partial=b"", pause_seconds=0.0)
    assert finish(store, fresh, 2) and not finish(store, fresh, 2), "once"
    counts = store.counts()
    assert (counts["stale_results_refused"], counts["leases_expired"], counts["items_ended"]) == (2, 1, 2)


def test_a_holder_that_outlives_its_lease_did_not_die_of_the_chunk(store: JobStore) -> None:
    submit(store, 2, seal=True)
    first = claim(store)
    expire(store, first)
    assert store.renew([first], LEASE_SECONDS) == [], "Redis was away: nobody has taken it"
    expire(store, first)
    second = claim(store, "two")
    assert second.losses == 1 and store.register("two") == 1
    for _ in range(2):
        assert store.renew([first], LEASE_SECONDS) == [first.token]
    third = claim(store, "two")
    assert third.losses == 1, "the second died, the first did not"
    assert store.save(third, partial=b"half", under_way=1, cleared=False)
    assert not store.save(first, partial=b"other", under_way=7, cleared=True)
    assert store.register("two") == 1
    fourth = claim(store)
    assert (fourth.losses, fourth.under_way, fourth.partial) == (2, 1, b"half")
    assert store.save(fourth, partial=b"all", under_way=0, cleared=True) and store.register("one") == 1
    fifth = claim(store)
    assert (fifth.losses, fifth.under_way, fifth.partial) == (1, 0, b"all")


def test_a_restarted_worker_takes_back_at_once_what_it_held(store: JobStore) -> None:
    submit(store, 1, 1)
    mine, other = claim(store, "one"), claim(store, "two")
    assert store.register("one") == 1 and store.register("one") == 0
    again = claim(store, "one")
    assert again.index == mine.index and finish(store, again, 1) and finish(store, other, 1)


def test_what_is_given_back_waits_out_its_pause_with_what_is_scored_of_it(store: JobStore) -> None:
    submit(store, 2)
    assert store.give_back(claim(store), attempts=1, partial=b"half", pause_seconds=300.0)
    assert store.claim("one", LEASE_SECONDS, 0) is None and store.register("") == 1
    paused = claim(store)
    assert (paused.partial, paused.attempts, paused.losses) == (b"half", 1, 0)
    assert store.give_back(paused, attempts=2, partial=b"", pause_seconds=0.0)
    again = claim(store)
    assert (again.partial, again.attempts, again.losses) == (b"half", 2, 0)


def test_a_cancelled_job_ends_at_once_and_refuses_what_comes(store: JobStore) -> None:
    job = submit(store, 1, 2, 3)
    assert finish(store, claim(store), 1)
    held = claim(store)
    job = store.cancel(job.job_id)
    assert (job.state, job.num_scored, job.num_unscored, job.num_waiting) == ("CANCELLED", 1, {CANCELLED: 5}, 0)
    assert not finish(store, held, 2) and store.claim("one", LEASE_SECONDS, 0) is None
    assert store.cancel(job.job_id) == job and store.events(job.job_id, 0, 100) == (job, [b"scored"])
    with pytest.raises(JobError, match="is CANCELLED with 3 chunks and takes no more"):
        store.add_chunk(job.job_id, 3, 1, b"")
    with pytest.raises(JobError, match="is CANCELLED"):
        store.seal(job.job_id, 3)
    counts = store.counts()
    assert (counts["unscored_bytes"], counts["chunks_waiting"], counts["chunks_leased"]) == (0, 0, 0)
    assert store.cancel(submit(store, 1, key="done").job_id).num_unscored == {CANCELLED: 1}
    done = submit(store, key="over", seal=True)
    assert store.cancel(done.job_id).state == "DONE"


def test_numbers_that_do_not_add_up_are_a_bug(store: JobStore) -> None:
    submit(store, 3)
    held = claim(store)
    with pytest.raises(LedgerError, match="has 3 items, not 2"):
        store.complete(held, b"", num_scored=1, sum_values=0.0, num_unscored={"timeout": 1})
    assert finish(store, held, 3)


def test_higher_priority_comes_first_and_equals_take_turns(store: JobStore) -> None:
    submit(store, *[10] * 6, key="long")
    claim(store)
    submit(store, *[10] * 2, key="short")
    submit(store, *[1] * 3, key="small")
    submit(store, 10, key="urgent", priority=1)
    submit(store, 10, key="background", priority=-100)
    order = [claim(store).items.decode() for _ in range(12)]
    assert order[0] == "urgent 0" and order[-1] == "background 0"
    assert order.index("short 1") < order.index("long 4"), (
        "a job that comes later does not wait for the whole of an earlier one"
    )
    assert order.index("small 2") < order.index("short 1"), "turns are of items, not of chunks"
    assert [one for one in order if one.startswith("long")] == [f"long {n}" for n in range(1, 6)]


def test_a_job_that_comes_late_does_not_overtake(store: JobStore) -> None:
    submit(store, *[10] * 10, key="early")
    for _ in range(5):
        claim(store)
    submit(store, *[10] * 5, key="late")
    order = [claim(store).items.decode().split()[0] for _ in range(10)]
    assert all(abs(order[:n].count("early") - order[:n].count("late")) <= 1 for n in range(10)), order


def test_a_job_fills_half_of_the_room_and_what_is_alone_always_finds_some(url: str) -> None:
    store = new_store(url)
    store._run("configure", 10**9, 1 << 20)
    quarter = b"x" * ((1 << 18) - 1024)
    first, second, third = (store.submit(key, rubric="", priority=0) for key in "abc")
    assert store.add_chunk(first.job_id, 0, 1, quarter)[0] and store.add_chunk(first.job_id, 1, 1, quarter)[0]
    assert not store.add_chunk(first.job_id, 2, 1, b"")[0], "half of the room is the job's"
    assert store.add_chunk(first.job_id, 1, 1, quarter)[0], "it is stored"
    assert store.add_chunk(second.job_id, 0, 1, quarter)[0] and store.add_chunk(second.job_id, 1, 1, quarter)[0]
    assert not store.add_chunk(third.job_id, 0, 1, b"")[0] and not store.has_room(third.job_id, 0)[0], (
        "there is no more"
    )
    held = [claim(store), claim(store)]  # the first chunk of either: they take turns
    assert finish(store, next(one for one in held if one.job_id == first.job_id), 1)
    assert store.has_room(third.job_id, 0)[0] and store.add_chunk(third.job_id, 0, 1, b"")[0]
    assert not store.has_room(first.job_id, len(quarter))[0] and store.has_room(first.job_id, 0)[0]
    store.cancel(first.job_id), store.cancel(third.job_id)
    assert store.has_room(first.job_id, 1 << 20)[0], "it takes none any more: asking again says so"
    assert not store.has_room(second.job_id, 0)[0]
    store.cancel(second.job_id)
    huge = store.submit("huge", rubric="", priority=0)
    assert store.add_chunk(huge.job_id, 0, 1, quarter * 5)[0]


def test_what_has_ended_is_forgotten_after_its_retention_and_what_waits_is_not(url: str) -> None:
    store = new_store(url, retention_seconds=0.05)
    done, waiting, abandoned = (
        submit(store, 1, key="done", seal=True),
        submit(store, 1, key="waits"),
        submit(store, key="open"),
    )
    assert finish(store, claim(store), 1)
    eventually(lambda: [job.job_id for job in store.list_jobs(10)] == [waiting.job_id])
    for job_id in (done.job_id, abandoned.job_id):
        with pytest.raises(UnknownJobError):
            store.events(job_id, 0, 1)
    again = store.submit("done", rubric="another", priority=1)
    assert again.job_id != done.job_id and finish(store, claim(store), 1)
    eventually(lambda: not store.list_jobs(10))
    left = {key.decode().removeprefix(store._prefix) for key in store._redis.scan_iter(f"*{store.run_id}*")}
    assert {name for name in left if not name.startswith("answer:")} <= {"meta", "bell:waiting"}


def test_namespaces_do_not_meet(url: str) -> None:
    one, other = new_store(url), new_store(url)
    submit(one, 1)
    assert other.claim("one", LEASE_SECONDS, 0) is None and other.list_jobs(10) == []


def test_every_answer_may_get_lost(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_every_answer(monkeypatch)
    job = submit(store, 2, 3, seal=True)
    assert (job.num_items, job.num_chunks) == (5, 2)
    first, second = claim(store), claim(store)
    assert store.give_back(first, attempts=1, partial=b"half", pause_seconds=0.0)
    assert finish(store, second, 3) and finish(store, claim(store), 2)
    job = store.cancel(job.job_id)
    assert (job.state, job.num_scored, job.sum_values, job.num_results) == ("DONE", 5, 2.5, 2)
    assert store.counts()["unscored_bytes"] == 0 and store.counts()["stale_results_refused"] == 0


# ---- against a twin ----


@dataclass
class TwinChunk:
    num_items: int
    num_bytes: int
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

    @property
    def open_chunks(self) -> list[TwinChunk]:
        return [] if self.state in ("DONE", "CANCELLED") else [one for one in self.chunks if one.state != "ended"]


LIMIT = 8000
OVERHEAD = 1024
WORKERS = ("one", "two")


class Jobs(RuleBasedStateMachine):
    """The store and its twin do the same and look the same, whatever comes in whatever order."""

    url = ""
    keys = Bundle("keys")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.store = new_store(self.url)
        self.store._run("configure", 10**9, LIMIT)
        self.jobs: dict[str, TwinJob] = {}
        self.served: dict[int, int] = {}
        self.numbers = itertools.count()

    def teardown(self) -> None:
        self.store.close()

    @initialize(target=keys)
    def begin(self) -> Any:
        return self.submit_job(0)

    @rule(target=keys, priority=st.sampled_from([0, 0, 5, -5]))
    def submit_job(self, priority: int) -> str:
        key = f"key-{next(self.numbers)}"
        self.jobs[key] = TwinJob(self.store.submit(key, rubric="", priority=priority).job_id, priority)
        return key

    @rule(key=keys)
    def submit_again(self, key: str) -> None:
        job = self.jobs[key]
        assert self.store.submit(key, rubric="", priority=job.priority).job_id == job.job_id
        with pytest.raises(JobExistsError):
            self.store.submit(key, rubric="", priority=job.priority + 1)

    @rule(key=keys, offset=st.sampled_from([0, 0, 0, 0, -1, 1]), items=st.integers(1, 5), size=st.integers(0, 3000))
    def add_chunk(self, key: str, offset: int, items: int, size: int) -> None:
        job = self.jobs[key]
        index = len(job.chunks) + offset
        if index < 0:
            return
        if offset >= 0 and (job.state != "OPEN" or offset == 1):
            with pytest.raises(JobError if job.state != "OPEN" else DataError):
                self.store.add_chunk(job.job_id, index, items, b"x" * size)
            return
        stored, _ = self.store.add_chunk(job.job_id, index, items, b"x" * size)
        total = sum(chunk.num_bytes for one in self.jobs.values() for chunk in one.open_chunks)
        own, size = sum(chunk.num_bytes for chunk in job.open_chunks), size + OVERHEAD
        room = (total == 0 or total + size <= LIMIT) and (own == 0 or own + size <= LIMIT / 2)
        assert stored == (offset < 0 or room)
        if offset == 0 and stored:
            start = max(self.served.get(job.priority, 0), job.rank)
            first = sum(chunk.num_items for chunk in job.chunks)
            job.chunks.append(TwinChunk(items, size, first, start))
            job.rank = start + items

    @rule(key=keys, offset=st.sampled_from([0, 0, 1]))
    def seal(self, key: str, offset: int) -> None:
        job = self.jobs[key]
        if offset or job.state == "CANCELLED":
            with pytest.raises(JobError if job.state == "CANCELLED" else DataError):
                self.store.seal(job.job_id, len(job.chunks) + offset)
            return
        self.store.seal(job.job_id, len(job.chunks))
        if job.state == "OPEN":
            job.state = "RUNNING"
            self._end(job)

    def _end(self, job: TwinJob) -> None:
        if job.state == "RUNNING" and not job.open_chunks:
            job.state = "DONE"

    @rule(target=claims, worker=st.sampled_from(WORKERS))
    def claim(self, worker: str) -> Any:
        waiting = [
            (-job.priority, chunk.place, f"{job.job_id}:{index}", job, chunk)
            for job in self.jobs.values()
            for index, chunk in enumerate(job.chunks)
            if job.state in ("OPEN", "RUNNING") and chunk.state == "waiting"
        ]
        claimed = self.store.claim(worker, LEASE_SECONDS, 0)
        if not waiting:
            assert claimed is None
            return multiple()
        _, place, name, job, chunk = min(waiting, key=lambda one: one[:3])
        assert claimed is not None and f"{claimed.job_id}:{claimed.index}" == name
        found = (claimed.first_item, claimed.attempts, claimed.losses, claimed.under_way, claimed.partial)
        assert found == (chunk.first_item, chunk.attempts, chunk.losses, chunk.under_way, chunk.partial)
        assert len(claimed.items) == chunk.num_bytes - OVERHEAD
        chunk.state, chunk.worker, chunk.token = "leased", worker, claimed.token
        self.served[job.priority] = max(place, self.served.get(job.priority, 0))
        return claimed

    def _current(self, claimed: ChunkClaim, *, alive: bool = True) -> tuple[TwinJob, TwinChunk, bool]:
        [job] = [one for one in self.jobs.values() if one.job_id == claimed.job_id]
        chunk = job.chunks[claimed.index]
        current = job.state in ("OPEN", "RUNNING") and chunk.state == "leased" and chunk.token == claimed.token
        if alive and claimed.token in chunk.lost:  # whoever asks did not die
            chunk.lost.discard(claimed.token)
            chunk.losses -= 1
        return job, chunk, current

    @rule(claimed=claims, failed=st.integers(0, 5))
    def complete(self, claimed: ChunkClaim, failed: int) -> None:
        job, chunk, current = self._current(claimed)
        failed = min(failed, chunk.num_items)
        result = f"{claimed.index}".encode()
        reasons = {"timeout": failed} if failed else {}
        scored = chunk.num_items - failed
        accepted = self.store.complete(
            claimed, result, num_scored=scored, sum_values=0.5 * scored, num_unscored=reasons
        )
        assert accepted == current
        if current:
            chunk.state = "ended"
            job.results.append(result)
            job.num_scored += scored
            if failed:
                job.unscored["timeout"] = job.unscored.get("timeout", 0) + failed
            self._end(job)

    @rule(claimed=claims, partial=st.sampled_from([b"", b"some"]))
    def give_back(self, claimed: ChunkClaim, partial: bytes) -> None:
        _, chunk, current = self._current(claimed)
        attempts = claimed.attempts + 1
        assert current == self.store.give_back(claimed, attempts=attempts, partial=partial, pause_seconds=0.0)
        if current:
            chunk.state, chunk.attempts, chunk.partial, chunk.under_way = (
                "waiting",
                attempts,
                partial or chunk.partial,
                0,
            )

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

    @rule(claimed=claims)
    def lease_runs_out(self, claimed: ChunkClaim) -> None:
        _, chunk, current = self._current(claimed, alive=False)
        if current:
            expire(self.store, claimed)
            self.store.renew([], LEASE_SECONDS)  # somebody looks
            self._lose(chunk)

    def _lose(self, chunk: TwinChunk) -> None:
        chunk.lost.add(chunk.token)
        chunk.state, chunk.losses = "waiting", chunk.losses + 1

    @rule(worker=st.sampled_from(WORKERS))
    def worker_starts_anew(self, worker: str) -> None:
        held = [c for job in self.jobs.values() for c in job.open_chunks if c.state == "leased" and c.worker == worker]
        assert self.store.register(worker) == len(held)
        for chunk in held:
            self._lose(chunk)

    @rule(key=keys)
    def cancel(self, key: str) -> None:
        job = self.jobs[key]
        self.store.cancel(job.job_id)
        if job.state in ("OPEN", "RUNNING"):
            if waiting := sum(chunk.num_items for chunk in job.open_chunks):
                job.unscored[CANCELLED] = waiting
            job.state = "CANCELLED"

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
            assert self.store.events(job.job_id, 0, 1 << 20)[1] == job.results, "every result is told once, in order"
            assert found.ended == (found.finished_at > 0) == (found.expires_at > 0)
        chunks = [chunk for job in self.jobs.values() for chunk in job.open_chunks]
        counts = self.store.counts()
        assert counts["unscored_bytes"] == sum(chunk.num_bytes for chunk in chunks)
        assert counts["chunks_waiting"] + counts["chunks_leased"] == len(chunks)


def test_the_store_and_its_twin_agree(url: str) -> None:
    class Here(Jobs):
        pass

    Here.url = url
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Here, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=checks)
    )
