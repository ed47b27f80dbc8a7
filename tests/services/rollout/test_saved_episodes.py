"""When the rollout service saves episodes that have not ended: scripted episodes and a real Redis."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.types import Prompt, SamplingParameters, Segment, Trajectory, TrajectoryGroup, VersionSpan
from tandem.rollout.config import RolloutConfig
from tandem.rollout.environments.episode import EpisodeFigures
from tandem.rollout.sampler import SamplerFigures
from tandem.services import leases
from tandem.services.buffer.buffer import Buffer
from tandem.services.rollout.service import SamplingWorker
from tests.support.redis_ring import SAMPLER, new_run

TIMEOUT = 20.0
RARE = RolloutConfig(samples_per_prompt=1, lease_seconds=3000.0)
"""No renewal is due before a test has ended."""
PROMPT = Prompt(0, 0, np.arange(5, 10, dtype=np.int32), 1, SamplingParameters(max_tokens=2000))
STATE = {"episode": "its state"}


@pytest.fixture
def buffer(redis_url: str) -> Iterator[Buffer]:
    buffer = new_run(redis_url, groups_per_batch=8, infrastructure=1, data=0)
    assert buffer.admit([(PROMPT.group_id, encode_group(TrajectoryGroup(PROMPT)))], 1) == 1
    yield buffer
    assert buffer.verify() == []
    buffer.close()


class IdleEngine:
    """An engine that only the episodes would ask."""

    is_dead, policy_version = False, 0

    async def check(self) -> None: ...
    def figures(self) -> SamplerFigures:
        return SamplerFigures()


class ToldEpisodes:
    """Has as many tokens of each episode as the test says. None ends."""

    num_waiting = 0

    def __init__(self) -> None:
        self.figures = EpisodeFigures(resumed_episodes=2)
        self.num_tokens = 1
        self.num_looks = 0
        self.continued: list[Trajectory | None] = []
        self.changed: Callable[[], None] = lambda: None

    def grow(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.changed()

    async def sample(
        self,
        prompt: Prompt,
        sampling: SamplingParameters,
        number: int,
        *,
        unfinished: Trajectory | None,
        on_change: Any,
        save: Any,
    ) -> Trajectory:
        self.continued.append(unfinished)
        self.changed = on_change
        on_change()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    async def unfinished(self, group_ids: Collection[str]) -> dict[tuple[str, int], Trajectory]:
        self.num_looks += 1
        mask = np.array([0] * 5 + [1] * self.num_tokens, np.uint8)
        segment = Segment(np.arange(len(mask), dtype=np.int32), -mask.astype(np.float32), mask, (VersionSpan(5, 1, 0),))
        row = Trajectory(0, "policy", (segment,), "abort", "", PROMPT.sampling, metadata=STATE)
        return {(group_id, 0): row for group_id in group_ids}


def saved(buffer: Buffer) -> Trajectory | None:
    """The only row that is saved of the group."""
    payload = buffer.connection.redis.get(buffer.connection.key("partial:0-0"))
    if payload is None:
        return None
    (row,) = decode_group(payload).rows
    assert isinstance(row, Trajectory)
    return row


def saved_tokens(buffer: Buffer) -> int:
    row = saved(buffer)
    return 0 if row is None else row.segments[0].num_loss_tokens


def run_until(
    buffer: Buffer, episodes: ToldEpisodes, condition: Callable[[], bool], config: RolloutConfig = RARE
) -> dict[str, float]:
    """Runs a sampler until the condition holds, stops it, and returns its figures."""

    async def main() -> dict[str, float]:
        stop = threading.Event()
        worker = SamplingWorker(buffer, IdleEngine(), config, SAMPLER, episodes=episodes)  # type: ignore[arg-type]
        running = asyncio.create_task(worker.run(stop))
        async with asyncio.timeout(TIMEOUT):
            while not running.done() and not condition():
                await asyncio.sleep(0.01)
            figures = worker.figures()
            stop.set()
            await running
        return figures

    return asyncio.run(main())


def test_an_episode_is_saved_when_a_turn_has_ended_and_its_next_holder_gets_it(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_EARLY_SAVE_PAUSES", 1.0)
    episodes = ToldEpisodes()

    def all_turns_are_saved() -> bool:
        if saved_tokens(buffer) == episodes.num_tokens < 1003:
            episodes.grow(1 if episodes.num_tokens > 1 else 1000)  # also by less than an eighth
        return saved_tokens(buffer) == 1003

    figures = run_until(buffer, episodes, all_turns_are_saved)
    assert figures["resumed_episodes"] == 2
    successor = ToldEpisodes()
    run_until(buffer, successor, lambda: bool(successor.continued))
    (row,) = successor.continued
    assert row is not None and row.segments[0].num_loss_tokens == 1003 and row.metadata == STATE


def test_turns_that_end_soon_after_a_save_wait_for_each_other(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_EARLY_SAVE_PAUSES", 1e9)  # the pause then lasts until the renewal that is due
    episodes, started = ToldEpisodes(), time.monotonic()

    def turns_have_ended() -> bool:
        if saved_tokens(buffer):
            episodes.grow(1)
        return saved_tokens(buffer) > 0 and time.monotonic() > started + 0.5

    run_until(buffer, episodes, turns_have_ended)
    assert episodes.num_looks == 2, "after the first turn, and when the sampler stopped"
    assert saved_tokens(buffer) == episodes.num_tokens > 2


def test_unfinished_episodes_are_not_saved_where_answers_begin_anew(buffer: Buffer) -> None:
    episodes = ToldEpisodes()
    anew = RARE.model_copy(update={"partial_rollout": False})
    run_until(buffer, episodes, lambda: bool(episodes.continued), anew)
    assert (episodes.num_looks, saved(buffer)) == (0, None)
