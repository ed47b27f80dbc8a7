"""Calls of an environment service that are made again, or are wrong, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from tandem.protos import environments_pb2, environments_pb2_grpc
from tandem.protos.errors import DataError, EpisodeError, TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.rpc.client import connect_async, from_rpc_error
from tandem.services.rpc.tokens import Role, bearer, run_token
from tests.services.environments.test_environment_service import (
    CLASSES,
    LONG,
    Running,
    calls,
    in_time,
    open_objects,
    serving,
)

Call = Callable[[Any, Any], Any]


@asynccontextmanager
async def calling(running: Running, buffer: Buffer) -> AsyncIterator[tuple[Any, Call]]:
    """A stub of the service, and what calls one of its methods as a sampler does."""
    async with connect_async(running.server.address) as channel:
        metadata = (bearer(run_token(buffer.secret(), Role.internal)),)
        stub = environments_pb2_grpc.EnvironmentServiceStub(channel)
        yield stub, lambda method, request: method(request, metadata=metadata, timeout=LONG)


async def thrice(call: Call, method: Any, request: Any) -> Any:
    """Calls twice at once and once more. All replies are the same."""
    one, other = await asyncio.gather(call(method, request), call(method, request))
    assert one == other == await call(method, request)
    return one


async def refused(kind: type[TandemError], told: str, reply: Awaitable[Any]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reply
    error = from_rpc_error(caught.value)
    assert isinstance(error, kind) and told in str(error)


def test_a_repeated_call_has_no_other_effect_and_the_same_reply(recipe: Recipe, buffer: Buffer) -> None:
    judged = {"path": f"{CLASSES}:Judged"}
    recipe = recipe.model_copy(update={"environment": recipe.environment.model_copy(update=judged)})

    async def main() -> None:
        async with serving(recipe, buffer) as running, calling(running, buffer) as (stub, call):
            repeated = partial(thrice, call)
            await repeated(stub.Open, environments_pb2.OpenRequest(environment_id="e", episode_id="a/0", task="{}"))
            request = environments_pb2.StepRequest(
                environment_id="e", idempotency_key="a/0/0", action='{"content": "random"}', timeout_seconds=LONG
            )
            await repeated(stub.Step, request)
            call(stub.Step, request).cancel()
            request.idempotency_key = "a/0/1"
            await repeated(stub.Step, request)
            reply = await repeated(stub.FinalReward, environments_pb2.FinalRewardRequest(environment_id="e"))
            assert reply.reward == 2.0
            assert calls(recipe) == ["reset a/0", "step a/0/0", "step a/0/1", "final_reward"]
            assert (running.servicer.figures.opened, running.servicer.figures.steps) == (1, 2)
            await repeated(stub.Close, environments_pb2.CloseRequest(environment_id="e"))
            await refused(EpisodeError, "has not, or no longer", call(stub.Step, request))

    in_time(main)


def test_a_bad_call_is_a_typed_error_and_the_episode_goes_on(recipe: Recipe, buffer: Buffer) -> None:
    def step_of(key: str, action: str = '{"content": "one"}', seconds: float = LONG) -> environments_pb2.StepRequest:
        return environments_pb2.StepRequest(
            environment_id="e", idempotency_key=key, action=action, timeout_seconds=seconds
        )

    async def main() -> None:
        async with serving(recipe, buffer) as running, calling(running, buffer) as (stub, call):
            for task, told in (("[]", "task is no JSON object"), ("{", "task is not JSON")):
                opened = environments_pb2.OpenRequest(environment_id="f", episode_id="b/0", task=task)
                await refused(DataError, told, call(stub.Open, opened))
            await refused(DataError, "may not be empty", call(stub.Open, environments_pb2.OpenRequest(task="{}")))
            await call(stub.Open, environments_pb2.OpenRequest(environment_id="e", episode_id="a/0", task="{}"))
            for action, told in (("no JSON", "action is not JSON"), ("[]", "action is no JSON object")):
                await refused(DataError, told, call(stub.Step, step_of("a/0/0", action)))
            for seconds in (0.0, -1.0, float("nan"), float("inf"), 86_401.0):
                await refused(DataError, "timeout_seconds is ", call(stub.Step, step_of("a/0/0", seconds=seconds)))
            await thrice(call, stub.Step, step_of("a/0/0"))
            assert calls(recipe) == ["reset a/0", "step a/0/0"] and running.servicer.figures.steps == 1

    in_time(main)


def test_a_repeated_restore_makes_one_environment(recipe: Recipe, buffer: Buffer) -> None:
    async def main() -> None:
        async with serving(recipe, buffer) as running, calling(running, buffer) as (stub, call):
            await call(stub.Open, environments_pb2.OpenRequest(environment_id="e", episode_id="a/0", task="{}"))
            state = (await call(stub.Snapshot, environments_pb2.SnapshotRequest(environment_id="e"))).state
            restored = environments_pb2.RestoreRequest(environment_id="g", episode_id="a/0", state=state)
            await thrice(call, stub.Restore, restored)
            assert calls(recipe) == ["reset a/0", "restore"]
            assert (running.servicer.num_open, open_objects(recipe)) == (1, 1), "the one before it is closed"
            spoilt = environments_pb2.RestoreRequest(environment_id="h", episode_id="b/0", state=b"spoilt")
            for _ in range(2):
                await refused(EpisodeError, "restore: ValueError", call(stub.Restore, spoilt))
            assert calls(recipe) == ["reset a/0", "restore"]

    in_time(main)
