"""An environment: tic-tac-toe against a player who moves at random. The policy is X and moves first.

A message names a free cell by its number, 1 to 9. Any other message loses the game.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from tandem import Observation, StepResult

LINES = ("012", "345", "678", "036", "147", "258", "048", "246")
"""Cells in a row, a column or a diagonal, counted from 0."""


class TicTacToe:
    """Earns 1 for a win and 0.5 for a draw. The other player's moves depend on the seed."""

    resume = "snapshot"

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        self.seed, self.cells = seed, list("123456789")
        return Observation([self.shown("You are X. Answer with the number of a free cell.\n")])

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        said = str(action["content"]).strip()
        if said not in self.free:
            return StepResult([], terminated=True, info={"result": "no free cell"})
        self.cells[int(said) - 1] = "X"
        if self.has_won("X"):
            return StepResult([], reward=1.0, terminated=True, info={"result": "won"})
        if not self.free:
            return StepResult([], reward=0.5, terminated=True, info={"result": "draw"})
        dice = random.Random(f"{self.seed} {''.join(self.cells)}")
        self.cells[int(dice.choice(self.free)) - 1] = "O"
        if self.has_won("O"):
            return StepResult([], terminated=True, info={"result": "lost"})
        return StepResult([self.shown()])

    async def close(self) -> None:
        pass

    async def snapshot(self) -> bytes:
        return json.dumps([self.seed, self.cells]).encode()

    async def restore(self, state: bytes) -> None:
        self.seed, self.cells = json.loads(state)

    @property
    def free(self) -> list[str]:
        return [cell for cell in self.cells if cell.isdigit()]

    def has_won(self, player: str) -> bool:
        return any(all(self.cells[int(cell)] == player for cell in line) for line in LINES)

    def shown(self, start: str = "") -> dict[str, str]:
        """The board: free cells have their numbers."""
        rows = (" ".join(self.cells[first : first + 3]) for first in (0, 3, 6))
        return {"role": "user", "content": start + "\n".join(rows)}
