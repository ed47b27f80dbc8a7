"""Environments of installed libraries, for the tests that install these."""

from __future__ import annotations

import sys
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"


def make_words(limit: int) -> Any:
    """A gymnasium environment with text spaces, within gymnasium's checks and time limit."""
    import gymnasium

    class Words(gymnasium.Env[str, str]):
        observation_space = gymnasium.spaces.Text(40, charset=LETTERS)
        action_space = gymnasium.spaces.Text(40, charset=LETTERS)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            self.secret = str(self.np_random.integers(10))
            return "which digit", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "no", float(action == self.secret), action == self.secret, False, {}

    gymnasium.register("Words-v0", Words, max_episode_steps=limit)
    return gymnasium.make("Words-v0")


def __getattr__(name: str) -> type:
    """`Client`, loaded with OpenEnv when it is asked for."""
    if name == "Client":
        return openenv_classes()[0]
    raise AttributeError(name)


def openenv_classes() -> tuple[type, Any]:
    """A client of OpenEnv, and the server's application."""
    from openenv.core import Action, EnvClient, Environment, Observation, State, create_fastapi_app
    from openenv.core.client_types import StepResult

    class WordAction(Action):  # type: ignore[misc]
        word: str

    class WordObservation(Observation):  # type: ignore[misc]
        echo: str

    class Words(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True
        said = 0

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
            return WordObservation(echo=f"seed {seed}")

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            self.said += 1
            return WordObservation(echo=action.word * 2, reward=0.25, done=self.said == 2)

        @property
        def state(self) -> Any:
            return State(step_count=self.said)

    class Client(EnvClient[WordAction, WordObservation, State]):  # type: ignore[misc]
        def _step_payload(self, action: Any) -> dict[str, Any]:
            return {"word": action.word}

        def _parse_result(self, payload: dict[str, Any]) -> Any:
            seen = WordObservation(**payload["observation"])
            return StepResult(seen, payload.get("reward"), payload.get("done", False))

        def _parse_state(self, payload: dict[str, Any]) -> Any:
            return State(**payload)

    return Client, create_fastapi_app(Words, WordAction, WordObservation, max_concurrent_envs=4)


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(openenv_classes()[1], host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
