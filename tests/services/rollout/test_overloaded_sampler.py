"""A sampler with more episodes at once than it has places for gives some to one that waits: scripted episodes and a
real Redis.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest

from tandem.protos.codec import encode_group
from tandem.protos.types import Prompt, SamplingParameters, Segment, Trajectory, TrajectoryGroup, VersionSpan
from tandem.rollout.config import RolloutConfig
from tandem.rollout.environments.episode import EpisodeFigures
from tandem.services import leases
from tandem.services.buffer.buffer import Buffer
from tandem.services.rollout import service
from tandem.services.rollout.service import SamplingWorker
from tests.services.rollout.test_saved_episodes import IdleEngine
from tests.support.redis_ring import SAMPLER, new_run

TIMEOUT = 20.0
OTHER = "rollout-1"
CONFIG = RolloutConfig(samples_per_prompt=1, lease_seconds=3000.0, max_groups_in_flight=1)
PROMPTS = [Prompt(0, index, np.arange(5, 8, dtype=np.int32), 1, SamplingParameters(max_tokens=99)) for index in (0, 1)]
LENGTHS = {"0-0": 7, "0-1": 3}
"""Tokens that are sampled of each group."""


class Episodes:
    """Never end. The test says how many wait for their environment."""

    can_move = True

    def __init__(self, num_waiting: int = 0) -> None:
        self.figures = EpisodeFigures()
        self.num_waiting = num_waiting
        self.continued: dict[str, Trajectory | None] = {}
        self.changed: list[Callable[[], None]] = []

    async def sample(
        self, prompt: Prompt, *_: Any, unfinished: Trajectory | None, on_change: Callable[[], None], save: Any
    ) -> Trajectory:
        self.continued[prompt.group_id] = unfinished
        self.changed.append(on_change)
        on_change()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    async def unfinished(self, group_ids: Collection[str]) -> dict[tuple[str, int], Trajectory]:
        return {(name, 0): sampled(LENGTHS[name]) for name in group_ids}


def sampled(length: int) -> Trajectory:
    mask = np.array([0] * 3 + [1] * length, np.uint8)
    segment = Segment(np.arange(len(mask), dtype=np.int32), -mask.astype(np.float32), mask, (VersionSpan(3, 1, 0),))
    return Trajectory(0, "policy", (segment,), "abort", "", PROMPTS[0].sampling, metadata={"episode": "its state"})


@pytest.fixture
def buffer(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Buffer]:
    monkeypatch.setattr(leases, "_EARLY_SAVE_PAUSES", 1.0)
    monkeypatch.setattr(service, "_IDLE_SECONDS", 0.0)
    buffer = new_run(redis_url, groups_per_batch=8)
    groups = [(prompt.group_id, encode_group(TrajectoryGroup(prompt))) for prompt in PROMPTS]
    assert buffer.admit(groups, len(groups)) == len(groups)
    yield buffer
    assert buffer.verify() == []
    buffer.close()


def play(buffer: Buffer, mine: Episodes, theirs: Episodes, *, is_over: Callable[[], bool], rounds: int = 0) -> None:
    """A sampler holds both groups, one of which waits for its environment. Then both work. Another sampler reports that
    it waits, and claims what the first gives back. Ends when it is over, or after so many saves.
    """

    async def main() -> None:
        stop = threading.Event()
        first, second = (
            SamplingWorker(buffer, IdleEngine(), CONFIG, name, episodes=episodes)  # type: ignore[arg-type]
            for name, episodes in ((SAMPLER, mine), (OTHER, theirs))
        )
        running = [asyncio.create_task(first.run(stop))]
        try:
            async with asyncio.timeout(TIMEOUT):
                while len(mine.continued) < len(PROMPTS):
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(join, buffer)
                running.append(asyncio.create_task(second.run(stop)))
                while not second.figures()["groups_free"]:
                    await asyncio.sleep(0.01)
                mine.num_waiting = 0
                for number in range(10_000):
                    await asyncio.to_thread(buffer.heartbeat, OTHER, second.figures())
                    mine.changed[0]()
                    await asyncio.sleep(0.02)
                    if is_over() or number + 1 == rounds:
                        break
        finally:
            stop.set()
            await asyncio.gather(*running)

    asyncio.run(main())


def join(buffer: Buffer) -> None:
    buffer.register_sampler(OTHER, "127.0.0.1:2", 1)
    buffer.admit_sampler(1, OTHER, 0)


def test_the_shorter_of_two_groups_goes_on_in_a_sampler_that_waits(buffer: Buffer) -> None:
    mine, theirs = Episodes(num_waiting=1), Episodes()
    play(buffer, mine, theirs, is_over=lambda: bool(theirs.continued))
    assert list(theirs.continued) == ["0-1"]
    unfinished = theirs.continued["0-1"]
    assert unfinished is not None and unfinished.segments[0].num_loss_tokens == LENGTHS["0-1"]
    assert unfinished.metadata == {"episode": "its state"}
    counts = buffer.counts()
    assert counts["prompts_waiting"] == 2 and counts.get("dropped", 0) == 0, "both are released at the stop"


@pytest.mark.parametrize(("can_move", "idle_seconds"), [(False, 0.0), (True, 3000.0)])
def test_a_group_stays_if_it_would_begin_anew_or_nobody_has_waited_long(
    buffer: Buffer, can_move: bool, idle_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_IDLE_SECONDS", idle_seconds)
    mine, theirs = Episodes(num_waiting=1), Episodes()
    mine.can_move = can_move
    play(buffer, mine, theirs, is_over=lambda: False, rounds=25)
    assert set(mine.continued) == {prompt.group_id for prompt in PROMPTS} and not theirs.continued
