"""Environments with gymnasium's methods whose observations and actions are texts, as in GEM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from tandem.protos.contracts import JsonObject, Message, Observation, StepResult
from tandem.rollout.environments.adapters.conversions import accepted, finished, messages_of, number, plain
from tandem.rollout.environments.loading import ContractError


class _Gym(Protocol):
    def reset(self, *, seed: int) -> object: ...
    def step(self, action: str, /) -> object: ...


class GymEnvironment:
    """One episode of an object that `make` returns."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make
        self._made: _Gym | None = None

    async def reset(self, task: JsonObject, *, seed: int, episode_id: str) -> Observation:
        self._made = made = cast("_Gym", self._make())
        result = await finished(made.reset(**accepted(made.reset, {"seed": seed})))  # type: ignore[arg-type]
        if not isinstance(result, tuple) or len(result) != 2:
            raise ContractError(f"reset returned {result!r:.80} instead of (observation, info)")
        return Observation(messages_of(result[0], "reset"))

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        assert self._made is not None, "reset comes before step"
        result = await finished(self._made.step(action["content"]))
        if not isinstance(result, tuple) or len(result) != 5:
            expected = "(observation, reward, terminated, truncated, info)"
            raise ContractError(f"step returned {result!r:.80} instead of {expected}")
        observation, reward, terminated, truncated, info = result
        earned = number(reward, "the reward of step")
        return StepResult(messages_of(observation, "step"), earned, bool(terminated), bool(truncated), plain(info))

    async def close(self) -> None:
        if callable(close := getattr(self._made, "close", None)):
            await finished(close())
