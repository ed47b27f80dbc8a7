"""Environments in the environment services of a run: the samplers' side of environments.proto.

The services are found in the run's registry. A new episode goes to the one with the fewest episodes of this sampler. If
a service does not answer, the attempts at its episodes fail, and the next ones go to other services.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Collection, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar, cast

import grpc

from tandem.protos import environments_pb2, environments_pb2_grpc
from tandem.protos.contracts import JsonObject, Message, Observation, Resume, StepResult
from tandem.protos.errors import DeadlineError, EpisodeError, TandemError, UnavailableError, UserError
from tandem.services.addresses import target_of
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import ALIVE_SECONDS
from tandem.services.config import Recipe
from tandem.services.rpc.client import TokenChannel, connect_async, from_rpc_error
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.run.endpoint import calling_credentials

log = logging.getLogger(__name__)

START_SECONDS = 600.0
"""Longest wait for a first service."""
WAIT_SECONDS = 60.0
"""Longest wait for a service when none answers: the only one may be starting again."""
_LOOK_SECONDS = 1.0  # between two looks into the registry
_DESCRIBE_SECONDS = 5.0
_HEARTBEATS = 3  # in the time of a lease
_LONGEST_SECONDS = 86_400.0  # that a service takes; gRPC refuses those of centuries
_SHORTEST_SECONDS = 0.001  # of a step whose time is over
_MARGIN_SECONDS = 5.0  # beyond the time that a service keeps to
_PROCESS_SECONDS = 70.0  # the same where it may have to start a process first
_CLOSE_SECONDS = 15.0  # a service gives an environment five, and its process one more

Request = TypeVar("Request", contravariant=True)
Reply = TypeVar("Reply", covariant=True)


class _Method(Protocol[Request, Reply]):
    """A method of the stub."""

    def __call__(self, request: Request, *, timeout: float) -> Awaitable[Reply]: ...


class _Replica:
    """A connection to one service."""

    def __init__(self, address: str, channel: grpc.aio.Channel, token: str) -> None:
        self.address = address
        self.open: set[str] = set()
        """The environments that this sampler has there."""
        self.is_lost = False
        """Whether no other episode is to go there over this connection."""
        self.stub = environments_pb2_grpc.EnvironmentServiceStub(cast("grpc.aio.Channel", TokenChannel(channel, token)))
        self.num_calls = 0
        """Calls under way. To close the connection would cancel them, and whoever waits for them."""
        self.close = channel.close

    async def call(self, method: _Method[Request, Reply], request: Request, seconds: float) -> Reply:
        """The reply. A call whose connection breaks is made once more, which has no other effect than the first.

        Raises EpisodeError if the environment fails or the service does not answer, UserError if it refuses the call.
        """
        ends_at = time.monotonic() + seconds
        self.num_calls += 1
        try:
            try:
                return await _replied(method, request, seconds)
            except UnavailableError:
                return await _replied(method, request, max(ends_at - time.monotonic(), 0.0))
        except (EpisodeError, UserError):
            raise
        except TandemError as error:
            self.is_lost |= isinstance(error, UnavailableError | DeadlineError)
            raise EpisodeError(f"the environment service at {self.address}: {error}") from None
        finally:
            self.num_calls -= 1


class EnvironmentServices:
    """`EnvironmentSource` in the environment services of a run. `stop` ends the wait for the first one."""

    def __init__(self, recipe: Recipe, buffer: Buffer, stop: threading.Event) -> None:
        self.resume: Resume = "restart"
        self.tools: Sequence[JsonObject] = ()
        self.unsafe_tools: Collection[str] = ()
        self._buffer = buffer
        self._stop = stop
        self._step_seconds = min(recipe.environment.step_seconds, _LONGEST_SECONDS)
        self._credentials = calling_credentials(recipe)
        self._server_name = recipe.run.server_name
        self._token = ""
        self._lease_seconds = 0.0
        self._replicas: list[_Replica] = []
        """Besides those that are used, lost ones with environments of episodes that have not noticed it."""
        self._some_answer = asyncio.Event()
        self._fault = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Waits for a first service. Raises UnavailableError if none answers in time."""
        log.info("waits for an environment service of the run")
        self._token = run_token(await asyncio.to_thread(self._buffer.secret), Role.internal)
        self._tasks.append(asyncio.create_task(self._find()))
        deadline = time.monotonic() + START_SECONDS
        while not self._some_answer.is_set():
            if self._stop.is_set():
                return
            if time.monotonic() > deadline:
                raise UnavailableError(self._lack(START_SECONDS))
            await self._wait(_LOOK_SECONDS)
        self._tasks.append(asyncio.create_task(self._send_heartbeats()))

    async def open(self, episode_id: str) -> ServedEnvironment:
        """An environment on the service that has the fewest. Raises EpisodeError if none answers for a while."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (used := [one for one in self._replicas if not one.is_lost]):
            if time.monotonic() > deadline:
                raise EpisodeError(self._lack(WAIT_SECONDS))
            self._some_answer.clear()
            await self._wait(deadline - time.monotonic())
        return ServedEnvironment(min(used, key=lambda one: len(one.open)), episode_id, self._step_seconds)

    async def close(self) -> None:
        """Closes the connections. Environments that are still open end with their leases."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in self._replicas))

    async def _wait(self, seconds: float) -> None:
        """Waits for a service that answers. Raises the error of a task that has ended, which is a bug."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._some_answer.wait()
        for task in self._tasks:
            if task.done():
                task.result()

    def _lack(self, seconds: float) -> str:
        why = f" ({self._fault})" if self._fault else "; start one with `tandem serve environments RECIPE`"
        return f"no environment service of the run has answered for {seconds:.0f} s{why}"

    async def _find(self) -> None:
        """Connects to the services of the registry, again and again."""
        while True:
            try:
                await self._connect_to(await asyncio.to_thread(self._registered))
            except UnavailableError as error:  # Redis is away; the services that are known are used
                self._note(str(error))
            await asyncio.sleep(_LOOK_SECONDS)

    def _registered(self) -> set[str]:
        """The addresses of the services that sent a heartbeat lately."""
        services, silences = self._buffer.services(), self._buffer.silences()
        alive = {name for name, seconds in silences.items() if seconds <= ALIVE_SECONDS}
        return {services[name] for name in services if name.partition("-")[0] == "environments" and name in alive}

    async def _connect_to(self, addresses: Collection[str]) -> None:
        for one in self._replicas:
            one.is_lost |= one.address not in addresses
        known = {one.address for one in self._replicas if not one.is_lost}
        await asyncio.gather(*(self._connect(address) for address in addresses if address not in known))
        left = [one for one in self._replicas if one.is_lost and not one.open and not one.num_calls]
        self._replicas = [one for one in self._replicas if one not in left]
        await asyncio.gather(*(one.close() for one in left))
        if any(not one.is_lost for one in self._replicas):
            self._some_answer.set()

    async def _connect(self, address: str) -> None:
        """Uses a service from now on if it answers. The connection is new: a broken one is tried ever more rarely."""
        channel = connect_async(target_of([address]), self._credentials, self._server_name)
        replica = _Replica(address, channel, self._token)
        try:
            reply = await _replied(replica.stub.Describe, environments_pb2.DescribeRequest(), _DESCRIBE_SECONDS)
        except TandemError as error:  # it may have ended
            self._note(f"the environment service at {address}: {error}")
            await channel.close()
            return
        self.resume, self.tools = cast("Resume", reply.resume), json.loads(reply.tools)
        self.unsafe_tools = [*reply.unsafe_tools]
        self._lease_seconds = reply.lease_seconds
        self._replicas.append(replica)
        self._fault = ""
        log.info("uses the environment service at %s", address)

    def _note(self, fault: str) -> None:
        if fault != self._fault:
            log.warning("%s", fault)
        self._fault = fault

    async def _send_heartbeats(self) -> None:
        while True:
            seconds = self._lease_seconds / _HEARTBEATS
            await asyncio.sleep(seconds)
            await asyncio.gather(*(self._send_heartbeat(one, seconds) for one in self._replicas if one.open))

    async def _send_heartbeat(self, replica: _Replica, seconds: float) -> None:
        request = environments_pb2.HeartbeatRequest(environment_ids=sorted(replica.open))
        try:
            await replica.call(replica.stub.Heartbeat, request, seconds)
        except (EpisodeError, UserError) as error:  # the calls of its episodes fail, too
            self._note(str(error))


class ServedEnvironment:
    """An environment of one episode, as `OpenEnvironment`, in a service."""

    def __init__(self, replica: _Replica, episode_id: str, step_seconds: float) -> None:
        self._replica = replica
        self._episode_id = episode_id
        self._seconds = step_seconds
        self._id = uuid.uuid4().hex
        replica.open.add(self._id)

    async def reset(self, task: JsonObject, *, seed: int, episode_id: str) -> Observation:
        assert episode_id == self._episode_id, "an environment has one episode"
        names = {"environment_id": self._id, "episode_id": episode_id}
        request = environments_pb2.OpenRequest(**names, task=json.dumps(dict(task)), seed=seed)
        reply = await self._replica.call(self._replica.stub.Open, request, self._seconds + _PROCESS_SECONDS)
        return Observation(json.loads(reply.messages))

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        seconds = min(max(deadline - time.time(), _SHORTEST_SECONDS), self._seconds)
        request = environments_pb2.StepRequest(
            environment_id=self._id,
            idempotency_key=idempotency_key,
            action=json.dumps(dict(action)),
            timeout_seconds=seconds,  # clocks of two machines differ
        )
        reply = await self._replica.call(self._replica.stub.Step, request, seconds + _MARGIN_SECONDS)
        return StepResult(**json.loads(reply.result))

    async def final_reward(self) -> float:
        request = environments_pb2.FinalRewardRequest(environment_id=self._id)
        reply = await self._replica.call(self._replica.stub.FinalReward, request, self._seconds + _MARGIN_SECONDS)
        return float(reply.reward)

    async def snapshot(self) -> bytes:
        request = environments_pb2.SnapshotRequest(environment_id=self._id)
        reply = await self._replica.call(self._replica.stub.Snapshot, request, self._seconds + _MARGIN_SECONDS)
        state: bytes = reply.state
        return state

    async def restore(self, state: bytes) -> None:
        request = environments_pb2.RestoreRequest(environment_id=self._id, episode_id=self._episode_id, state=state)
        await self._replica.call(self._replica.stub.Restore, request, self._seconds + _PROCESS_SECONDS)

    async def close(self) -> None:
        """From here on no heartbeat names it, so that it also ends if the call is lost."""
        self._replica.open.discard(self._id)
        request = environments_pb2.CloseRequest(environment_id=self._id)
        await self._replica.call(self._replica.stub.Close, request, _CLOSE_SECONDS)


async def _replied(method: _Method[Request, Reply], request: Request, seconds: float) -> Reply:
    try:
        return await method(request, timeout=seconds)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
