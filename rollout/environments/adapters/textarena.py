"""textarena's games for one player."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast

from tandem.protos.contracts import JsonObject, Message, Observation, StepResult
from tandem.rollout.environments.adapters.conversions import number, plain


class _Game(Protocol):
    def reset(self, num_players: int, seed: int) -> None: ...
    def get_observation(self) -> tuple[int, object]: ...
    def step(self, action: str) -> tuple[bool, object]: ...
    def close(self) -> tuple[Mapping[int, float] | None, object]: ...


class TextArenaEnvironment:
    """One episode of a game that `make` returns. What the policy has seen, or has said itself, is not shown again."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make
        self._game: _Game | None = None
        self._player = 0
        self._shown = ""

    async def reset(self, task: JsonObject, *, seed: int, episode_id: str) -> Observation:
        self._game = cast("_Game", self._make())
        self._game.reset(num_players=1, seed=seed)
        return Observation(self._observe(self._game))

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        assert self._game is not None, "reset comes before step"
        done, info = self._game.step(action=action["content"])
        if not done:
            return StepResult(self._observe(self._game), info=plain(info))
        rewards, outcome = self._game.close()
        reward = number((rewards or {}).get(self._player, 0.0), "the reward of close")
        of_player = outcome.get(self._player) if isinstance(outcome, Mapping) else {}
        return StepResult([], reward, terminated=True, info={**plain(info), **plain(of_player)})

    async def close(self) -> None:
        """A game is closed for its rewards, at its end."""

    def _observe(self, game: _Game) -> list[Message]:
        """Wrappers repeat all that was shown; without a wrapper there are tuples of sender, text and kind."""
        self._player, observation = game.get_observation()
        if isinstance(observation, str):
            content, self._shown = observation.removeprefix(self._shown), observation
        else:
            sent = cast("list[tuple[int, str, object]]", observation)
            content = "\n".join(text for sender, text, _ in sent if sender != self._player)
        return [{"role": "user", "content": content.strip("\n")}]
