"""Environments in the form of other libraries, without these libraries."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, Field

from tests.support.faulty_environments import Sound

Action = TypeVar("Action")


class Vault:
    """As for TRL: its methods are tools."""

    def __init__(self, limit: int = 3) -> None:
        self.limit, self.opened, self.reward = limit, False, 0.0

    def reset(self, *, answer: str, prompt: object, **columns: object) -> str | None:
        self.answer, self.columns = answer, columns
        return f"{prompt} of {columns['data_source']}" if answer else None

    def turn(self, number: int, twice: bool = False) -> dict[str, int]:
        """
        Turns the wheel.

        Args:
            number: Where to turn it.
            twice: Whether to turn it twice.

        Returns:
            Where the wheel is.
        """
        if number > self.limit:
            raise ValueError("Game over.")
        self.opened = str(number) == self.answer
        self.reward += 0.25
        return {"wheel": number}

    async def listen(self) -> str:
        """Listens for a click."""
        await asyncio.sleep(0)
        return "click" if self.opened else "silence"

    def _hidden(self) -> None: ...


class JudgedVault(Vault):
    """Its reward is asked for at the end."""

    async def get_reward(self) -> float:
        return 2.0 * self.opened


class AwaitedVault(Vault):
    async def reset(self, **row: object) -> str | None:  # type: ignore[override]
        return super().reset(**row)


class Bare(Vault):
    def turn(self, number):  # type: ignore[no-untyped-def, override]
        """Has no type hints."""


class Doubling:
    """As for gymnasium and GEM."""

    def __init__(self, faults: Mapping[str, str] = {}, marks: str = "") -> None:
        self.faults, self.marks = faults, marks

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[object, dict[str, object]]:
        self.number = random.randint(0, 1 << 30)
        time.sleep(0.01)  # others draw, too
        return f"{seed} {self.number}", {}

    def step(self, action: str) -> tuple[object, ...]:
        match self.faults.get(action, ""):
            case "block":
                time.sleep(3600)
            case "raise":
                raise KeyError("no such move")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                raise SystemExit(3)
            case "array":
                return [1.0, 2.0], 0.0, False, False, {}
            case "no reward":
                return "", None, False, False, {}
            case "old":
                return "", 0.0, True, {}
        info = {"nan": float("nan"), "set": {1}, 1: 2, "twice": action * 2}
        return f"{action}{action} {random.random()}", 0.5, action == "win", action == "late", info

    def close(self) -> None:
        if self.marks:
            with open(self.marks, "a") as file:
                file.write("closed\n")


class AwaitedDoubling(Doubling):
    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: object = None
    ) -> tuple[object, dict[str, object]]:
        return super().reset(seed=seed)

    async def step(self, action: str) -> tuple[object, ...]:  # type: ignore[override]
        return super().step(action)


class Repeating(Doubling):
    resume = "replay"


class Trickster(Doubling):
    def __init__(self) -> None:
        raise RuntimeError("no board")


class OldGym:
    def reset(self) -> str:
        return "no tuple"

    def step(self, action: str) -> tuple[object, ...]:
        return "", 0.0, True, {}


def make(name: str, **arguments: Any) -> object:
    """As `gem.make`."""
    return {"Doubling": Doubling, "Vault": Vault, "Sound": Sound, "text": str}[name](**arguments)


class Countdown:
    """As in textarena: for one player, with a wrapper that repeats all that was shown."""

    def __init__(self, is_wrapped: bool) -> None:
        self.is_wrapped, self.sent, self.left = is_wrapped, list[tuple[int, str, None]](), 0

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == 1
        random.seed(seed)
        self.left = random.randint(2, 2)
        self.sent = [(-1, f"{self.left} left", None)]

    def get_observation(self) -> tuple[int, object]:
        if self.is_wrapped:
            return 0, "".join(f"\n[{sender}] {text}" for sender, text, _ in self.sent)
        sent, self.sent = self.sent, []
        return 0, sent

    def step(self, action: str) -> tuple[bool, dict[str, object]]:
        self.left -= 1
        self.sent += [(0, action, None), (-1, f"{self.left} left", None)]
        return self.left == 0, {}

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, str]]]:
        return {0: 0.75}, {0: {"reason": "over"}}


class Teacher:
    """As in SkyRL-gym."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any] = {}) -> None:
        self.turns, self.config, self.extras = 0, env_config, extras
        self.answer = extras["reward_spec"]["ground_truth"]

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, object]]:
        if self.config.greeting == "rewrite":
            prompt[0] = {"role": "user", "content": "another"}
        return [*prompt, {"role": "user", "content": self.config.greeting}], {}

    def step(self, action: str) -> dict[str, object]:
        self.turns += 1
        done = action == self.answer or self.turns == self.extras["max_turns"]
        said = [] if done else [{"role": "user", "content": "again"}]
        return {"observations": said, "reward": float(action == self.answer), "done": done, "metadata": {"n": 1}}


class Move(BaseModel):
    word: str = Field(min_length=1)
    metadata: dict[str, object] = {}


class Seen(BaseModel):
    echo: str
    length: int
    done: bool = False
    reward: float | None = None


class Pair(BaseModel):
    left: str
    right: str


class Client(Generic[Action]):
    """As OpenEnv's: speaks to a server."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    async def reset(self, **kwargs: Any) -> Any:
        return SimpleNamespace(observation={"start": f"{self.base_url} {sorted(kwargs)}"}, reward=None, done=False)

    async def step(self, action: Any, **_: object) -> Any:
        if isinstance(action, Mapping):
            return SimpleNamespace(observation={"echo": action["move"], "length": 1}, reward=None, done=False)
        seen = Seen(echo=action.word, length=len(action.word))
        return SimpleNamespace(observation=seen, reward=0.5, done=action.word == "end")

    async def state(self) -> object:
        return None

    async def close(self) -> None: ...


class WordClient(Client[Move]): ...


class PairClient(Client[Pair]): ...


class Server(Generic[Action]):
    """As OpenEnv's environment itself, which its server runs."""

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: object) -> Seen:
        return Seen(echo=f"{seed}", length=0)

    def step(self, action: Any, timeout_s: float | None = None) -> Seen:
        self.steps += 1
        return Seen(echo=action.word, length=self.steps, done=self.steps == 2, reward=1.0)

    @property
    def state(self) -> object:
        return None

    def close(self) -> None: ...


class WordServer(Server[Move]): ...


class Formless:
    def play(self) -> None: ...
