"""The laws of reward jobs in Redis: items end once, late results are refused, chunks are stored once, limits hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.protos.errors import DataError, JobError, JobExistsError, LedgerError, UnknownJobError
from tandem.services.reward.jobs.store import CANCELLED, ChunkResult, JobStore
from tests.support.job_calls import LEASE_SECONDS, claim, expire, finish, keys_of, new_store, submit
from tests.support.redis_ring import lose_every_answer
from tests.support.waiting import eventually


@pytest.fixture()
def store(redis_url: str) -> Iterator[JobStore]:
    made = new_store(redis_url)
    yield made
    made.close()


def test_a_job_is_submitted_scored_and_done(store: JobStore) -> None:
    job = submit(store, 3, 2, seal=True)
    assert (job.state, job.num_items, job.num_waiting, job.num_chunks, job.finished_at) == ("RUNNING", 5, 5, 2, 0.0)
    first, second = claim(store), claim(store)
    assert (first.index, first.first_item, first.items) == (0, 0, b"key 0")
    assert (second.index, second.first_item, second.items) == (1, 3, b"key 1")
    assert store.claim("one", LEASE_SECONDS, 0) is None
    assert store.complete(second, ChunkResult(b"second", 2, 0.25, {}))
    assert store.complete(first, ChunkResult(b"first", 1, 1.0, {"timeout": 1, "crashed": 1}))
    job, results = store.events(job.job_id, 0, 1 << 20)
    assert results == [b"second", b"first"], "in the order of completion"
    assert (job.state, job.num_scored, job.sum_values, job.num_waiting) == ("DONE", 3, 1.25, 0)
    assert job.num_unscored == {"timeout": 1, "crashed": 1}
    assert job.created_at <= job.finished_at < job.expires_at
    assert store.events(job.job_id, 1, 1 << 20)[1] == [b"first"] and store.events(job.job_id, 2, 1 << 20)[1] == []
    assert store.events(job.job_id, 0, 1)[1] == [b"second"], "one at least"
    assert store.events(job.job_id, 0, 0)[1] == []
    assert not any(name.startswith(("items:", "chunks:", "partials:")) for name in keys_of(store)), "payloads are gone"


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


@pytest.mark.parametrize("job_id", ["0" * 32, "", "x", "../../etc", "0" * 31 + "\n", "é" * 32])
def test_an_unknown_job_is_named(store: JobStore, job_id: str) -> None:
    for verb in (
        lambda: store.events(job_id, 0, 1),
        lambda: store.cancel(job_id),
        lambda: store.delete(job_id),
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


def test_a_holder_that_outlives_its_lease_is_not_counted_as_a_death(store: JobStore) -> None:
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


def test_a_chunk_given_back_waits_for_its_pause_and_keeps_its_partial_results(store: JobStore) -> None:
    submit(store, 2)
    assert store.give_back(claim(store), attempts=1, partial=b"half", pause_seconds=300.0)
    assert store.claim("one", LEASE_SECONDS, 0) is None and store.register("") == 1
    paused = claim(store)
    assert (paused.partial, paused.attempts, paused.losses) == (b"half", 1, 0)
    assert store.give_back(paused, attempts=2, partial=b"", pause_seconds=0.0)
    again = claim(store)
    assert (again.partial, again.attempts, again.losses) == (b"half", 2, 0)


def test_a_cancelled_job_ends_at_once_and_refuses_chunks_and_results(store: JobStore) -> None:
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


def test_a_result_with_a_wrong_number_of_items_is_a_ledger_error(store: JobStore) -> None:
    submit(store, 3)
    held = claim(store)
    with pytest.raises(LedgerError, match="has 3 items, not 2"):
        store.complete(held, ChunkResult(b"", 1, 0.0, {"timeout": 1}))
    assert finish(store, held, 3)


def test_higher_priority_comes_first_and_jobs_of_equal_priority_take_turns(store: JobStore) -> None:
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


def test_a_later_job_takes_turns_and_does_not_overtake(store: JobStore) -> None:
    submit(store, *[10] * 10, key="early")
    for _ in range(5):
        claim(store)
    submit(store, *[10] * 5, key="late")
    order = [claim(store).items.decode().split()[0] for _ in range(10)]
    assert all(abs(order[:n].count("early") - order[:n].count("late")) <= 1 for n in range(10)), order


def test_a_job_may_fill_half_of_the_room_and_a_job_alone_always_has_room(redis_url: str) -> None:
    store = new_store(redis_url)
    store.connection.run("configure", 10**9, 1 << 20, 1 << 30)
    quarter = b"x" * ((1 << 18) - 1024)
    first, second, third = (store.submit(key, rubric="", priority=0) for key in "abc")
    assert store.add_chunk(first.job_id, 0, 1, quarter)[0] and store.add_chunk(first.job_id, 1, 1, quarter)[0]
    assert not store.add_chunk(first.job_id, 2, 1, b"")[0], "half of the room is the job's"
    assert store.add_chunk(first.job_id, 1, 1, quarter)[0], "it is stored"
    assert store.add_chunk(second.job_id, 0, 1, quarter)[0] and store.add_chunk(second.job_id, 1, 1, quarter)[0]
    assert not store.add_chunk(third.job_id, 0, 1, b"")[0] and not store.has_room(third.job_id, 0)[0], (
        "there is no more"
    )
    held = [claim(store), claim(store)]  # the first chunk of each job, because jobs take turns
    assert finish(store, next(one for one in held if one.job_id == first.job_id), 1)
    assert store.has_room(third.job_id, 0)[0] and store.add_chunk(third.job_id, 0, 1, b"")[0]
    assert not store.has_room(first.job_id, len(quarter))[0] and store.has_room(first.job_id, 0)[0]
    store.cancel(first.job_id), store.cancel(third.job_id)
    assert store.has_room(first.job_id, 1 << 20)[0], "it takes none any more: asking again says so"
    assert not store.has_room(second.job_id, 0)[0]
    store.cancel(second.job_id)
    huge = store.submit("huge", rubric="", priority=0)
    assert store.add_chunk(huge.job_id, 0, 1, quarter * 5)[0]


def test_ended_and_abandoned_jobs_are_forgotten_after_retention_and_waiting_ones_are_not(redis_url: str) -> None:
    store = new_store(redis_url, retention_seconds=0.05)
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
    assert keys_of(store) <= {"meta", "signal:waiting"}


def test_namespaces_are_separate(redis_url: str) -> None:
    one, other = new_store(redis_url), new_store(redis_url)
    submit(one, 1)
    assert other.claim("one", LEASE_SECONDS, 0) is None and other.list_jobs(10) == []


def test_calls_repeated_after_a_lost_reply_change_nothing(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_every_answer(monkeypatch)
    job = submit(store, 2, 3, seal=True)
    assert (job.num_items, job.num_chunks) == (5, 2)
    first, second = claim(store), claim(store)
    assert store.give_back(first, attempts=1, partial=b"half", pause_seconds=0.0)
    assert finish(store, second, 3) and finish(store, claim(store), 2)
    job = store.cancel(job.job_id)
    assert (job.state, job.num_scored, job.sum_values, job.num_results) == ("DONE", 5, 2.5, 2)
    assert store.counts()["unscored_bytes"] == 0 and store.counts()["stale_results_refused"] == 0
