"""Environments in processes of their own: they run users' code, which may hang, crash or print."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import time
from base64 import b64decode, b64encode
from collections.abc import Collection, Sequence

from tandem.protos.child_environment import child_environment
from tandem.protos.contracts import AgentResult, JsonObject, Message, Observation, Resume, StepResult
from tandem.protos.errors import ConfigError, EpisodeError
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.line_calls import LineCalls
from tandem.rollout.environments.start_command import start_command

log = logging.getLogger(__name__)

_START_SECONDS = 60.0  # to import the user's module
_GRACE_SECONDS = 1.0  # after which a process that still has not answered is taken to hang
_CLOSE_SECONDS = 5.0
_MAX_LINE_BYTES = 64 << 20
_DEAD = "the environments' process has ended; its last lines are in this log"


class _Process:
    """One process and the calls that wait for its answers."""

    def __init__(self, process: asyncio.subprocess.Process, started: JsonObject) -> None:
        self.resume: Resume = started["resume"]
        self.tools: Sequence[JsonObject] = started["tools"]
        self.unsafe_tools: frozenset[str] = frozenset(started["unsafe_tools"])
        self.is_agent: bool = started["is_agent"]
        self._process = process
        self._calls = LineCalls(process)

    @classmethod
    async def start(cls, config: EnvironmentConfig) -> _Process:
        """Raises ConfigError if the class cannot be used, EpisodeError if the process does not start."""
        process = await asyncio.create_subprocess_exec(
            *start_command(config),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(config.variables, "environment.variables"),
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # out of reach of Ctrl-C
        )
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            start = {"path": config.path, "arguments": config.arguments}
            process.stdin.write(json.dumps(start).encode() + b"\n")
            async with asyncio.timeout(_START_SECONDS):
                line = await process.stdout.readline()
            if not line:
                raise EpisodeError(f"environment.path {config.path}: its process ended at its start; see this log")
            started = json.loads(line)
            if "error" in started:
                raise ConfigError(f"environment.{'tools' if config.tools else 'path'}: {started['error']}")
            if started["is_agent"] and config.sandbox:
                raise ConfigError("environment.sandbox: an agent calls the policy by HTTP; leave sandbox out")
            if started["is_agent"] and config.service:
                raise ConfigError("environment.service: an agent runs beside its sampler; leave service out")
        except BaseException as error:
            await end_process(process)
            if isinstance(error, TimeoutError | ConnectionError):
                fault = f"its process did not start within {_START_SECONDS:.0f} s; see this log"
                raise EpisodeError(f"environment.path {config.path}: {fault}") from None
            raise
        return cls(process, started)

    @property
    def is_dead(self) -> bool:
        return self._process.returncode is not None or self._calls.reading.done()

    async def call(self, seconds: float | None, **message: object) -> JsonObject:
        """Raises EpisodeError if the environment raises or its process dies, TimeoutError after `seconds`, if any."""
        if self.is_dead:
            raise EpisodeError(_DEAD)
        try:
            reply = await self._calls.call(seconds, **message)
        except ConnectionError:
            raise EpisodeError(_DEAD) from None
        if "error" in reply:
            raise EpisodeError(f"{message['do']}: {reply['error']}")
        return reply

    async def end(self) -> None:
        self._calls.reading.cancel()  # a process that it has started may still have its end of the pipe
        await end_process(self._process)


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Kills a process and those that it has started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # asyncio waits for the pipes, too, which others may hold
        async with asyncio.timeout(_CLOSE_SECONDS):
            await process.wait()


async def check_class(config: EnvironmentConfig) -> frozenset[str]:
    """Returns the names of the unsafe tools. Raises ConfigError if the class cannot be used, EpisodeError if its
    process does not start.
    """
    process = await _Process.start(config)
    await process.end()
    return process.unsafe_tools


class RemoteEnvironment:
    """An environment of one episode, as `OpenEnvironment`, in another process."""

    def __init__(self, process: _Process, episode_id: str, step_seconds: float) -> None:
        self._process = process
        self._episode_id = episode_id
        self._seconds = step_seconds

    async def reset(self, task: JsonObject, *, seed: int, episode_id: str) -> Observation:
        assert episode_id == self._episode_id, "an environment has one episode"
        reply = await self._call(self._seconds, do="reset", task=dict(task), seed=seed)
        return Observation(reply["messages"])

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        seconds = max(0.0, deadline - time.time())
        named = {"deadline": deadline, "idempotency_key": idempotency_key}
        reply = await self._call(seconds, do="step", action=dict(action), **named)
        return StepResult(**{name: value for name, value in reply.items() if name != "call"})

    async def snapshot(self) -> bytes:
        reply = await self._call(self._seconds, do="snapshot")
        return b64decode(reply["state"])

    async def restore(self, state: bytes) -> None:
        await self._call(self._seconds, do="restore", state=b64encode(state).decode())

    async def final_reward(self) -> float:
        reply = await self._call(self._seconds, do="final_reward")
        return float(reply["reward"])

    async def run(self, data: JsonObject, *, base_url: str, api_key: str) -> AgentResult:
        """Runs an agent, for which the caller sets the time; `end_if_blocked` is then to be called."""
        named = {"data": dict(data), "base_url": base_url, "api_key": api_key}
        reply = await self._process.call(None, episode_id=self._episode_id, do="run", **named)
        if "error_of_run" in reply:
            return AgentResult(error=reply["error_of_run"])
        return AgentResult(reply["reward"], reply["info"])

    async def close(self) -> None:
        await self._call(_CLOSE_SECONDS, do="close")

    async def _call(self, seconds: float, **message: object) -> JsonObject:
        try:
            return await self._process.call(seconds, episode_id=self._episode_id, **message)
        except TimeoutError:
            await self.end_if_blocked()
            raise EpisodeError(f"{message['do']} has not ended after {seconds:.3g} s") from None

    async def end_if_blocked(self) -> None:
        """An environment that waits delays no other; one that blocks its process is ended with it."""
        try:
            await self._process.call(_GRACE_SECONDS, episode_id=self._episode_id, do="ping")
        except TimeoutError:
            log.warning("episode %s blocks its process, which is ended", self._episode_id)
            await self._process.end()


class EnvironmentPool:
    """The processes of one sampler. One that has died is started again when its turn comes.

    Known once it has started: `resume`, how interrupted episodes go on; `tools`, the schemas of the tools that the
    environment offers, in OpenAI's form; `unsafe_tools`, the names of those whose calls may not be repeated; and
    `is_agent`, whether the class is a `tandem.Agent`.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self.resume: Resume = "restart"
        self.tools: Sequence[JsonObject] = ()
        self.unsafe_tools: Collection[str] = ()
        self.is_agent = False
        self._config = config
        self._processes: list[_Process | None] = [None] * config.num_processes
        self._starting = [asyncio.Lock() for _ in range(config.num_processes)]
        self._turn = itertools.cycle(range(config.num_processes))

    async def start(self) -> None:
        """Raises ConfigError if the class cannot be used, EpisodeError if a process does not start."""
        await asyncio.gather(*(self._process(place) for place in range(self._config.num_processes)))

    async def open(self, episode_id: str) -> RemoteEnvironment:
        """An environment for one episode. Raises EpisodeError if its process does not start."""
        try:
            process = await self._process(next(self._turn))
        except (ConfigError, OSError) as error:  # it could be used before
            raise EpisodeError(str(error)) from None
        return RemoteEnvironment(process, episode_id, self._config.step_seconds)

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(one.end() for one in self._processes if one is not None))

    async def _process(self, place: int) -> _Process:
        async with self._starting[place]:
            process = self._processes[place]
            if process is None or process.is_dead:
                if process is not None:
                    await process.end()  # what it has started may have outlived it
                process = self._processes[place] = await _Process.start(self._config)
                self.resume = process.resume
                self.tools = process.tools
                self.unsafe_tools = process.unsafe_tools
                self.is_agent = process.is_agent
            return process
