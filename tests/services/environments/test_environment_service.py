"""Environments in a service: a real class in its process, real gRPC between two event loops' ends, and a real Redis."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.protos import common_pb2, environments_pb2_grpc
from tandem.protos.errors import EpisodeError, UnavailableError
from tandem.rollout.environments import other_interpreter
from tandem.rollout.environments.process import EnvironmentPool, RemoteEnvironment
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.environments.server import RPC_LIMITS, SERVICE_NAME, EnvironmentServicer
from tandem.services.rollout import environment_services
from tandem.services.rollout.environment_services import EnvironmentServices
from tandem.services.rpc.server import RpcServer, start_server
from tandem.services.rpc.tokens import Tokens
from tests.support.environments import ECHOED
from tests.support.paths import ROOT
from tests.support.redis_ring import new_run
from tests.support.run_inputs import recipe_of, small_values

CLASSES = "tests.support.environments"
TIC_TAC_TOE = f"{ROOT}/examples/environments/tic_tac_toe.py:TicTacToe"
LONG = 60.0


class Running:
    """A service, of which the test has both ends."""

    def __init__(self, servicer: EnvironmentServicer, server: RpcServer, pool: EnvironmentPool) -> None:
        self.servicer, self.server, self.pool = servicer, server, pool


@asynccontextmanager
async def serving(
    recipe: Recipe, buffer: Buffer, name: str = "environments-0", lease_seconds: float = LONG
) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        pool = EnvironmentPool(recipe.environment)
        stack.push_async_callback(pool.close)
        await pool.start()
        servicer = EnvironmentServicer(pool, lease_seconds, lambda: buffer.unregister_service(name))
        server = await start_server(
            "127.0.0.1",
            0,
            info=common_pb2.InfoReply,
            register=lambda one: environments_pb2_grpc.add_EnvironmentServiceServicer_to_server(servicer, one),
            service_names=[SERVICE_NAME],
            limits=RPC_LIMITS,
            tokens=Tokens.of_run(buffer.secret()),
        )
        stack.push_async_callback(server.stop, grace_seconds=0.0)
        closing = asyncio.create_task(servicer.close_orphans())
        stack.callback(closing.cancel)
        buffer.register_service(name, server.address)
        yield Running(servicer, server, pool)


@asynccontextmanager
async def connected(recipe: Recipe, buffer: Buffer) -> AsyncIterator[EnvironmentServices]:
    services = EnvironmentServices(recipe, buffer, threading.Event())
    try:
        await services.start()
        yield services
    finally:
        await services.close()


def in_time(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LONG):
            await main()

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(recipe: Recipe) -> list[str]:
    file = Path(str(recipe.environment.arguments["marks"])) / "calls"
    return file.read_text().splitlines() if file.exists() else []


def open_objects(recipe: Recipe) -> int:
    return len([*Path(str(recipe.environment.arguments["marks"])).glob("open-*")])


async def step(environment: Any, text: str, key: str, seconds: float = LONG) -> Any:
    return await environment.step(said(text), deadline=time.time() + seconds, idempotency_key=key)


def test_an_episode_in_a_service_is_that_of_its_class_and_goes_on_from_a_snapshot(
    recipe: Recipe, buffer: Buffer
) -> None:
    async def main() -> None:
        async with serving(recipe, buffer) as running, connected(recipe, buffer) as services:
            assert (services.resume, services.tools) == ("snapshot", [])
            first = await services.open("0-0/1/a")
            (shown,) = (await first.reset({"ground_truth": "ü\ud800"}, seed=7, episode_id="0-0/1/a")).messages
            number = str(shown["content"]).removeprefix("number ")
            result = await step(first, "one", "0-0/1/a/0/x")
            assert (result.messages, result.reward) == ([{"role": "user", "content": "one?"}], 0.25)
            assert result.tool_outcomes == [ECHOED]
            assert (result.terminated, result.truncated, result.info) == (False, False, {"number": number})
            state = await first.snapshot()
            await first.close()
            await first.close()
            assert (running.servicer.num_open, open_objects(recipe)) == (0, 0)
            second = await services.open("0-0/1/a")
            await second.restore(state)
            result = await step(second, "end", "0-0/1/a/1/y")
            assert (result.terminated, result.reward, result.info) == (True, 1.0, {"number": number})
            await second.close()

    in_time(main)


def test_a_service_may_run_environments_under_another_interpreter(recipe: Recipe, buffer: Buffer) -> None:
    other = {"interpreter": sys.executable}
    recipe = recipe.model_copy(update={"environment": recipe.environment.model_copy(update=other)})

    async def main() -> None:
        async with serving(recipe, buffer) as running, connected(recipe, buffer) as services:
            (process,) = running.pool._processes
            assert process is not None and other_interpreter.__file__ in psutil.Process(process._process.pid).cmdline()
            environment = await services.open("0-0/1/a")
            await environment.reset({"ground_truth": "1"}, seed=7, episode_id="0-0/1/a")
            assert (await step(environment, "end", "0-0/1/a/0/x")).terminated
            await environment.close()

    in_time(main)


def test_an_environment_is_closed_within_a_lease_when_nobody_asks_for_it(recipe: Recipe, buffer: Buffer) -> None:
    """And not while its sampler, which waits for the policy's turn, sends heartbeats."""

    async def main() -> None:
        async with serving(recipe, buffer, lease_seconds=0.6) as running, connected(recipe, buffer) as services:
            abandoned, kept = await services.open("a/0"), await services.open("b/0")
            for environment, name in ((abandoned, "a/0"), (kept, "b/0")):
                await environment.reset({}, seed=0, episode_id=name)
            (replica,) = services._replicas
            replica.open.discard(abandoned._id)
            await until(lambda: running.servicer.figures.orphans == 1 and open_objects(recipe) == 1)
            with pytest.raises(EpisodeError, match="has not, or no longer, the environment"):
                await step(abandoned, "one", "a/0/0")
            await asyncio.sleep(1.2)
            assert (await step(kept, "end", "b/0/0")).terminated

    in_time(main)


def test_an_episode_that_is_opened_again_leaves_no_environment_behind(recipe: Recipe, buffer: Buffer) -> None:
    """The group of a dead sampler is another sampler's before the lease of its environment ends."""

    async def main() -> None:
        async with serving(recipe, buffer) as running:
            async with connected(recipe, buffer) as dead:
                environment = await dead.open("a/0")
                await environment.reset({}, seed=0, episode_id="a/0")
                state = await environment.snapshot()
            async with connected(recipe, buffer) as services:
                again = await services.open("a/0")
                await again.restore(state)
                assert (running.servicer.num_open, open_objects(recipe)) == (1, 1)
                assert (await step(again, "end", "a/0/0")).terminated
                await again.close()
                assert (running.servicer.num_open, open_objects(recipe)) == (0, 0)

    in_time(main)


def test_faults_of_an_environment_are_told_as_those_of_one_beside_the_sampler(recipe: Recipe, buffer: Buffer) -> None:
    faults = {"bad": "raise", "slow": "hang", "dead": "die"}
    arguments = {**recipe.environment.arguments, "faults": faults}
    recipe = recipe.model_copy(update={"environment": recipe.environment.model_copy(update={"arguments": arguments})})

    async def main() -> None:
        async with serving(recipe, buffer), connected(recipe, buffer) as services:
            for number, (text, told) in enumerate(
                [
                    ("bad", "^step: RuntimeError: the server of this environment is away"),
                    ("slow", r"^step has not ended after 0\.\d+ s"),
                    ("dead", "^the environments' process has ended"),
                ]
            ):
                name = f"{text}/0"
                environment = await services.open(name)
                await environment.reset({}, seed=0, episode_id=name)
                with pytest.raises(EpisodeError, match=told):
                    await step(environment, text, f"{name}/0", seconds=0.3 if text == "slow" else LONG)
                assert len(services._replicas) == 1 and not services._replicas[0].is_lost, number
                if text != "dead":
                    await environment.close()

    in_time(main)


def test_episodes_go_to_the_service_with_the_fewest_and_to_another_one_when_it_has_gone(
    recipe: Recipe, buffer: Buffer
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as first, serving(recipe, buffer, "environments-1") as second:
            gone = await first.enter_async_context(serving(recipe, buffer))
            async with connected(recipe, buffer) as services:
                await until(lambda: len(services._replicas) == 2)
                environments = [await services.open(f"{number}/0") for number in range(4)]
                for number, one in enumerate(environments):
                    await one.reset({}, seed=0, episode_id=f"{number}/0")
                assert gone.servicer.num_open == second.servicer.num_open == 2
                (lost, _) = [one for one in environments if one._replica.address == gone.server.address]
                await first.aclose()
                with pytest.raises(EpisodeError, match=f"environment service at {gone.server.address}: "):
                    await step(lost, "one", "key")
                again = await services.open("again/0")
                await again.reset({}, seed=0, episode_id="again/0")
                assert second.servicer.num_open == 3

    in_time(main)


def test_tic_tac_toe_is_played_against_a_service_and_goes_on_from_its_snapshots(tmp_path: Path, buffer: Buffer) -> None:
    """A player who takes the middle, then the first free cell, wins most games against one who moves at random."""
    recipe = recipe_of(small_values(tmp_path), environment={"path": TIC_TAC_TOE, "service": True})

    async def play(services: EnvironmentServices, seed: int, interrupted: bool) -> str:
        name = f"{seed}/{interrupted}"
        environment = await services.open(name)
        (board,) = (await environment.reset({}, seed=seed, episode_id=name)).messages
        for turn in range(5):
            free = [cell for cell in "512346789" if cell in board["content"].splitlines()[-3:][(int(cell) - 1) // 3]]
            result = await step(environment, free[0], f"{name}/{turn}")
            if result.terminated:
                await environment.close()
                return f"{result.info['result']} {result.reward}"
            (board,) = result.messages
            if interrupted:
                state = await environment.snapshot()
                await environment.close()
                environment = await services.open(name)
                await environment.restore(state)
        raise AssertionError("there are nine cells")

    async def main() -> None:
        async with serving(recipe, buffer) as running, connected(recipe, buffer) as services:
            games = await asyncio.gather(*(play(services, seed, False) for seed in range(60)))
            assert set(games) == {"won 1.0", "lost 0.0", "draw 0.5"} and games.count("won 1.0") > 30
            assert games[:20] == await asyncio.gather(*(play(services, seed, True) for seed in range(20)))
            assert running.servicer.num_open == 0

    in_time(main)


def test_without_a_service_a_sampler_waits_and_says_what_is_missing(
    recipe: Recipe, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_services, "START_SECONDS", 0.0)
    monkeypatch.setattr(environment_services, "WAIT_SECONDS", 0.0)
    lack = "no environment service of the run has answered for 0 s; start one with `tandem serve environments RECIPE`"

    async def main() -> None:
        with pytest.raises(UnavailableError, match=lack):
            async with connected(recipe, buffer):
                raise AssertionError("it has none")
        services = EnvironmentServices(recipe, buffer, threading.Event())
        with pytest.raises(EpisodeError, match=lack):
            await services.open("a/0")

    in_time(main)


def test_a_service_of_another_run_is_not_used(recipe: Recipe, buffer: Buffer, redis_url: str) -> None:
    async def main() -> None:
        async with serving(recipe, buffer) as running:
            other = new_run(redis_url)
            other.register_service("environments-0", running.server.address)
            services = EnvironmentServices(recipe, other, threading.Event())
            waiting = asyncio.create_task(services.start())
            await until(lambda: "this token is not known here" in services._fault)
            waiting.cancel()
            await services.close()
            other.close()

    in_time(main)


def test_a_lost_connection_stays_open_for_the_calls_under_way(
    recipe: Recipe, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To close it would cancel whoever waits for them, such as an episode that has just ended."""

    async def main() -> None:
        released = asyncio.Event()

        async def close_later(environment: RemoteEnvironment) -> None:
            await released.wait()

        async with serving(recipe, buffer), connected(recipe, buffer) as services:
            environment = await services.open("a/0")
            await environment.reset({}, seed=1, episode_id="a/0")
            monkeypatch.setattr(RemoteEnvironment, "close", close_later)
            closing = asyncio.create_task(environment.close())
            (replica,) = services._replicas
            await until(lambda: replica.num_calls == 1)
            replica.is_lost = True
            await services._connect_to(())
            assert services._replicas == [replica]
            released.set()
            await closing
            await services._connect_to(())
            assert services._replicas == []

    in_time(main)
