"""An environment that may block: each of its episodes has a process of its own, forked from this one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import random
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from tandem.protos.contracts import Environment, JsonObject, Message, Observation, StepResult
from tandem.rollout.environments.loading import ContractError, described
from tandem.rollout.environments.tools.forked_call import fork_watched, kill_fork

_CLOSE_SECONDS = 2.0
_READ_BYTES = 1 << 16


class EpisodeProcessError(ContractError):
    """An environment raised an exception or ended its process; the message describes it."""


class ForkedEnvironment:
    """Runs the environment that `create` makes in a process of its own, from `reset` to `close`.

    There it may block, hang, crash, or draw from the random numbers of its process: no other episode notices it.
    """

    def __init__(self, create: Callable[[], Environment], tool_schemas: Sequence[JsonObject] = ()) -> None:
        self.tool_schemas = tool_schemas
        self._create = create
        self._process: _EpisodeProcess | None = None

    async def reset(self, task: JsonObject, *, seed: int, episode_id: str) -> Observation:
        process = self._process = _EpisodeProcess(self._create)
        return Observation(**await process.call("reset", task=dict(task), seed=seed, episode_id=episode_id))

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        assert self._process is not None, "reset comes before step"
        given = {"action": dict(action), "deadline": deadline, "idempotency_key": idempotency_key}
        return StepResult(**await self._process.call("step", **given))

    async def final_reward(self) -> float:
        assert self._process is not None, "reset comes before it"
        return float((await self._process.call("final_reward"))["reward"])

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if not process.is_busy:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await process.call("close")
        finally:
            process.kill()


class _EpisodeProcess:
    """`is_busy`: a call has no answer, and never will if its caller has given up."""

    def __init__(self, create: Callable[[], Environment]) -> None:
        self.is_busy = False
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        try:
            self._id = fork_watched(lambda: _serve(create, other))
        except BaseException:
            self._socket.close()
            raise
        finally:
            other.close()  # before the next fork, which would inherit it

    async def call(self, method: str, **given: object) -> JsonObject:
        """Raises EpisodeProcessError if the method raises or its process ends."""
        loop, received = asyncio.get_running_loop(), bytearray()
        self.is_busy = True
        try:
            await loop.sock_sendall(self._socket, json.dumps({"method": method, "given": given}).encode() + b"\n")
            while not received.endswith(b"\n"):
                part = await loop.sock_recv(self._socket, _READ_BYTES)
                if not part:
                    raise ConnectionResetError
                received += part
        except ConnectionError:
            raise EpisodeProcessError(f"the environment ended its process during {method}") from None
        self.is_busy = False
        answer: JsonObject = json.loads(received)
        if "raised" in answer:
            raise EpisodeProcessError(answer["raised"])
        return answer

    def kill(self) -> None:
        self._socket.close()
        kill_fork(self._id)


def _serve(create: Callable[[], Environment], end: socket.socket) -> None:
    """The child: answers calls until it is killed."""
    environment, loop = create(), asyncio.new_event_loop()
    with end.makefile("r", encoding="utf-8") as calls, end.makefile("w", encoding="utf-8") as answers:
        for line in calls:
            call = json.loads(line)
            try:
                result = loop.run_until_complete(_carry_out(environment, call["method"], call["given"]))
                answer = json.dumps(result, allow_nan=False)
            except Exception as error:  # user code
                answer = json.dumps({"raised": described(error)})
            answers.write(answer + "\n")
            answers.flush()


async def _carry_out(environment: Environment, method: str, given: JsonObject) -> JsonObject:
    if method == "reset":
        _seed_process(given["seed"])
        return asdict(await environment.reset(given["task"], seed=given["seed"], episode_id=given["episode_id"]))
    if method == "step":
        return asdict(await environment.step(**given))
    if method == "final_reward":
        final_reward = getattr(environment, "final_reward", None)
        return {"reward": 0.0 if final_reward is None else await final_reward()}
    await environment.close()
    return {}


def _seed_process(seed: int) -> None:
    """For environments that draw from the process's random numbers: those of one group have to draw the same ones, and
    those of two groups others, although all processes are forked from the same one.
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        importlib.import_module("numpy").random.seed(seed)
