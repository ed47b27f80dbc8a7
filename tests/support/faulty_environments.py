"""Environments for the tests of `tandem env check`: a sound one, and others that each break one rule."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from tandem import Observation, StepResult

Action = Mapping[str, Any]


def text(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": str(content)}]


class Sound:
    """Tells the policy what it has said so far, and ends with its third word."""

    def __init__(self) -> None:
        self.seed, self.said = 0, list[str]()

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        self.seed = seed
        return Observation(text(seed))

    async def step(self, action: Action, *, deadline: float, idempotency_key: str) -> StepResult:
        self.said.append(action["content"])
        if len(self.said) == 3:
            return StepResult([], reward=0.5, terminated=True)
        return StepResult(text(f"{self.seed}: {self.said}"), info={"time": time.monotonic()})

    async def final_reward(self) -> float:
        return 0.1 * len(self.said)

    async def close(self) -> None: ...

    async def snapshot(self) -> bytes:
        return json.dumps([self.seed, self.said]).encode()

    async def restore(self, state: bytes) -> None:
        self.seed, self.said = json.loads(state)


class Fresh(Sound):
    """Has no snapshot."""

    snapshot = restore = None  # type: ignore[assignment]


class Thankless(Fresh):
    async def final_reward(self) -> float:
        return float("nan")


class AtOnce(Fresh):
    def step(self, action: Action, *, deadline: float, idempotency_key: str) -> StepResult:  # type: ignore[override]
        return StepResult(text("at once"))


class NoDeadline(Fresh):
    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        return StepResult([], terminated=True)


class NoText(Fresh):
    async def step(self, action: Action, **_: object) -> StepResult:
        return StepResult([{"role": "user", "content": {1, 2}}])


class NoMessage(Fresh):
    async def step(self, action: Action, **_: object) -> StepResult:
        return StepResult(["higher"])  # type: ignore[list-item]


class Wordy(Fresh):
    async def step(self, action: Action, **_: object) -> StepResult:
        return StepResult(text("x" * (1 << 18)))


class OnlyNumbers(Fresh):
    async def step(self, action: Action, **_: object) -> StepResult:
        return StepResult(text(int(action["content"])))


class Hanging(Fresh):
    async def step(self, action: Action, **_: object) -> StepResult:
        await asyncio.sleep(3600)
        raise AssertionError


class SnapshotAlone(Sound):
    restore = None  # type: ignore[assignment]


class Random(Fresh):
    async def step(self, action: Action, **more: Any) -> StepResult:
        await super().step(action, **more)
        return StepResult(text("drawn"), reward=random.random())


class Hashed(Fresh):
    async def step(self, action: Action, **_: object) -> StepResult:
        return StepResult(text(hash("a word")))


class SmallSeeds(Fresh):
    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        if seed > 1 << 20:
            raise ValueError("the seed is too large")
        return await super().reset(task, seed=seed, episode_id=episode_id)


class Shared(Fresh):
    """Its episodes have one list of what was said."""

    everything: ClassVar[list[str]] = []

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        self.everything.clear()
        return Observation([])

    async def step(self, action: Action, **_: object) -> StepResult:
        self.everything.append(action["content"])
        return StepResult(text(self.everything))


class Stubborn(Fresh):
    """Waits on after its cancellation."""

    async def step(self, action: Action, **more: Any) -> StepResult:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            await asyncio.sleep(3600)
        return await super().step(action, **more)


class KeepsLock(Fresh):
    """A cancelled step leaves the lock of all episodes locked."""

    lock = asyncio.Lock()

    async def step(self, action: Action, **more: Any) -> StepResult:
        await self.lock.acquire()
        await asyncio.sleep(0.01)
        self.lock.release()
        return await super().step(action, **more)


class ClosesOnce(Fresh):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise RuntimeError("it is closed")
        self.closed = True


class NeedsStep(Fresh):
    """Cannot be closed before its first step."""

    async def close(self) -> None:
        self.said.pop()


class Leaking(Fresh):
    """Leaves a thread, an open file, a process and a file behind."""

    async def close(self) -> None:
        threading.Thread(target=time.sleep, args=(3600,), name="left over", daemon=True).start()
        tempfile.mkstemp(prefix="left")
        subprocess.Popen(["sleep", "3600"])  # noqa: ASYNC220


class Forgetful(Sound):
    async def restore(self, state: bytes) -> None:
        await super().restore(state)
        self.said = self.said[:1]


class TextState(Sound):
    async def snapshot(self) -> bytes:
        return "a text"  # type: ignore[return-value]


class Deadly(Fresh):
    async def step(self, action: Action, **_: object) -> StepResult:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Blocking(Fresh):
    async def step(self, action: Action, **_: object) -> StepResult:
        time.sleep(3600)  # noqa: ASYNC251
        raise AssertionError


class Spy(Fresh):
    """Shows what its process can see."""

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        seen = sorted({"MY_API_KEY", "OTHER_API_KEY"} & set(os.environ))
        return Observation(text(f"{seen} {json.dumps(task)}"))
