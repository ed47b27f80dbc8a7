"""A sampler that plays scripted episodes with unsafe tools: python -m tests.support.unsafe_sampler URL RUN FOLDER.

Trajectory 0 of a group pays nothing, trajectory 1 once, and trajectory 2 twice.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tandem.rollout.config import RolloutConfig
from tandem.services.buffer.buffer import Buffer
from tandem.services.process import die_with_parent, stop_event
from tandem.services.rollout.service import SamplingWorker
from tests.support.episodes import ScriptedSampler
from tests.support.redis_ring import SAMPLER
from tests.support.unsafe_tools import call, calling_episodes

LEASE_SECONDS = 1.0
PAY, LOOK = call("pay", "slow"), call("look", "up")


def words(number: int) -> Sequence[str]:
    return (*((LOOK, PAY) * number), "done")


async def main(redis_url: str, run_id: str, folder: Path) -> None:
    stop, buffer = stop_event(), Buffer(redis_url, run_id)
    config = RolloutConfig(samples_per_prompt=3, lease_seconds=LEASE_SECONDS, max_groups_in_flight=2)
    async with AsyncExitStack() as stack:
        sampler = ScriptedSampler(words)
        episodes = await calling_episodes(stack, folder, sampler)
        await SamplingWorker(buffer, sampler, config, SAMPLER, episodes=episodes).run(stop)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
