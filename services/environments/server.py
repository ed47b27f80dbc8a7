"""gRPC `EnvironmentService`: environments that other processes play episodes in, each with a lease.

Environments whose caller has gone are closed when their lease ends. A step that is repeated with its key, because its
reply was lost, gets the result of the first one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import TypeVar

import grpc

from tandem.protos import environments_pb2, environments_pb2_grpc
from tandem.protos.contracts import JsonObject
from tandem.protos.errors import DataError, EpisodeError
from tandem.rollout.environments.source import EnvironmentSource, OpenEnvironment
from tandem.services.rpc.limits import RpcLimits

log = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.EnvironmentService"
RPC_LIMITS = RpcLimits(request_bytes=16 << 20, max_calls=1 << 14)
"""For the server on which the servicer is registered. A call lasts as long as its step, and all samplers are one peer,
which may hold three quarters of the places. Tasks have prompts, and actions turns, of 256k tokens.
"""
LEASE_SECONDS = 30.0
_LOOKS = 15  # for ended leases, in the time of one
_LONGEST_SECONDS = 86_400.0
NOTICE_SECONDS = 3.0
"""How long samplers may still open environments in a service that has left the registry, at which they look often."""
_POLL_SECONDS = 0.1

Context = grpc.aio.ServicerContext
Result = TypeVar("Result")


@dataclass(slots=True)
class Figures:
    """Sums since the start of the service."""

    opened: int = 0
    steps: int = 0
    """Without repetitions."""
    orphans: int = 0
    """Environments that were closed because their lease had ended."""


@dataclass(slots=True, eq=False)
class _Held:
    """An environment, the start of its episode, its last step, and its reward at the end."""

    episode_id: str
    environment: OpenEnvironment | None = None
    beginning: asyncio.Task[str] | None = None
    step_key: str = ""
    step: asyncio.Task[str] | None = None
    final_reward: asyncio.Task[str] | None = None
    last_look: int = 0
    """Number of the last look for ended leases at which this one has not ended."""


class EnvironmentServicer(environments_pb2_grpc.EnvironmentServiceServicer):
    """The service of environments.proto, with environments of `source`. All methods belong to its event loop. `leave`
    takes the service out of the registry; it may block.
    """

    def __init__(
        self,
        source: EnvironmentSource,
        lease_seconds: float = LEASE_SECONDS,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.figures = Figures()
        self.is_draining = False
        self._leave = leave
        self._source = source
        self._lease_seconds = lease_seconds
        self._held: dict[str, _Held] = {}
        self._of_episode: dict[str, str] = {}
        """The environment of an episode; the last one, if it was opened again."""
        self._num_looks = 0

    @property
    def num_open(self) -> int:
        return len(self._held)

    async def Describe(
        self, request: environments_pb2.DescribeRequest, context: Context
    ) -> environments_pb2.DescribeReply:
        tools = json.dumps([dict(one) for one in self._source.tools])
        return environments_pb2.DescribeReply(
            resume=self._source.resume,
            tools=tools,
            lease_seconds=self._lease_seconds,
            unsafe_tools=sorted(self._source.unsafe_tools),
        )

    async def Open(self, request: environments_pb2.OpenRequest, context: Context) -> environments_pb2.OpenReply:
        task = _read_object("task", request.task)

        async def reset(environment: OpenEnvironment) -> str:
            observation = await environment.reset(task, seed=request.seed, episode_id=request.episode_id)
            return json.dumps([dict(message) for message in observation.messages])

        messages = await self._begin(request.environment_id, request.episode_id, reset)
        return environments_pb2.OpenReply(messages=messages)

    async def Restore(
        self, request: environments_pb2.RestoreRequest, context: Context
    ) -> environments_pb2.RestoreReply:
        async def restore(environment: OpenEnvironment) -> str:
            await environment.restore(request.state)
            return ""

        await self._begin(request.environment_id, request.episode_id, restore)
        return environments_pb2.RestoreReply()

    async def Step(self, request: environments_pb2.StepRequest, context: Context) -> environments_pb2.StepReply:
        """Makes the step, also if the caller goes meanwhile: it may ask again with the same key."""
        held = self._known(request.environment_id)
        if held.step is None or held.step_key != request.idempotency_key:
            if not 0.0 < request.timeout_seconds <= _LONGEST_SECONDS:  # nor NaN
                raise DataError(
                    f"timeout_seconds is {request.timeout_seconds:g}, at most {_LONGEST_SECONDS:g} is allowed"
                )
            if held.step is not None and not held.step.done():
                raise EpisodeError(f"episode {held.episode_id}: its step before this one has not ended")
            action, environment = _read_object("action", request.action), _begun(held)
            held.step_key = request.idempotency_key
            held.step = _task(self._step(environment, action, request.idempotency_key, request.timeout_seconds))
        return environments_pb2.StepReply(result=await _result_of(held.step))

    async def FinalReward(
        self, request: environments_pb2.FinalRewardRequest, context: Context
    ) -> environments_pb2.FinalRewardReply:
        held = self._known(request.environment_id)
        if held.final_reward is None:
            held.final_reward = _task(_final_reward(_begun(held)))
        return environments_pb2.FinalRewardReply(reward=float(await _result_of(held.final_reward)))

    async def Snapshot(
        self, request: environments_pb2.SnapshotRequest, context: Context
    ) -> environments_pb2.SnapshotReply:
        state = await _begun(self._known(request.environment_id)).snapshot()
        return environments_pb2.SnapshotReply(state=state)

    async def Close(self, request: environments_pb2.CloseRequest, context: Context) -> environments_pb2.CloseReply:
        await self._close(request.environment_id)
        return environments_pb2.CloseReply()

    async def Heartbeat(
        self, request: environments_pb2.HeartbeatRequest, context: Context
    ) -> environments_pb2.HeartbeatReply:
        for environment_id in request.environment_ids:
            if (held := self._held.get(environment_id)) is not None:
                held.last_look = self._num_looks + _LOOKS
        return environments_pb2.HeartbeatReply()

    async def Drain(
        self, request: environments_pb2.DrainEnvironmentsRequest, context: Context
    ) -> environments_pb2.DrainEnvironmentsReply:
        if not 0.0 <= request.timeout_seconds <= _LONGEST_SECONDS:  # nor NaN
            raise DataError(f"timeout_seconds is {request.timeout_seconds:g}, at most {_LONGEST_SECONDS:g} is allowed")
        await self.drained(request.timeout_seconds)
        return environments_pb2.DrainEnvironmentsReply(num_open=self.num_open)

    async def drained(self, seconds: float) -> None:
        """Leaves the registry, and waits until nothing is open and no sampler opens anything more, at most so long.
        Raises UnavailableError if Redis is unreachable.
        """
        ends_at = time.monotonic() + seconds
        await asyncio.to_thread(self._leave)
        self.is_draining, noticed_at = True, time.monotonic() + NOTICE_SECONDS
        while (self._held or time.monotonic() < noticed_at) and time.monotonic() < ends_at:
            await asyncio.sleep(_POLL_SECONDS)

    async def close_orphans(self) -> None:
        """Closes environments whose lease has ended, until it is cancelled. Leases are measured in looks, so that time
        in which this process stood still, and could hear nobody, does not count.
        """
        while True:
            await asyncio.sleep(self._lease_seconds / (_LOOKS + 1))
            self._num_looks += 1
            orphans = [name for name, held in self._held.items() if held.last_look < self._num_looks]
            await asyncio.gather(*(self._close_orphan(name) for name in orphans))

    async def _begin(
        self, environment_id: str, episode_id: str, begin: Callable[[OpenEnvironment], Awaitable[str]]
    ) -> str:
        if environment_id not in self._held:
            if not environment_id or not episode_id:
                raise DataError("environment_id and episode_id may not be empty")
            earlier = self._of_episode.get(episode_id, "")
            held = self._held[environment_id] = _Held(episode_id)
            self._of_episode[episode_id] = environment_id
            held.beginning = _task(self._make(held, earlier, begin))
            self.figures.opened += 1
        held = self._known(environment_id)
        assert held.beginning is not None, "it began with the call that made it known"
        return await _result_of(held.beginning)

    async def _make(self, held: _Held, earlier: str, begin: Callable[[OpenEnvironment], Awaitable[str]]) -> str:
        try:
            await self._close(earlier)
        except EpisodeError as error:
            log.warning("episode %s is opened again, and its earlier environment: %s", held.episode_id, error)
        held.environment = await self._source.open(held.episode_id)
        return await begin(held.environment)

    async def _step(self, environment: OpenEnvironment, action: JsonObject, key: str, seconds: float) -> str:
        self.figures.steps += 1
        result = await environment.step(action, deadline=time.time() + seconds, idempotency_key=key)
        return json.dumps(asdict(result))

    async def _close_orphan(self, environment_id: str) -> None:
        if (held := self._held.get(environment_id)) is None:  # its caller has closed it just now
            return
        self.figures.orphans += 1
        log.warning("episode %s: its environment is closed, for its caller has gone", held.episode_id)
        try:
            await self._close(environment_id)
        except EpisodeError as error:
            log.warning("episode %s: %s", held.episode_id, error)

    async def _close(self, environment_id: str) -> None:
        held = self._held.pop(environment_id, None)
        if held is None:
            return
        if self._of_episode.get(held.episode_id) == environment_id:
            del self._of_episode[held.episode_id]
        for task in (held.beginning, held.step, held.final_reward):
            if task is not None:
                task.cancel()
        if held.environment is not None:
            closing = asyncio.ensure_future(held.environment.close())
            closing.add_done_callback(lambda one: one.cancelled() or one.exception())
            await asyncio.shield(closing)  # also if the caller goes: the environment may block its process

    def _known(self, environment_id: str) -> _Held:
        """The environment, whose lease is extended."""
        held = self._held.get(environment_id)
        if held is None:
            raise EpisodeError("this service has not, or no longer, the environment of the call")
        held.last_look = self._num_looks + _LOOKS
        return held


async def _final_reward(environment: OpenEnvironment) -> str:
    return repr(await environment.final_reward())


def _begun(held: _Held) -> OpenEnvironment:
    if held.environment is None or held.beginning is None or not held.beginning.done():
        raise EpisodeError(f"episode {held.episode_id}: it has not begun yet")
    return held.environment


def _task(work: Coroutine[None, None, str]) -> asyncio.Task[str]:
    """Runs the work whether or not its caller waits for it."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda one: one.cancelled() or one.exception())  # else asyncio prints what nobody asks for
    return task


async def _result_of(task: asyncio.Task[Result]) -> Result:
    """Raises EpisodeError if the environment is closed meanwhile."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled():
            raise EpisodeError("the environment was closed meanwhile") from None
        raise


def _read_object(name: str, text: str) -> JsonObject:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{name} is no JSON object")
    return value
