"""Environments that misbehave, for the tests of episodes. Each echoes what the policy says until it has said "end"."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem import Observation, StepResult
from tandem.protos.contracts import MAX_SNAPSHOT_BYTES, ToolOutcome

ECHOED: ToolOutcome = {"tool": "echo", "outcome": "result", "seconds": 0.5}


class Echo:
    """`faults`: word → what happens when the policy says it. A fault in `once` happens in one attempt only."""

    def __init__(self, faults: Mapping[str, str] = {}, marks: str = "") -> None:
        self.faults = faults
        self.marks = Path(marks) if marks else None
        """Folder with a file for each open episode, and for each fault that happened."""

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        self.name = "-".join(episode_id.split("/")[:2])  # of all attempts
        if self.marks:
            (self.marks / f"open-{self.name}-{id(self)}").touch()
        return Observation([{"role": "user", "content": f"seed {seed}"}])

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        said = action["content"]
        fault = self.faults.get(said, "")
        if fault.startswith("once "):
            assert self.marks is not None
            mark = self.marks / f"fault-{self.name}"
            fault = "" if mark.exists() else fault.removeprefix("once ")
            mark.touch()
        match fault:
            case "raise":
                raise RuntimeError("the server of this\nenvironment is away")
            case "hang":
                await asyncio.sleep(3600)
            case "block":
                time.sleep(3600)  # noqa: ASYNC251
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "wrong type":
                return "no result"  # type: ignore[return-value]
            case "no reward":
                return StepResult([], reward=float("nan"), terminated=True)
            case "silence":
                return StepResult([])
        if said == "end":
            return StepResult([], reward=1.0, terminated=True, info={"said": "end"})
        return StepResult([{"role": "user", "content": f"{said}?"}], reward=0.25, tool_outcomes=[ECHOED])

    async def close(self) -> None:
        if self.marks:
            (self.marks / f"open-{self.name}-{id(self)}").unlink()


class SlowForOne:
    """One of its tasks is answered once there is the file `answer` in the folder. There is `asked` when it waits."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        self.is_slow = task["ground_truth"] == "1"
        return Observation([])

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        if self.is_slow:
            (self.folder / "asked").touch()
            while not (self.folder / "answer").exists():
                await asyncio.sleep(0.01)
        return StepResult([{"role": "user", "content": "go on"}])

    async def close(self) -> None: ...


class Noted(Echo):
    """Notes its calls in a file of its folder. It answers "random" with a word that nobody has said before."""

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        observation = await super().reset(task, seed=seed, episode_id=episode_id)
        self.note(f"reset {episode_id}")
        return observation

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        self.note(f"step {idempotency_key}")
        result = await super().step(action, deadline=deadline, idempotency_key=idempotency_key)
        if action["content"] == "random":
            return StepResult([{"role": "user", "content": os.urandom(8).hex()}])
        return result

    def note(self, call: str) -> None:
        if self.marks is None:
            return
        with open(self.marks / "calls", "a") as calls:
            calls.write(f"{call}\n")


class Unhurried(Noted):
    """Takes its time for a step, so that a sampler can be killed in the middle of an episode."""

    resume = "replay"

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        await asyncio.sleep(0.3)
        return await super().step(action, deadline=deadline, idempotency_key=idempotency_key)


class Halted(Noted):
    """Answers the first action of each episode, the others once there is the file `go` in the folder. There is `halted`
    when one of them waits. Evaluations do not wait.
    """

    resume = "replay"
    num_steps = 0

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        assert self.marks is not None
        self.num_steps += 1
        waits = self.num_steps > 1 and not self.name.startswith("eval-")
        while waits and not (self.marks / "go").exists():
            (self.marks / "halted").touch()
            await asyncio.sleep(0.05)
        return await super().step(action, deadline=deadline, idempotency_key=idempotency_key)


class HaltedStart(Noted):
    """The episodes whose name begins with `halted` start once there is the file `go` in the folder. There is `halted`
    when one of them waits.
    """

    def __init__(self, halted: str, marks: str) -> None:
        super().__init__(marks=marks)
        self.halted = halted

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        assert self.marks is not None
        while episode_id.startswith(self.halted) and not (self.marks / "go").exists():
            (self.marks / "halted").touch()
            await asyncio.sleep(0.05)
        return await super().reset(task, seed=seed, episode_id=episode_id)


class Judged(Noted):
    """Earns 2 where a limit ends its episode. With `faults`, it raises at the first such end."""

    resume = "replay"

    async def final_reward(self) -> float:
        assert self.marks is not None
        self.note("final_reward")
        mark = self.marks / f"judged-{self.name}"
        if self.faults and not mark.exists():
            mark.touch()
            raise RuntimeError("the judge is away")
        return 2.0


class Replayed(Noted):
    """Goes on by the same actions once more."""

    resume = "replay"


class Restored(Noted):
    """Goes on from a snapshot: its name, and a number that nobody else knows. Refuses those that a test has spoilt."""

    resume = "snapshot"

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        await super().reset(task, seed=seed, episode_id=episode_id)
        self.number = os.urandom(8).hex()
        return Observation([{"role": "user", "content": f"number {self.number}"}])

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        result = await super().step(action, deadline=deadline, idempotency_key=idempotency_key)
        return replace(result, info={"number": self.number})

    async def snapshot(self) -> bytes:
        return b"" if self.marks and (self.marks / "spoilt").exists() else f"{self.name} {self.number}".encode()

    async def restore(self, state: bytes) -> None:
        self.name, self.number = state.decode().split()
        self.note("restore")
        assert self.marks is not None
        (self.marks / f"open-{self.name}-{id(self)}").touch()


class LargeSnapshots(Restored):
    """Its snapshots are larger than allowed."""

    async def snapshot(self) -> bytes:
        return bytes(MAX_SNAPSHOT_BYTES + 1)


class UnknownResume(Echo):
    """Names a way to go on that there is not."""

    resume: str = "rewind"


class NoSnapshots(Echo):
    """Has not what it promises."""

    resume = "snapshot"


class NeedsArgument:
    """Cannot be made without its argument."""

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError("the size is negative")

    async def reset(self) -> None: ...
    async def step(self) -> None: ...
    async def close(self) -> None: ...


class OnlyReset:
    """Is no environment."""

    async def reset(self, task: object, *, seed: int, episode_id: str) -> None: ...


class Chatty:
    """Answers with messages of the size, or the role, that the policy names."""

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        return Observation([])

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        said = action["content"]
        role, size = ("user", int(said)) if said.isdecimal() else (said, 1)
        return StepResult([{"role": role, "content": "x" * size}], reward=1.0)

    async def close(self) -> None: ...


class Starts:
    """Starts a process, whose id it writes into a file. Its first step kills its own process."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        self.file.write_text(str(subprocess.Popen(["sleep", "3600"]).pid))  # noqa: ASYNC220
        return Observation([])

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    async def close(self) -> None: ...


class SilentAgent:
    """An agent that asks the policy nothing."""

    def __init__(self, script: str, times: int) -> None:
        self.script = script

    async def run(self, data: Mapping[str, Any], *, base_url: str, api_key: str) -> Any:
        match self.script:
            case "raises":
                raise RuntimeError("no idea")
            case "returns_text":
                return "done"
            case "idle":
                await asyncio.sleep(3600)
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        return 1.0
