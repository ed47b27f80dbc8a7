"""An episode that waits for its environment leaves the engine to the others: a real engine, with room for one row."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tandem.protos.types import Prompt, SamplingParameters
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments, find_engine
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.support.episodes import prompt_of
from tests.support.tiny_model import build_tiny_model

SAMPLING = SamplingParameters(max_tokens=400, stop=tuple("abcdefghijklmnopqrstuvwxyz0123456789"))
"""A turn ends with its first letter or digit."""
LONGEST_SECONDS = 60.0


def test_an_episode_that_waits_for_a_slow_tool_holds_no_request_in_the_engine(tmp_path: Path) -> None:
    """The slow one's tool answers after a whole other episode, which is sampled in the only row of the engine."""
    model = build_tiny_model(tmp_path / "model", hidden=64)
    config = RolloutConfig(engine="transformers", kv_cache_bytes=1 << 20)
    path = "tests.support.environments:SlowForOne"
    settings = EnvironmentConfig(path=path, arguments={"folder": str(tmp_path)}, max_turns=2)
    slow_prompt, other_prompt = prompt_of(0), prompt_of(1)
    asked, answer = tmp_path / "asked", tmp_path / "answer"

    async def main() -> None:
        async with asyncio.timeout(LONGEST_SECONDS):
            sampler = await find_engine("transformers").start(
                SamplerArguments(config, str(model), "float32", max_model_tokens=1024, seed=3)
            )
            assert sampler._max_rows == 1  # type: ignore[attr-defined]
            pool = EnvironmentPool(settings)
            try:
                await pool.start()
                episodes = EpisodeSampler(sampler, pool, EpisodeEncoder(ChatEncoder(str(model))), settings, seed=5)

                def begin(prompt: Prompt) -> asyncio.Task[object]:
                    return asyncio.create_task(episodes.sample(prompt, SAMPLING, 0, on_change=lambda: None))

                slow = begin(slow_prompt)
                while not asked.exists():
                    assert not slow.done()
                    await asyncio.sleep(0.01)
                assert not sampler._running, "its first turn has ended"
                while episodes.num_waiting == 0:
                    await asyncio.sleep(0.01)
                other = await begin(other_prompt)
                assert not slow.done() and not sampler._running
                answer.touch()
                waited = await slow
                assert episodes.num_waiting == 0
                assert other.metadata["num_turns"] == waited.metadata["num_turns"] == 2  # type: ignore[attr-defined]
            finally:
                await pool.close()
                sampler.close()

    asyncio.run(main())
