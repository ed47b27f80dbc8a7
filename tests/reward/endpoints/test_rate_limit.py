"""The rate limiter and the spend meter on a virtual clock: limits are never exceeded, and every request is admitted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.reward.endpoints.limits import RateLimit, RateLimiter, SpendMeter, Taken
from tandem.reward.scheduling.priority_queue import Priority
from tests.support.virtual_time import in_virtual_time


def worst_minute(taken: list[Taken]) -> int:
    """The largest amount admitted in any half-open minute. The maximum is at a minute that begins at an admission."""
    return max(
        sum(one.amount for one in taken if first.at <= one.at and not first.at + 60.0 <= one.at) for first in taken
    )


@given(
    most=st.integers(1, 50),
    longest_idle=st.sampled_from([0.25, 4.0, 30.0, 18_000.0]),
    steps=st.lists(st.tuples(st.integers(1, 50), st.floats(0.0, 1.0), st.integers(0, 100)), max_size=60),
)
@settings(max_examples=150)
def test_no_minute_holds_more_than_the_rate_and_all_are_admitted(
    most: int, longest_idle: float, steps: list[tuple[int, float, int]]
) -> None:
    limit, now, taken = RateLimit(most), 0.0, []
    for amount, idle, used_percent in steps:
        now += idle * longest_idle
        amount = min(amount, most)
        asked_at = now
        for tries in itertools.count():
            delay = limit.delay(amount, now)
            assert delay >= 0.0 and tries < 10, "the delay it names must suffice, up to rounding"
            if delay == 0.0:
                break
            now += delay
        assert now - asked_at <= 60.0 * (1 + 1e-9), "after a minute, all of it is free"
        taken.append(limit.take(amount, now))
        limit.settle(taken[-1], amount * used_percent // 100)  # the actual amount does not exceed the estimate
    if taken:
        assert worst_minute(taken) <= most


@given(most=st.integers(1, 40), windows=st.integers(1, 4))
def test_the_full_rate_can_be_used(most: int, windows: int) -> None:
    limit, now = RateLimit(most), 0.0
    for _ in range(most * windows):
        while delay := limit.delay(1, now):
            now += delay
        limit.take(1, now)
    assert now < 60.0 * windows


def test_a_low_estimate_delays_later_requests() -> None:
    limit = RateLimit(100)
    limit.settle(limit.take(10, 0.0), 90)
    assert limit.delay(20, 0.0) == 60.0  # 90 + 20 do not fit into one window
    assert limit.delay(5, 0.0) == pytest.approx(54.0)  # they would fit, but the rate is 1 per 0.6 s
    late = limit.take(1, 60.0)
    limit.delay(1, 500.0)
    limit.settle(late, 1000)  # the window of `late` has passed, so it delays nobody
    assert limit.delay(100, 500.0) == 0.0


@given(amounts=st.lists(st.integers(1, 10), min_size=1, max_size=40), most=st.integers(10, 30))
@in_virtual_time
async def test_waiters_are_admitted_in_order_of_arrival(amounts: list[int], most: int) -> None:
    admitted: list[int] = []
    taken: list[Taken] = []
    limiter = RateLimiter([RateLimit(most), RateLimit(len(amounts))])

    async def one(number: int) -> None:
        by_tokens, _ = await limiter.take([amounts[number], 1])
        admitted.append(number)
        taken.append(by_tokens)

    await asyncio.gather(*map(one, range(len(amounts))))
    assert admitted == list(range(len(amounts)))
    assert worst_minute(taken) <= most


@in_virtual_time
async def test_a_corrected_estimate_admits_a_waiter_at_once() -> None:
    limiter, clock = RateLimiter([RateLimit(100)]), asyncio.get_running_loop().time
    first = await limiter.take([100])
    began = clock()
    second = asyncio.create_task(limiter.take([50]))
    await asyncio.sleep(1.0)
    limiter.settle(first, [10])
    await second
    assert clock() - began == pytest.approx(6.0)  # 10 units at 0.6 s each, not the 60 s of 100


async def used_up() -> tuple[RateLimiter, list[str], Callable[..., asyncio.Task[None]]]:
    """A limiter without room for a minute, who was admitted in order, and what begins to take 1 by name."""
    limiter, order = RateLimiter([RateLimit(60), RateLimit(1000)]), list[str]()

    async def take(name: str, priority: Priority, again: bool) -> None:
        await limiter.take([1, 1], priority, again=again)
        order.append(name)

    await limiter.take([60, 1])
    return limiter, order, lambda name, priority, again=False: asyncio.create_task(take(name, priority, again))


@in_virtual_time
async def test_the_ring_passes_earlier_jobs_at_the_rate_limit_and_jobs_get_their_share() -> None:
    limiter, order, take = await used_up()
    jobs = [take("job", "jobs") for _ in range(6)]
    await asyncio.sleep(1.0)
    assert (limiter.waiting("jobs"), limiter.waiting("ring")) == (6, 0)
    await asyncio.gather(*jobs, *(take("ring", "ring") for _ in range(9)))
    assert "".join(name[0] for name in order) == "rrrjrrrjrrrjjjj"


@in_virtual_time
async def test_further_attempts_go_before_first_ones_of_their_priority_in_order() -> None:
    _, order, take = await used_up()
    tasks = [take("job", "jobs"), *(take(name, "jobs", True) for name in ("again", "gone", "again, too"))]
    tasks.append(take("call", "calls"))
    await asyncio.sleep(1.0)
    tasks[2].cancel()
    await asyncio.gather(*tasks, take("late", "jobs", True), return_exceptions=True)
    assert order == ["call", "again", "again, too", "late", "job"]


@in_virtual_time
async def test_an_admitted_further_attempt_no_longer_counts_as_waiting() -> None:
    _, order, take = await used_up()
    first, *waiting = take("again", "calls", True), take("first", "calls"), take("second", "calls")
    await first
    await asyncio.gather(take("again, later", "calls", True), *waiting)
    assert order == ["again", "again, later", "first", "second"]


@in_virtual_time
async def test_a_waiter_cancelled_just_as_it_was_admitted_gives_back_what_it_took() -> None:
    limiter, meter, clock = RateLimiter([RateLimit(60)]), SpendMeter(1.0), asyncio.get_running_loop().time
    first = await limiter.take([60])
    assert await meter.reserve(0.9)
    gone = [asyncio.create_task(limiter.take([50])), asyncio.create_task(meter.reserve(0.9))]
    await asyncio.sleep(1.0)
    limiter.settle(first, [0])  # admits the first task …
    meter.charge(0.9, 0.0)  # … and the second …
    for task in gone:
        task.cancel()  # … before either is resumed
    await asyncio.wait(gone)
    began = clock()
    await limiter.take([60])
    assert clock() - began == pytest.approx(0.0) and meter._reserved == 0.0


@in_virtual_time
async def test_repeated_wake_calls_leave_one_timer() -> None:
    limiter, loop = RateLimiter([RateLimit(10)]), asyncio.get_running_loop()
    taken = await limiter.take([10])
    waiting = asyncio.create_task(limiter.take([10]))
    await asyncio.sleep(1.0)
    for _ in range(50):
        limiter.settle(taken, [10])
    timers = [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
    await waiting
    assert len(timers) == 1


@in_virtual_time
async def test_a_cancelled_waiter_delays_nobody() -> None:
    limiter, clock = RateLimiter([RateLimit(10)]), asyncio.get_running_loop().time
    began = clock()
    await limiter.take([5])
    impatient = asyncio.create_task(limiter.take([10]))
    patient = asyncio.create_task(limiter.take([1]))
    await asyncio.sleep(1.0)
    impatient.cancel()
    await patient
    assert clock() - began == pytest.approx(30.0)  # five units at 6 s each, not 60 s for the one that left


@given(
    cap=st.floats(0.01, 5.0),
    requests=st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 3.0)), max_size=40),
)
@settings(max_examples=100)
@in_virtual_time
async def test_spending_never_exceeds_the_cap_and_every_request_is_answered(
    cap: float, requests: list[tuple[float, float, float]]
) -> None:
    meter = SpendMeter(cap)
    answers: list[bool] = []

    async def one(highest: float, share: float, seconds: float) -> None:
        granted = await meter.reserve(highest)
        answers.append(granted)
        if granted:
            await asyncio.sleep(seconds)
            meter.charge(highest, highest * share)
        assert meter.spent <= cap + 1e-9

    await asyncio.gather(*(one(*request) for request in requests))
    assert len(answers) == len(requests) and meter._reserved == 0.0
    if sum(highest for highest, _, _ in requests) < cap - 1e-6:
        assert all(answers), "nothing is refused that fits"


@in_virtual_time
async def test_a_request_waits_while_running_ones_may_cost_less_than_reserved() -> None:
    meter = SpendMeter(1.0)
    assert await meter.reserve(0.8) and not await meter.reserve(1.1)
    waiting = asyncio.create_task(meter.reserve(0.8))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    meter.charge(0.8, 0.1)
    assert await waiting
    meter.charge(0.8, 0.8)
    assert not await meter.reserve(0.2) and await meter.reserve(0.05)


@in_virtual_time
async def test_the_ring_gets_the_last_money_under_the_cap() -> None:
    meter = SpendMeter(1.0)
    assert await meter.reserve(0.9)
    job = asyncio.create_task(meter.reserve(0.6, "jobs"))
    await asyncio.sleep(1.0)
    ring = asyncio.create_task(meter.reserve(0.6, "ring"))
    gone = asyncio.create_task(meter.reserve(0.6, "ring"))
    await asyncio.sleep(1.0)
    gone.cancel()
    meter.charge(0.9, 0.1)
    assert await ring
    meter.charge(0.6, 0.6)
    assert not await job


@in_virtual_time
async def test_without_a_cap_spending_is_only_counted() -> None:
    meter = SpendMeter(0.0)
    assert [await meter.reserve(1e6) for _ in range(3)] == [True] * 3
    meter.charge(1e6, 7.5)
    assert meter.spent == 7.5
