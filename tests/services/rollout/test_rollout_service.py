"""The rollout service's claim loop: a scripted engine and a real Redis."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.errors import DataError, UnavailableError, WeightTransferError
from tandem.protos.types import (
    FinishReason,
    Prompt,
    SamplingParameters,
    Segment,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from tandem.rollout.config import RolloutConfig
from tandem.rollout.sampler import SamplerFigures
from tandem.services.buffer.buffer import Buffer
from tandem.services.rollout.service import SamplingWorker
from tandem.services.service_info import Heartbeat, ServiceInfo
from tests.support.redis_ring import SAMPLER, new_run

TIMEOUT = 20.0
CONFIG = RolloutConfig(
    max_groups_in_flight=4, samples_per_prompt=3, lease_seconds=3.0
)  # long enough to renew in time on a busy machine


@pytest.fixture
def buffer(redis_url: str) -> Iterator[Buffer]:
    buffer = new_run(redis_url, groups_per_batch=8, infrastructure=1, data=0)
    yield buffer
    assert buffer.verify() == []
    buffer.close()


def prompt(index: int, num_samples: int = 3, max_tokens: int = 8) -> Prompt:
    return Prompt(0, index, np.arange(5, 10, dtype=np.int32), num_samples, SamplingParameters(max_tokens=max_tokens))


def offer(buffer: Buffer, *prompts: Prompt) -> None:
    groups = [(one.group_id, encode_group(TrajectoryGroup(one))) for one in prompts]
    assert buffer.admit(groups, prompts[-1].index + 1) == len(groups)


class ToldEngine:
    """Answers with the trajectory's number as its only token once the test allows it, or never."""

    def __init__(self) -> None:
        self.is_dead = self.hangs = False
        self.policy_version = 0
        self.asked: list[tuple[str, int]] = []
        self.sampled_with: dict[tuple[str, int], SamplingParameters] = {}
        self.cancelled: list[tuple[str, int]] = []
        self.continued: dict[tuple[str, int], Trajectory] = {}
        self.num_sampled: Callable[[int], int] = lambda collected: 0
        """Tokens of each unfinished answer, by how often the engine was asked for them."""
        self.collected = 0
        self.collect_seconds = 0.0
        self.collect_error: Exception | None = None
        self.may_answer: Callable[[str, int], bool] = lambda key, number: True
        self.errors: dict[tuple[str, int], Exception] = {}
        self.aborted: set[int] = set()

    async def check(self) -> None:
        if self.hangs:
            raise UnavailableError("the engine did not answer")

    def figures(self) -> SamplerFigures:
        return SamplerFigures(sampled_tokens=len(self.asked), busy_seconds=0.0)

    async def sample_one(
        self,
        prompt_ids: Any,
        sampling: SamplingParameters,
        *,
        trajectory_id: int,
        key: str = "",
        unfinished: Trajectory | None = None,
    ) -> Trajectory:
        self.asked.append((key, trajectory_id))
        self.sampled_with[key, trajectory_id] = sampling
        if unfinished is not None:
            self.continued[key, trajectory_id] = unfinished
        try:
            if (key, trajectory_id) in self.errors:
                raise self.errors[key, trajectory_id]
            while not self.may_answer(key, trajectory_id):
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled.append((key, trajectory_id))
            raise
        finish: FinishReason = "abort" if trajectory_id in self.aborted else "stop"
        return answer(prompt_ids, trajectory_id, sampling, finish)

    async def unfinished(self, keys: Collection[str]) -> dict[tuple[str, int], Trajectory]:
        self.collected += 1
        await asyncio.sleep(self.collect_seconds)
        if self.collect_error is not None:
            raise self.collect_error
        prompt_ids, sampling = prompt(0).token_ids, prompt(0).sampling
        tokens = self.num_sampled(self.collected)
        return {
            (key, number): answer(prompt_ids, number, sampling, "abort", tokens)
            for key, number in self.asked
            if key in keys and tokens and not self.may_answer(key, number)
        }


def answer(
    prompt_ids: Any, trajectory_id: int, sampling: SamplingParameters, finish: FinishReason, num_tokens: int = 1
) -> Trajectory:
    ids = np.append(prompt_ids, np.full(num_tokens, trajectory_id, np.int32))
    mask = np.array([0] * len(prompt_ids) + [1] * num_tokens, np.uint8)
    segment = Segment(ids, -mask.astype(np.float32), mask, (VersionSpan(len(prompt_ids), 1, 0),))
    return Trajectory(trajectory_id, "policy", (segment,), finish, str(trajectory_id), sampling)


def rows_of(payload: bytes | None) -> list[int]:
    assert payload is not None
    return [row.trajectory_id for row in decode_group(payload).rows if isinstance(row, Trajectory)]


def only_row(payload: bytes) -> Trajectory:
    (row,) = decode_group(payload).rows
    assert isinstance(row, Trajectory)
    return row


def run_worker(
    buffer: Buffer,
    engine: ToldEngine,
    until: Callable[[], bool],
    act: Callable[[SamplingWorker], Awaitable[None]] | None = None,
    *,
    with_baselines: bool = False,
    config: RolloutConfig = CONFIG,
) -> SamplingWorker:
    """Runs a stage until the condition holds (then calls `act`), stops it, and raises its error."""

    async def main() -> SamplingWorker:
        stop = threading.Event()
        info = ServiceInfo(SAMPLER, lambda: worker.figures(), lambda: worker.activity(), buffer)
        heartbeat = Heartbeat(info, stop)
        worker = SamplingWorker(buffer, engine, config, SAMPLER, with_baselines=with_baselines, report=heartbeat.send)
        running = asyncio.create_task(worker.run(stop))
        deadline = time.monotonic() + TIMEOUT
        while not running.done() and not await asyncio.to_thread(until):
            assert time.monotonic() < deadline, f"{worker.activity()}; {buffer.counts()}"
            await asyncio.sleep(0.02)
        if act is not None:
            await act(worker)
        stop.set()
        await asyncio.wait_for(running, TIMEOUT)
        return worker

    return asyncio.run(main())


def test_groups_are_sampled_whole_many_at_once_and_completed(buffer: Buffer) -> None:
    offer(buffer, *(prompt(index) for index in range(6)))
    engine = ToldEngine()
    seen: list[int] = []

    def may_answer(key: str, number: int) -> bool:
        if len(seen) < 30:
            seen.append(buffer.counts()["prompts_leased"])
        return len(seen) == 30

    engine.may_answer = may_answer
    worker = run_worker(buffer, engine, lambda: buffer.counts()["generated_waiting"] == 6)
    assert max(seen) == CONFIG.max_groups_in_flight
    assert sorted(engine.asked) == [(f"0-{index}", number) for index in range(6) for number in range(3)]
    for claim in buffer.claim("generated", "reward", 6, 10.0, 0):
        group = decode_group(claim.payload)
        assert [row.trajectory_id for row in group.rows if isinstance(row, Trajectory)] == [0, 1, 2]
        assert np.array_equal(group.prompt.token_ids, prompt(0).token_ids)
    assert worker.figures()["groups_completed"] == 6 and buffer.figures()[SAMPLER]["sampled_tokens"] == 18


def test_leases_are_renewed_and_a_stop_gives_back_what_is_finished(buffer: Buffer) -> None:
    offer(buffer, prompt(0), prompt(1))
    engine = ToldEngine()
    engine.may_answer = lambda key, number: (key, number) in {("0-0", 1), ("0-1", 0), ("0-1", 2)}
    engine.num_sampled = lambda collected: 2
    started = time.monotonic()
    run_worker(buffer, engine, lambda: time.monotonic() - started > 1.3 * CONFIG.lease_seconds)
    counts = buffer.counts()
    assert (counts["prompts_waiting"], counts["leases_expired"]) == (2, 0), "longer than a lease, and still ours"
    assert sorted(engine.cancelled) == [("0-0", 0), ("0-0", 2), ("0-1", 1)]

    successor = ToldEngine()
    anew = CONFIG.model_copy(update={"partial_rollout": False})
    run_worker(buffer, successor, lambda: buffer.counts()["generated_waiting"] == 2, config=anew)
    assert sorted(successor.asked) == [("0-0", 0), ("0-0", 2), ("0-1", 1)], "only what was missing"
    assert successor.continued == {}
    assert [rows_of(claim.payload) for claim in buffer.claim("generated", "reward", 2, 10.0, 0)] == [[0, 1, 2]] * 2


def sampled(buffer: Buffer, number: int = 1) -> list[list[tuple[int, str, float]]]:
    """(trajectory id, role, temperature) of every row of the next sampled groups."""
    groups = [decode_group(claim.payload) for claim in buffer.claim("generated", "reward", number, 10.0, 0)]
    rows = [[row for row in group.rows if isinstance(row, Trajectory)] for group in groups]
    return [[(row.trajectory_id, row.role, row.sampling.temperature) for row in each] for each in rows]


def test_one_greedy_answer_is_added_where_the_estimator_needs_it(buffer: Buffer) -> None:
    offer(buffer, prompt(0), prompt(1, num_samples=1))
    engine = ToldEngine()
    run_worker(buffer, engine, lambda: buffer.counts()["generated_waiting"] == 2, with_baselines=True)
    policy = [(0, "policy", 1.0), (1, "policy", 1.0), (2, "policy", 1.0)]
    assert sorted(sampled(buffer, 2)) == [[(0, "policy", 1.0), (1, "baseline", 0.0)], [*policy, (3, "baseline", 0.0)]]
    assert engine.sampled_with["0-0", 3] == replace(prompt(0).sampling, temperature=0.0), "nothing else is different"
    assert engine.sampled_with["0-0", 2] == prompt(0).sampling


@pytest.mark.parametrize("finished", [{3}, {0, 2}], ids=["the baseline was finished", "it was not"])
def test_a_greedy_answer_is_saved_and_resumed_like_the_others(buffer: Buffer, finished: set[int]) -> None:
    offer(buffer, prompt(0))
    engine = ToldEngine()
    engine.may_answer = lambda key, number: number in finished
    engine.num_sampled = lambda collected: 2
    run_worker(buffer, engine, lambda: len(engine.asked) == 4, with_baselines=True)
    successor = ToldEngine()
    run_worker(buffer, successor, lambda: buffer.counts()["generated_waiting"] == 1, with_baselines=True)
    assert {number for _, number in successor.asked} == {0, 1, 2, 3} - finished
    continued = {number: row.role for (_, number), row in successor.continued.items()}
    assert continued == {number: "baseline" if number == 3 else "policy" for _, number in successor.asked}
    (rows,) = sampled(buffer)
    assert [role for _, role, _ in rows] == ["policy"] * 3 + ["baseline"]


def test_the_answers_of_a_holder_that_dies_are_continued_from_the_tokens_that_it_saved(buffer: Buffer) -> None:
    offer(buffer, prompt(0))
    engine = ToldEngine()
    engine.may_answer = lambda key, number: number == 1
    engine.num_sampled = lambda collected: 2

    async def die() -> None:
        worker = SamplingWorker(buffer, engine, CONFIG, SAMPLER)
        worker.loop._shut_down = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        task = asyncio.create_task(worker.run(threading.Event()))
        deadline = time.monotonic() + 20.0
        while not buffer.connection.redis.exists(buffer.connection.key("partial:0-0")):
            assert time.monotonic() < deadline, "a renewal saves the answers"
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(die())
    successor = ToldEngine()
    run_worker(buffer, successor, lambda: buffer.counts()["generated_waiting"] == 1)
    assert sorted(successor.asked) == [("0-0", 0), ("0-0", 2)] and buffer.counts()["leases_expired"] == 1
    saved = {number: row.segments[0].ids.tolist() for (_, number), row in successor.continued.items()}
    assert saved == {0: [5, 6, 7, 8, 9, 0, 0], 2: [5, 6, 7, 8, 9, 2, 2]}


def test_an_unfinished_answer_is_saved_again_once_it_has_grown_and_when_the_sampler_stops(buffer: Buffer) -> None:
    offer(buffer, prompt(0, num_samples=1))
    engine = ToldEngine()
    engine.may_answer = lambda key, number: False
    engine.num_sampled = lambda collected: 1000 + 50 * collected  # 1050, 1100, 1150, 1200: the last is an eighth more
    seen: set[int] = set()

    def saved_often_enough() -> bool:
        payload = buffer.connection.redis.get(buffer.connection.key("partial:0-0"))
        if payload is not None:
            seen.add(len(only_row(payload).segments[0].ids) - 5)
        return engine.collected >= 4

    short = CONFIG.model_copy(update={"lease_seconds": 0.9})
    run_worker(buffer, engine, saved_often_enough, config=short)
    assert 1050 in seen and seen <= {1050, 1200}
    (claim,) = buffer.claim("prompts", SAMPLER, 1, 10.0, 0)
    assert claim.partial is not None
    row = only_row(claim.partial)
    assert len(row.segments[0].ids) - 5 == 1000 + 50 * engine.collected and row.finish_reason == "abort"


@pytest.mark.parametrize("fails", [False, True], ids=["busy", "failing"])
def test_an_engine_that_tells_no_unfinished_answers_does_not_keep_a_stop_waiting(buffer: Buffer, fails: bool) -> None:
    offer(buffer, prompt(0))
    engine = ToldEngine()
    engine.may_answer = lambda key, number: number == 1
    if fails:
        engine.collect_error = WeightTransferError("send_collected_outputs failed inside the engine")
    else:
        engine.collect_seconds = 2 * TIMEOUT
    short = CONFIG.model_copy(update={"lease_seconds": 4.0})  # longer than a stop waits for the engine
    run_worker(buffer, engine, lambda: len(engine.asked) == 3, config=short)
    (claim,) = buffer.claim("prompts", SAMPLER, 1, 10.0, 0)
    assert rows_of(claim.partial) == [1], "what had finished is saved"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(DataError("too long"), "dropped:unsampleable"), (UnavailableError("engine"), "dropped:sampling_failed")],
)
def test_a_group_that_fails_is_released_and_the_others_go_on(buffer: Buffer, error: Exception, outcome: str) -> None:
    offer(buffer, prompt(0), prompt(1))
    engine = ToldEngine()
    engine.errors["0-0", 1] = error
    wanted = {outcome: 1, "generated_waiting": 1}
    run_worker(buffer, engine, lambda: wanted.items() <= buffer.counts().items())
    assert buffer.counts()["outstanding"] == 1 and buffer.verify() == []


@pytest.mark.parametrize("aborted", [{0, 1, 2}, {3}], ids=["answers", "the greedy answer"])
def test_rows_aborted_by_the_engine_are_never_passed_on(buffer: Buffer, aborted: set[int]) -> None:
    offer(buffer, prompt(0))
    engine = ToldEngine()
    engine.aborted = aborted
    run_worker(buffer, engine, lambda: buffer.counts().get("dropped:sampling_failed", 0) == 1, with_baselines=True)
    assert buffer.counts()["generated_waiting"] == 0


def test_a_bug_or_a_dead_engine_ends_the_service(buffer: Buffer) -> None:
    offer(buffer, prompt(0))
    buggy, dead, hanging = ToldEngine(), ToldEngine(), ToldEngine()
    buggy.errors["0-0", 0] = ZeroDivisionError("a bug")
    dead.is_dead = hanging.hangs = True
    for engine, error in [(buggy, "a bug"), (dead, "process is gone"), (hanging, "did not answer")]:
        with pytest.raises((ZeroDivisionError, UnavailableError), match=error):
            run_worker(buffer, engine, lambda: False)


def test_a_sampler_without_the_published_version_waits_and_reports_it(buffer: Buffer) -> None:
    offer(buffer, prompt(0))
    buffer.publish(1, 1, [])
    engine = ToldEngine()
    said: list[str] = []

    async def look(worker: SamplingWorker) -> None:
        said.append(worker.activity())
        buffer.publish(1, 2, [SAMPLER])
        while buffer.counts()["generated_waiting"] == 0:
            await asyncio.sleep(0.02)

    started = time.monotonic()
    run_worker(buffer, engine, lambda: time.monotonic() - started > 0.5, look)
    assert "published is 1" in said[0] and len(engine.asked) == 3
