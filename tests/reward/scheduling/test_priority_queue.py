"""Priorities: the ring goes first, lower priorities get their share, and no slot or turn is lost."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.config import RewardConfig
from tandem.reward.registry import SCORERS
from tandem.reward.scheduling import interpreter_scheduler
from tandem.reward.scheduling.admission_queue import AdmissionQueue, PrioritySemaphore
from tandem.reward.scheduling.interpreter_scheduler import InterpreterScheduler
from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority, PriorityQueue
from tandem.reward.scoring import ScoringCore
from tests.support.misbehaving_server import Answer, Asked, MisbehavingServer, chat
from tests.support.virtual_time import in_virtual_time
from tests.support.waiting import eventually


@given(st.lists(st.one_of(st.sampled_from(PRIORITIES), st.none()), max_size=200))
def test_peek_and_pop_agree(steps: list[Priority | None]) -> None:
    """A number adds an entry of that priority, and None removes one."""
    priorities: PriorityQueue[int] = PriorityQueue()
    for number, priority in enumerate(steps):
        if priority is not None:
            priorities.add(priority, number)
            continue
        seen = priorities.peek()
        assert seen == priorities.peek() == priorities.pop()
        if seen is None:
            continue
        goes_on = priorities.try_continue(seen[0])
        assert goes_on or (found := priorities.peek()) is None or found[0] != seen[0], "it is another priority's turn"


@given(st.sets(st.sampled_from(PRIORITIES), min_size=1), st.integers(1, 100))
def test_try_continue_gives_the_same_turns_as_adding_again(waiting: set[Priority], number: int) -> None:
    again: PriorityQueue[Priority] = PriorityQueue()
    on: PriorityQueue[Priority] = PriorityQueue()
    for priority in waiting:
        again.add(priority, priority)
        on.add(priority, priority)
    first, working, served = again.pop(), on.pop(), []
    for _ in range(number):
        assert first is not None and working is not None
        again.add(*first)
        first = again.pop()
        if not on.try_continue(working[0]):
            on.push_front(*working)
            working = on.pop()
        served.append((first, working))
    assert all(one == other for one, other in served)


@in_virtual_time
async def test_cancelled_waiters_lose_no_semaphore_slot() -> None:
    """Waiters are cancelled, also by timeouts, and one is cancelled just as it is admitted."""
    slots = PrioritySemaphore(1)

    async def hold() -> None:
        await slots.acquire("calls")
        try:
            await asyncio.sleep(3600.0)
        finally:
            slots.release()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await slots.acquire("calls")
            await slots.acquire("calls")
    tasks = [asyncio.create_task(hold()) for _ in range(5)]
    await asyncio.sleep(1.0)
    slots.release()  # admits the first one …
    tasks[0].cancel()  # … before it is resumed
    tasks[3].cancel()
    for task, left in ((tasks[1], 2), (tasks[2], 1), (tasks[4], 0)):
        await asyncio.sleep(1.0)
        assert slots.waiting("calls") == left
        task.cancel()
    await asyncio.sleep(1.0)
    async with asyncio.timeout(1.0):
        await slots.acquire("jobs")


@in_virtual_time
async def test_a_large_request_is_not_starved_by_small_ones() -> None:
    """It waits for three units. One unit is freed per second, and the requests behind it need one each."""
    queue, free, order = AdmissionQueue(), 0, list[str]()

    async def one(name: str, priority: Priority, need: int) -> None:
        def take() -> float:
            nonlocal free
            if free < need:
                return float("inf")
            free -= need
            return 0.0

        await queue.admit(priority, take, lambda: None)
        order.append(name)

    tasks = [asyncio.create_task(one("much", "jobs", 3))]
    tasks += [asyncio.create_task(one("ring", "ring", 1)) for _ in range(6)]
    tasks += [asyncio.create_task(one("little", "jobs", 1))]
    for _ in range(10):
        await asyncio.sleep(1.0)
        free += 1
        queue.wake()
    await asyncio.gather(*tasks)
    assert order == [*["ring"] * 3, "much", *["ring"] * 3, "little"]


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_scheduler, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(interpreter_scheduler, "MAX_WAIT_SECONDS", 30.0)


@contextmanager
def threads(*work: Callable[[], object]) -> Iterator[None]:
    """Runs each function in its own thread and joins the threads at the end of the block."""
    running = [threading.Thread(target=one, daemon=True) for one in work]
    for thread in running:
        thread.start()
    yield
    for thread in running:
        thread.join(30.0)
        assert not thread.is_alive()


@contextmanager
def busy(scheduler: InterpreterScheduler) -> Iterator[threading.Event]:
    """An item of a job is under way until the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def long_one(number: int) -> bool:
        begun.set()
        return go_on.wait(30.0)

    with threads(lambda: scheduler.run_each("jobs", long_one, [1])):
        assert begun.wait(30.0)
        yield go_on


@pytest.mark.usefixtures("short_slices")
def test_one_thread_runs_at_a_time_and_the_ring_goes_first() -> None:
    scheduler, order, go_on = InterpreterScheduler(), list[Priority](), threading.Event()

    def one(priority: Priority) -> Priority:
        order.append(priority)
        assert go_on.wait(30.0)
        return priority

    with threads(lambda: scheduler.run_each("jobs", one, ["jobs"] * 10)):
        eventually(lambda: order == ["jobs"])
        with threads(
            lambda: scheduler.run_each("calls", one, ["calls"]), lambda: scheduler.run_each("ring", one, ["ring"] * 6)
        ):
            eventually(lambda: [scheduler._queue.waiting(priority) for priority in PRIORITIES] == [1, 1, 0])
            go_on.set()
    assert "".join(priority[0] for priority in order) == "jrrrcrrr" + "j" * 9
    assert scheduler.run_each("calls", one, ["calls"]) == ["calls"] and not any(
        map(scheduler._queue.waiting, PRIORITIES)
    )


@pytest.mark.usefixtures("short_slices")
def test_threads_of_one_priority_alternate_time_slices() -> None:
    scheduler, order, go_on = InterpreterScheduler(), list[str](), threading.Event()

    def one(name: str) -> bool:
        order.append(name)
        return go_on.wait(30.0)

    with threads(lambda: scheduler.run_each("calls", one, "aaaa")):
        eventually(lambda: order == ["a"])
        with threads(lambda: scheduler.run_each("calls", one, "bb")):
            eventually(lambda: scheduler._queue.waiting("calls") == 1)
            go_on.set()
    assert "".join(order) == "ababaa"


def test_a_thread_that_waited_too_long_runs_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter_scheduler, "MAX_WAIT_SECONDS", 0.01)
    scheduler, more = InterpreterScheduler(), list[int]()
    with busy(scheduler) as go_on:
        assert scheduler.run_each("ring", abs, [-1, -2]) == [1, 2] and not scheduler._queue.waiting("ring")
        monkeypatch.setattr(interpreter_scheduler, "MAX_WAIT_SECONDS", 30.0)
        with threads(lambda: more.extend(scheduler.run_each("ring", abs, [-3]))):
            eventually(lambda: scheduler._queue.waiting("ring") == 1)  # the other thread still has its turn
            go_on.set()
    assert more == [3]


def test_a_turn_granted_just_after_the_wait_ended_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert super().wait(30.0)
            return False  # the wait timed out, then the turn was granted

    monkeypatch.setattr(interpreter_scheduler, "threading", SimpleNamespace(Lock=threading.Lock, Event=Late))
    scheduler = InterpreterScheduler()
    with busy(scheduler) as go_on, threads(lambda: scheduler.run_each("ring", abs, [-1])):
        eventually(lambda: scheduler._queue.waiting("ring") == 1)
        go_on.set()
    assert not scheduler._busy


def test_an_exception_ends_the_time_slice() -> None:
    scheduler = InterpreterScheduler()
    with pytest.raises(ZeroDivisionError):
        scheduler.run_each("ring", lambda one: one / 0, [1])
    assert not scheduler._busy  # otherwise the next caller would wait for it and then run beside it
    assert scheduler.run_each("jobs", abs, []) == [] and scheduler.run_each("jobs", abs, [1]) == [1]


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("alone", [True, False])
def test_in_process_scorers_run_in_time_slices_by_priority(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    order, go_on = list[str](), threading.Event()
    exact = SCORERS["exact"].judge

    def judge(self: Any, item: ScoreItem) -> Score:
        order.append(item.solution)
        assert item.solution == "c" or go_on.wait(30.0)
        return exact(self, item)

    monkeypatch.setattr(SCORERS["exact"], "judge", judge)
    results: dict[str, list[Score]] = {}
    with closing(ScoringCore(RewardConfig())) as core:
        rubric = core.default if alone else core.compile("[[components]]\nscorer = 'exact'\n")

        def score(priority: Priority, number: int) -> None:
            results[priority] = core.score(rubric, [ScoreItem("", priority[0], "r")] * number, priority)

        with threads(lambda: score("jobs", 6)):
            eventually(lambda: order == ["j"])
            with threads(lambda: score("ring", 4)):
                eventually(lambda: core._scheduler._queue.waiting("ring") == 1)
                assert len(core.score(rubric, [ScoreItem("", "c", "r")], "calls", at_once=True)) == 1
                go_on.set()
    assert "".join(order) == "jcrrrjr" + "j" * 4
    assert [one.value for one in results["ring"] if isinstance(one, Scored)] == [1.0] * 4
    assert [one.value for one in results["jobs"] if isinstance(one, Scored)] == [0.0] * 6


# ---- judges ----


def declared(scorer: str, url: str) -> dict[str, Any]:
    remote = {"scorer": "remote", "arguments": {"url": url, "max_concurrent": 1}}
    judge = {"base_url": url, "model": "m", "template": "{answer}", "max_concurrent": 1}
    return {
        "remote": remote,
        "judge": {"scorer": "judge", "arguments": judge},
        "group_rank": {"scorer": "group_rank", "arguments": remote},
    }[scorer]


@pytest.mark.parametrize(
    ("scorer", "waiting"), [("remote", "remote_waiting"), ("judge", "judge_waiting"), ("group_rank", "remote_waiting")]
)
def test_the_ring_passes_a_job_at_a_judge_without_starving_it(scorer: str, waiting: str) -> None:
    """One request at a time. The ring's nine items arrive while the first of a job's six is scored."""
    order, go_on = list[str](), threading.Event()

    def answer(asked: Asked) -> Answer:
        name = asked.body["items"][0]["solution"] if "items" in asked.body else asked.body["messages"][0]["content"]
        order.append(name[0])
        assert go_on.wait(30.0)
        number = float(name[1:])
        return (
            Answer({"results": [{"score": number}]}) if "items" in asked.body else chat(json.dumps({"score": number}))
        )

    results: dict[Priority, list[Score]] = {}
    with MisbehavingServer(answer) as server:
        config = RewardConfig.model_validate({"scorers": {"far": declared(scorer, server.url)}})
        with closing(ScoringCore(config)) as core:
            rubric = core.compile("[[components]]\nscorer = 'far'\n")

            def score(priority: Priority, number: int) -> None:
                items = [
                    ScoreItem("", f"{priority[0]}{n}", None, {"prompt": "?"}, group=priority) for n in range(number)
                ]
                results[priority] = core.score(rubric, items, priority)

            with threads(lambda: score("jobs", 6)):
                eventually(lambda: order == ["j"] and core.figures()[f"{waiting}_jobs:far"] == 5.0)
                with threads(lambda: score("ring", 9)):
                    eventually(lambda: core.figures()[f"{waiting}_ring:far"] == 9.0)
                    go_on.set()
    assert "".join(order) == "j" + "rrrj" * 3 + "jj"
    for priority, number in (("ring", 9), ("jobs", 6)):
        values = [one.value for one in results[priority] if isinstance(one, Scored)]  # type: ignore[index]
        assert values == [n / (number - 1) if scorer == "group_rank" else n for n in range(number)]


# ---- metrics ----


def test_metrics_are_named_by_judge(tmp_path: Path) -> None:
    file = tmp_path / "rubric.toml"
    file.write_text(
        """
        [[components]]
        name = "style"
        scorer = "remote"
        arguments = { url = "http://127.0.0.1:1/style" }
        [[components]]
        scorer = "near"
        [[components]]
        name = "inner"
        scorer = "rubric"
        arguments = { name = "more" }
        [[components]]
        name = "facts"
        scorer = "remote"
        arguments = { url = "http://127.0.0.1:1/facts" }
        [[rubrics.more.components]]
        name = "style"
        scorer = "remote"
        arguments = { url = "http://127.0.0.1:1/more" }
        """
    )
    near = {"scorer": "remote", "arguments": {"url": "http://127.0.0.1:1/near"}}
    other = {"scorer": "remote", "arguments": {"url": "http://127.0.0.1:1/other"}}
    config = RewardConfig.model_validate({"rubric": str(file), "scorers": {"near": near, "facts": other}})
    with closing(ScoringCore(config)) as core:
        asked = {name for name in core.figures() if name.startswith("remote_requests")}
    names = {"style", "near", "inner/style", "facts", "facts-2"}
    assert asked == {f"remote_requests:{name}" for name in names}
    with closing(ScoringCore(RewardConfig.model_validate(near))) as core:
        assert core.figures()["remote_requests:remote"] == 0.0
