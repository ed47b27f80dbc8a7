"""An environment: guess a number from 1 to 15 in four turns; it answers "higher" or "lower".

Whoever does not read its answers wins at most 4 of 15 games (26.7 %); binary search wins all. With `shuffled`, the
answers are drawn at random, so that reading them is of no use.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tandem import Observation, StepResult

LARGEST = 15
MAX_GUESSES = 4


class GuessNumber:
    """Earns 1 for the right number: the ground truth of the row, else one that depends on the seed."""

    resume = "replay"  # the same guesses get the same answers

    def __init__(self, shuffled: bool = False) -> None:
        self.shuffled = shuffled
        self.num_guesses = 0

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        self.random = random.Random(seed)
        self.number = int(task.get("ground_truth") or self.random.randint(1, LARGEST))
        return Observation([])

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        self.num_guesses += 1
        guess = int(action["content"]) if action["content"].isdecimal() else None
        if guess == self.number:
            return StepResult([], reward=1.0, terminated=True)
        if self.num_guesses == MAX_GUESSES:
            return StepResult([], terminated=True)
        if self.shuffled:
            told = self.random.choice(["higher", "lower"])
        elif guess is None:
            told = "no number"
        else:
            told = "higher" if self.number > guess else "lower"
        return StepResult([{"role": "user", "content": told}])

    async def close(self) -> None:
        pass
