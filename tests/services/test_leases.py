"""The lease loop, with a scripted source and a scripted worker."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tandem.protos.errors import FencedError, NotAdmittedError, UnavailableError
from tandem.services.leases import SHUTDOWN, Held, LeaseLoop, LeaseWorker, Release
from tandem.services.process import run_in_thread

TIMEOUT = 20.0
LEASE_SECONDS = 0.15


@dataclass(frozen=True)
class Ticket:
    name: str
    token: int


@dataclass(frozen=True)
class Answer:
    text: str
    figures: Mapping[str, int] = field(default_factory=dict)


class Queue:
    """A source of tickets in memory; like the buffer, it refuses a token that is not the current one of its name."""

    def __init__(self, *names: str) -> None:
        self.waiting = list(names)
        self.current: dict[str, int] = {}
        self.completed: dict[str, str] = {}
        self.released: list[tuple[str, Release, bytes | None]] = []
        self.saved: dict[str, bytes] = {}
        self.num_renewals: Counter[str] = Counter()
        self.errors: dict[str, list[Exception]] = {"claim": [], "renew": [], "complete": [], "release": []}
        self.num_completed_together: list[int] = []
        self.may_complete = threading.Event()
        self.may_complete.set()
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()

    def claim(self, limit: int, timeout_seconds: float) -> Sequence[Ticket]:
        self._fail("claim")
        with self._lock:
            names, self.waiting = self.waiting[:limit], self.waiting[limit:]
            tickets = [Ticket(name, next(self._tokens)) for name in names]
            self.current.update({ticket.name: ticket.token for ticket in tickets})
        if not tickets:
            time.sleep(0.01)
        return tickets

    def renew(self, leases: Sequence[Ticket], partials: Mapping[int, bytes]) -> Collection[int]:
        self._fail("renew")
        self.num_renewals.update(lease.name for lease in leases)
        self.saved.update({lease.name: partials[lease.token] for lease in leases if lease.token in partials})
        return [lease.token for lease in leases if self.current.get(lease.name) != lease.token]

    def complete(self, finished: Sequence[tuple[Ticket, Answer]]) -> Collection[int]:
        self._fail("complete")
        self.num_completed_together.append(len(finished))
        self.may_complete.wait(TIMEOUT)
        refused = []
        for lease, result in finished:
            if self.current.pop(lease.name, None) == lease.token:
                self.completed[lease.name] = result.text
            else:
                refused.append(lease.token)
        return refused

    def release(self, lease: Ticket, release: Release, partial: bytes | None) -> str:
        self._fail("release")
        self.released.append((lease.name, release, partial))
        if self.current.get(lease.name) != lease.token:
            return "refused"
        del self.current[lease.name]
        return "requeued" if release.kind == "voluntary" else "dropped"

    def _fail(self, verb: str) -> None:
        if self.errors[verb]:
            raise self.errors[verb].pop(0)


class Worker(LeaseWorker[Ticket, Answer]):
    """Answers a ticket by its name once the test allows it."""

    def __init__(self, *, runs_in_threads: bool = False) -> None:
        self.runs_in_threads = runs_in_threads
        self.may_answer: Callable[[str], bool] = lambda name: True
        self.outcome: Callable[[Held[Ticket]], Answer | Release | None] = lambda held: Answer(held.lease.name.upper())
        self.going_on = True
        self.began: list[str] = []
        self.cancelled: list[str] = []
        self.interrupted = threading.Event()

    def check(self) -> bool:
        return self.going_on

    def interrupt(self) -> None:
        self.interrupted.set()

    async def work(self, held: Held[Ticket]) -> Answer | Release | None:
        self.began.append(held.lease.name)
        if self.runs_in_threads:
            return await run_in_thread(self._wait_in_thread, held)
        try:
            while not self.may_answer(held.lease.name):
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled.append(held.lease.name)
            raise
        return self.outcome(held)

    def _wait_in_thread(self, held: Held[Ticket]) -> Answer | Release | None:
        while not self.may_answer(held.lease.name):
            if held.cancelled.is_set():
                self.cancelled.append(held.lease.name)
                return SHUTDOWN if self.interrupted.is_set() else None
            time.sleep(0.005)
        return self.outcome(held)


Loop = LeaseLoop[Ticket, Answer]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.005)


def run(
    queue: Queue,
    worker: Worker,
    condition: Callable[[Loop], bool],
    then: Callable[[Loop], Awaitable[None]] | None = None,
    *,
    capacity: int = 4,
    tolerates_outages: bool = False,
) -> dict[str, float]:
    """Runs the loop until the condition holds (then `then`), stops it, and returns its figures."""

    async def main() -> dict[str, float]:
        limits = {"capacity": capacity, "lease_seconds": LEASE_SECONDS, "tolerates_outages": tolerates_outages}
        loop: Loop = LeaseLoop(queue, worker, unit="tickets", **limits)  # type: ignore[arg-type]
        stop = threading.Event()
        running = asyncio.create_task(loop.run(stop))
        await until(lambda: running.done() or condition(loop))
        if then is not None:
            await then(loop)
        stop.set()
        await asyncio.wait_for(running, TIMEOUT)
        return loop.figures()

    return asyncio.run(main())


@pytest.fixture(params=[False, True], ids=["tasks", "threads"])
def worker(request: pytest.FixtureRequest) -> Worker:
    return Worker(runs_in_threads=request.param)


def test_the_loop_works_on_no_more_leases_than_its_capacity_and_completes_each(worker: Worker) -> None:
    queue = Queue(*"abcdef")
    most: list[int] = []
    answered: list[str] = []

    def may_answer(name: str) -> bool:
        most.append(len(worker.began) - len(answered))
        return len(worker.began) >= 3

    def outcome(held: Held[Ticket]) -> Answer:
        answered.append(held.lease.name)
        return Answer(held.lease.name.upper())

    worker.may_answer, worker.outcome = may_answer, outcome
    figures = run(queue, worker, lambda loop: len(queue.completed) == 6, capacity=3)
    assert queue.completed == {name: name.upper() for name in "abcdef"} and max(most) == 3
    assert (figures["tickets_completed"], figures["tickets_held"], figures["tickets_refused"]) == (6, 0, 0)


def test_the_loop_goes_on_while_results_are_stored_but_holds_at_most_twice_its_capacity() -> None:
    queue, worker = Queue(*"abcdefgh"), Worker()
    queue.may_complete.clear()

    async def store(loop: Loop) -> None:
        await asyncio.sleep(0.05)
        assert (worker.began, loop.num_held) == (list("abcdef"), 6), "three are stored, and three wait for that"
        queue.may_complete.set()
        await until(lambda: len(queue.completed) == 8)

    run(queue, worker, lambda loop: len(worker.began) == 6, store, capacity=3)


def test_only_accepted_results_are_counted(worker: Worker) -> None:
    queue = Queue("a", "b")

    def outcome(held: Held[Ticket]) -> Answer:
        if held.lease.name == "b":
            queue.current["b"] = -1  # by now another worker holds it
        return Answer("done", {"rows": 3})

    worker.outcome = outcome
    figures = run(queue, worker, lambda loop: loop.figures()["tickets_refused"] == 1)
    assert (figures["tickets_completed"], figures["rows"]) == (1, 3) and queue.completed == {"a": "done"}


def test_results_that_come_while_others_are_completed_are_completed_together() -> None:
    queue, worker = Queue(*"abcd"), Worker()
    queue.may_complete.clear()
    worker.may_answer = lambda name: name == "a" or bool(queue.num_completed_together)
    answered: list[str] = []

    def outcome(held: Held[Ticket]) -> Answer:
        answered.append(held.lease.name)
        if len(answered) == 4:
            queue.may_complete.set()
        return Answer("done")

    worker.outcome = outcome
    figures = run(queue, worker, lambda loop: loop.figures()["tickets_completed"] == 4)
    assert queue.num_completed_together == [1, 3] and figures["tickets_refused"] == 0


def test_leases_are_renewed_with_unsaved_progress(worker: Worker) -> None:
    queue = Queue("a")
    worker.may_answer = lambda name: queue.num_renewals[name] >= 4
    saves: list[int] = []

    async def save(loop: Loop) -> None:
        (held,) = loop._held.values()
        for number in (1, 2):
            held.unsaved = lambda number=number: saves.append(number) or bytes([number])  # type: ignore[misc]
            await until(lambda number=number: queue.saved.get("a") == bytes([number]))  # type: ignore[misc]
        await until(lambda: bool(queue.completed))

    run(queue, worker, lambda loop: loop.num_held == 1, save)
    assert saves == [1, 2] and queue.completed == {"a": "A"}, "each is saved once"


def test_work_on_a_lost_lease_is_cancelled(worker: Worker) -> None:
    queue = Queue("a")
    worker.may_answer = lambda name: False

    async def lose(loop: Loop) -> None:
        loop.paused = True
        assert not await loop.drained(0.05)
        queue.current["a"] = -1
        assert await loop.drained(TIMEOUT)

    figures = run(queue, worker, lambda loop: bool(worker.began), lose)
    assert figures["tickets_lost"] == 1 and worker.cancelled == ["a"] and queue.released == []


def test_leases_are_kept_by_token_so_a_name_may_be_claimed_again(worker: Worker) -> None:
    queue = Queue("a")
    release, claimed_again = queue.release, threading.Event()

    def release_slowly(lease: Ticket, why: Release, partial: bytes | None) -> str:
        outcome = release(lease, why, partial)
        queue.waiting.append("a")
        assert claimed_again.wait(TIMEOUT)
        return outcome

    def outcome(held: Held[Ticket]) -> Answer | Release:
        if held.lease.token == 1:
            return Release("once more", "voluntary")
        claimed_again.set()
        return Answer("second")

    queue.release = release_slowly  # type: ignore[method-assign]
    worker.outcome = outcome
    figures = run(queue, worker, lambda loop: bool(queue.completed) and loop.num_held == 0)
    assert queue.completed == {"a": "second"} and figures["tickets_requeued"] == 1


def test_a_stop_releases_each_lease_with_unsaved_progress(worker: Worker) -> None:
    queue = Queue("a", "b")
    worker.may_answer = lambda name: False

    async def finish_half(loop: Loop) -> None:
        for held in loop._held.values():
            held.unsaved = lambda: b"half"

    run(queue, worker, lambda loop: len(worker.began) == 2, finish_half)
    halves = {name: queue.saved.get(name) or partial for name, _, partial in queue.released}
    assert halves == {"a": b"half", "b": b"half"} and queue.current == {}
    assert {release for _, release, _ in queue.released} == {SHUTDOWN} and worker.interrupted.is_set()


def test_a_failed_lease_is_released_with_its_reason(worker: Worker) -> None:
    queue = Queue("a", "b")
    failure = Release("broken", "data", "it is broken")
    worker.outcome = lambda held: failure if held.lease.name == "a" else Answer("fine")
    figures = run(queue, worker, lambda loop: len(queue.completed) + len(queue.released) == 2 and not loop.num_held)
    assert queue.released == [("a", failure, None)]
    assert (figures["tickets_dropped"], figures["tickets_completed"]) == (1, 1)


def test_a_pause_ends_with_the_stop_and_saves_before_it_begins() -> None:
    queue, worker = Queue("a"), Worker()
    waited: list[bool] = []

    async def main() -> None:
        loop: Loop = LeaseLoop(queue, worker, unit="tickets", capacity=1, lease_seconds=600.0)

        async def work(held: Held[Ticket]) -> Release:
            held.unsaved = lambda: b"attempt 1"
            waited.append(await loop.pause(held, 600.0))
            return SHUTDOWN

        worker.work = work  # type: ignore[assignment, method-assign]
        worker.runs_in_threads = True
        stop = threading.Event()
        running = asyncio.create_task(loop.run(stop))
        await until(lambda: bool(queue.saved))
        stop.set()
        await asyncio.wait_for(running, TIMEOUT)

    asyncio.run(main())
    assert queue.saved == {"a": b"attempt 1"} and waited == [False]


def test_a_paused_loop_gives_back_leases_of_a_pending_claim() -> None:
    queue, worker = Queue(), Worker()

    async def pause(loop: Loop) -> None:
        loop.paused = True
        assert await loop.drained(TIMEOUT)
        queue.waiting.append("a")
        await asyncio.sleep(0.05)
        assert queue.waiting == ["a"] and worker.began == []
        loop.paused = False
        await until(lambda: bool(queue.completed))

    run(queue, worker, lambda loop: True, pause)
    assert queue.completed == {"a": "A"}


def test_a_refused_claim_is_retried_and_its_reason_is_shown() -> None:
    queue, worker = Queue("a"), Worker()
    queue.errors["claim"] = [NotAdmittedError("not yet"), FencedError("replaced")]
    reasons: set[str] = set()
    run(queue, worker, lambda loop: reasons.add(loop.refusal) or bool(queue.completed))
    assert reasons == {"not yet", "replaced", ""}


def test_a_bug_ends_the_loop_and_the_other_leases_are_released(worker: Worker) -> None:
    queue = Queue("bug", "other")
    worker.may_answer = lambda name: name == "bug" and len(worker.began) == 2

    def outcome(held: Held[Ticket]) -> Answer:
        raise ZeroDivisionError

    worker.outcome = outcome
    with pytest.raises(ZeroDivisionError):
        run(queue, worker, lambda loop: False)
    assert [name for name, *_ in queue.released] == ["other"] and set(queue.current) == {"bug"}


@pytest.mark.parametrize("verb", ["claim", "renew", "complete"])
def test_an_outage_ends_the_loop_with_its_error(verb: str) -> None:
    queue, worker = Queue("a"), Worker()
    queue.errors[verb] = [UnavailableError("Redis is gone")]
    worker.may_answer = lambda name: verb != "renew"
    with pytest.raises(UnavailableError, match="Redis is gone"):
        run(queue, worker, lambda loop: False)


def test_a_tolerated_outage_is_waited_out_and_the_lease_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.leases.OUTAGE_PAUSE_SECONDS", 0.01)
    queue, worker = Queue("a", "b"), Worker()
    queue.errors = {verb: [UnavailableError("Redis is away")] for verb in queue.errors}
    figures = run(queue, worker, lambda _: len(queue.completed) + len(queue.released) == 2, tolerates_outages=True)
    assert {release.reason for _, release, _ in queue.released} == {"outage"}
    assert figures["outages"] >= 3, "of the claim, the completion and the release"


def test_a_finished_worker_ends_the_loop() -> None:
    (worker := Worker()).going_on = False
    run(Queue("a"), worker, lambda loop: False)
    assert worker.began == []


def test_a_call_in_a_thread_returns_its_result_or_its_error() -> None:
    def fail() -> None:
        raise KeyError("x")

    assert asyncio.run(run_in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(KeyError):
        asyncio.run(run_in_thread(fail))
