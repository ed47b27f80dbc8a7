"""Groups of which an episode has failed in all its attempts: real environments, scripted words and a real Redis."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.types import Trajectory, TrajectoryGroup
from tandem.rollout.config import RolloutConfig
from tandem.rollout.environments import episode
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.buffer.buffer import Buffer
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tandem.services.rollout.service import SamplingWorker
from tests.support.episodes import ScriptedSampler, chat_encoder, prompt_of
from tests.support.redis_ring import SAMPLER, new_run

TIMEOUT = 30.0
PROMPT = replace(prompt_of(), num_samples=3)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return chat_encoder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def buffer(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Buffer]:
    monkeypatch.setattr(episode, "_FIRST_PAUSE_SECONDS", 0.01)
    buffer = new_run(redis_url, groups_per_batch=8, infrastructure=0, data=0)
    assert buffer.admit([(PROMPT.group_id, encode_group(TrajectoryGroup(PROMPT)))], 1) == 1
    yield buffer
    assert buffer.verify() == []
    buffer.close()


def run_until(
    buffer: Buffer, encoder: ChatEncoder, marks: Path, condition: Callable[[], bool], keeps_failed_episodes: bool
) -> dict[str, float]:
    """A sampler whose second episode fails; returns its figures."""

    async def main() -> dict[str, float]:
        arguments = {"faults": {"bad": "raise"}, "marks": str(marks)}
        settings = EnvironmentConfig(path="tests.support.environments:Noted", arguments=arguments, max_attempts=2)
        pool = EnvironmentPool(settings)
        await pool.start()
        try:
            engine, stop = ScriptedSampler(lambda number: ["bad" if number == 1 else "good", "end"]), threading.Event()
            episodes = EpisodeSampler(engine, pool, EpisodeEncoder(encoder), settings, seed=5)
            config = RolloutConfig(samples_per_prompt=3)
            keeps = {"episodes": episodes, "keeps_failed_episodes": keeps_failed_episodes}
            worker = SamplingWorker(buffer, engine, config, SAMPLER, **keeps)  # type: ignore[arg-type]
            running = asyncio.create_task(worker.run(stop))
            async with asyncio.timeout(TIMEOUT):
                while not running.done() and not condition():
                    await asyncio.sleep(0.01)
            figures = worker.figures()
            stop.set()
            await running
            return figures
        finally:
            await pool.close()

    return asyncio.run(main())


def attempts(marks: Path) -> int:
    """At the episode that fails; the others take one each."""
    return (marks / "calls").read_text().count("reset ") - 2


def test_its_row_has_no_score_and_the_others_are_kept(buffer: Buffer, encoder: ChatEncoder, tmp_path: Path) -> None:
    figures = run_until(buffer, encoder, tmp_path, lambda: buffer.counts()["generated_waiting"] == 1, True)
    assert figures["unscored_episodes"] == 1 and attempts(tmp_path) == 2
    (claim,) = buffer.claim("generated", "reward", 1, 10.0, 0)
    rows = [row for row in decode_group(claim.payload).rows if isinstance(row, Trajectory)]
    assert [row.finish_reason for row in rows] == ["stop", "error", "stop"]
    assert [row.earned_reward for row in rows] == [1.25, 0.0, 1.25]
    assert rows[1].metadata["unscored"].startswith("step: RuntimeError: the server of this environment is away")
    assert rows[1].segments[0].num_loss_tokens == 0


def test_without_room_for_it_the_group_is_given_back(buffer: Buffer, encoder: ChatEncoder, tmp_path: Path) -> None:
    """Its budget of failures is 0, so it is dropped."""
    run_until(buffer, encoder, tmp_path, lambda: buffer.counts().get("dropped:sampling_failed", 0) == 1, False)
    assert attempts(tmp_path) == 2
