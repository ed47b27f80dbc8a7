"""An environment whose answers take a lognormal time: for benchmarks/tool_latency.py."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from typing import Any

from tandem import Observation, StepResult

SIGMA = 1.0
LONGEST_SECONDS = 20.0  # shorter than environment.step_seconds


class SlowTool:
    """Answers every turn but the last one of `turns` after a lognormal time with a mean of `seconds`."""

    resume = "replay"

    def __init__(self, turns: int, seconds: float) -> None:
        self.turns = turns
        self.seconds = seconds
        self.num_turns = 0

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        return Observation([])

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        self.num_turns += 1
        if self.num_turns == self.turns:
            return StepResult([], terminated=True)
        if self.seconds:
            dice = random.Random(idempotency_key)
            seconds = dice.lognormvariate(math.log(self.seconds) - SIGMA**2 / 2, SIGMA)
            await asyncio.sleep(min(seconds, LONGEST_SECONDS))
        return StepResult([{"role": "user", "content": "go on"}])

    async def close(self) -> None:
        pass
