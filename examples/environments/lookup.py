"""An environment with a tool of its own: `lookup` tells a code that differs in each episode."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from tandem import Observation, StepResult


class Lookup:
    """Earns 1 for an answer that ends with the code."""

    resume = "replay"
    tool_schemas = (
        {
            "type": "function",
            "function": {
                "name": "lookup",
                "description": "Tells the code.",
                "parameters": {"type": "object", "properties": {}},
            },
        },
    )

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        # Not from the seed, which all episodes of a group share.
        self.code = int.from_bytes(blake2b(episode_id.encode(), digest_size=4).digest()) % 10_000
        return Observation([{"role": "user", "content": "What is the code?"}])

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        calls = action.get("tool_calls", ())
        if not calls:
            return StepResult([], reward=float(action["content"].endswith(f"{self.code:04}")), terminated=True)
        return StepResult([{"role": "tool", "tool_call_id": call["id"], "content": self._told(call)} for call in calls])

    async def close(self) -> None:
        pass

    def _told(self, call: Mapping[str, Any]) -> str:
        return f"{self.code:04}" if call["function"]["name"] == "lookup" else "error: there is only lookup"
