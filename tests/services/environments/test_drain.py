"""Environment services that leave a run, with real environments, gRPC and Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from tandem.protos import environments_pb2, environments_pb2_grpc
from tandem.protos.environments_pb2 import DrainEnvironmentsRequest
from tandem.services.buffer.buffer import Buffer
from tandem.services.environments import server
from tandem.services.rollout import environment_services
from tandem.services.rpc.client import connect_async
from tandem.services.rpc.tokens import Role, bearer, run_token
from tests.services.environments.test_environment_service import connected, in_time, serving, step, until
from tests.support.redis_ring import new_run
from tests.support.run_inputs import recipe_of, small_values

LONG = 60.0


@pytest.fixture
def buffer(redis_url: str) -> Iterator[Buffer]:
    with closing(new_run(redis_url)) as buffer:
        yield buffer


def test_a_service_that_drains_keeps_its_episodes_to_their_end_and_gets_no_further_ones(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_services, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(server, "NOTICE_SECONDS", 0.0)
    environment = {"path": "tests.support.environments:Restored", "service": True}
    recipe = recipe_of(small_values(tmp_path), environment={**environment, "arguments": {"marks": str(tmp_path)}})
    allowed = {"metadata": [bearer(run_token(buffer.secret(), Role.operate))], "timeout": LONG}

    async def main() -> None:
        async with serving(recipe, buffer) as leaving, connected(recipe, buffer) as services:
            episode = await services.open("a/0")
            await episode.reset({}, seed=1, episode_id="a/0")
            channels = connect_async(leaving.server.address)
            async with serving(recipe, buffer, "environments-1") as staying, channels as channel:
                drain = environments_pb2_grpc.EnvironmentServiceStub(channel).Drain
                with pytest.raises(grpc.aio.AioRpcError, match="timeout_seconds is -1"):
                    await drain(DrainEnvironmentsRequest(timeout_seconds=-1.0), **allowed)
                assert buffer.services().keys() == {"environments-0", "environments-1"}
                assert (await drain(DrainEnvironmentsRequest(), **allowed)).num_open == 1
                assert leaving.servicer.is_draining and buffer.services().keys() == {"environments-1"}
                used = {staying.server.address}
                await until(lambda: {one.address for one in services._replicas if not one.is_lost} == used)
                draining = asyncio.ensure_future(drain(DrainEnvironmentsRequest(timeout_seconds=LONG), **allowed))
                assert (await step(episode, "word", "a/0/0")).reward is not None
                other = await services.open("b/0")
                await other.reset({}, seed=1, episode_id="b/0")
                assert (leaving.servicer.num_open, staying.servicer.num_open) == (1, 1)
                assert not draining.done()
                await episode.close()
                assert (await draining) == environments_pb2.DrainEnvironmentsReply(num_open=0)
                await other.close()

    in_time(main)
    assert not buffer.services().keys() - {"environments-1"}


def test_a_later_service_of_the_same_name_keeps_its_place(redis_url: str, buffer: Buffer) -> None:
    with closing(Buffer(redis_url, buffer.run_id)) as later:
        buffer.register_service("environments-0", "127.0.0.1:1")
        later.register_service("environments-0", "127.0.0.1:2")
        buffer.unregister_service("environments-0")
        assert buffer.services() == {"environments-0": "127.0.0.1:2"}
        later.unregister_service("environments-0")
        assert buffer.services() == {}
