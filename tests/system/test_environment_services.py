"""Environment services and samplers that are killed by kill -9, with real processes, gRPC and Redis."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from tandem.protos.types import Trajectory
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe, dump_recipe
from tandem.services.rollout.environment_services import EnvironmentServices
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.services.environments.test_environment_service import open_objects, serving, until
from tests.support.episodes import SAMPLING, ScriptedSampler, chat_encoder, prompt_of
from tests.support.paths import ROOT
from tests.support.processes import run_tandem, wait_until_gone
from tests.support.redis_ring import new_run
from tests.support.run_inputs import recipe_of, small_values
from tests.support.waiting import eventually
from tests.support.whole_run import WholeRun, processes_of, service_process

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
WORDS = ("one", "bad", "end")
CLASSES = "tests.support.environments"
SAMPLER = """
import asyncio, sys, threading
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import load_resolved
from tandem.services.rollout.environment_services import EnvironmentServices

async def main():
    recipe = load_resolved(sys.argv[1])
    services = EnvironmentServices(recipe, Buffer(sys.argv[2], recipe.run.run_id), threading.Event())
    await services.start()
    waiting, stepping = await services.open("a/0"), await services.open("b/0")
    await waiting.reset({}, seed=0, episode_id="a/0")
    await stepping.reset({}, seed=0, episode_id="b/0")
    print("begun", flush=True)
    await stepping.step({"content": "slow"}, deadline=1e10, idempotency_key="b/0/0")

asyncio.run(main())
"""


@pytest.fixture
def buffer(redis_url: str) -> Iterator[Buffer]:
    with closing(new_run(redis_url)) as buffer:
        yield buffer


def recipe_with(folder: Path, buffer: Buffer, name: str, **faults: str) -> Recipe:
    """Its environment `name` notes its calls and its open objects in `marks`."""
    marks = folder / "marks"
    marks.mkdir()
    environment = {
        "path": f"{CLASSES}:{name}",
        "arguments": {"marks": str(marks), "faults": faults},
        "service": True,
        "step_seconds": 60.0,
    }
    recipe = recipe_of(small_values(folder), run={"run_id": buffer.run_id}, environment=environment)
    (folder / "recipe.json").write_text(dump_recipe(recipe))
    return recipe


@pytest.fixture
def serve(tmp_path: Path, redis_url: str) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Starts an environment service by hand; its output goes to `environments-<number>.log`."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": redis_url, "HF_HUB_OFFLINE": "1"}
    with ExitStack() as stack:

        def start(number: int) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "tandem.services.cli", "serve", "environments", "recipe.json"]
            log = stack.enter_context(open(tmp_path / f"environments-{number}.log", "ab"))
            process = subprocess.Popen(
                [*command, "--replica", str(number)], cwd=tmp_path, env=variables, stdout=log, stderr=log
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def test_environments_of_a_killed_sampler_are_closed_within_a_lease(
    tmp_path: Path, buffer: Buffer, redis_url: str
) -> None:
    recipe = recipe_with(tmp_path, buffer, "Noted", slow="hang")

    async def main() -> None:
        async with serving(recipe, buffer, lease_seconds=3.0) as running, asyncio.timeout(60.0):
            command = [sys.executable, "-c", SAMPLER, str(tmp_path / "recipe.json"), redis_url]
            sampler = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
            assert sampler.stdout is not None
            assert await sampler.stdout.readline() == b"begun\n"
            await until(lambda: running.servicer.figures.steps == 1)
            assert (running.servicer.num_open, open_objects(recipe)) == (2, 2)
            sampler.kill()
            await sampler.wait()
            await until(lambda: running.servicer.num_open == 0 and open_objects(recipe) == 0)
            assert running.servicer.figures.orphans == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("Noted", ["reset", "step 0", "step 1", "reset", "step 0", "step 1", "step 2"]),
        ("Replayed", ["reset", "step 0", "step 1", "reset", "step 0", "step 1", "step 2"]),
        ("Restored", ["reset", "step 0", "step 1", "restore", "step 1", "step 2"]),
    ],
)
def test_an_episode_of_a_killed_service_goes_on_in_another_one(
    tmp_path: Path,
    buffer: Buffer,
    serve: Callable[[int], subprocess.Popen[bytes]],
    name: str,
    calls: list[str],
) -> None:
    recipe = recipe_with(tmp_path, buffer, name, bad="once hang")
    processes = {f"environments-{number}": serve(number) for number in range(2)}
    eventually(lambda: len(buffer.services()) == 2, 60.0)
    marks = tmp_path / "marks"

    async def main() -> tuple[Trajectory, int]:
        services = EnvironmentServices(recipe, buffer, threading.Event())
        await services.start()
        try:
            episodes = EpisodeSampler(
                ScriptedSampler(lambda _: WORDS),
                services,
                EpisodeEncoder(chat_encoder(tmp_path / "model")),
                recipe.environment,
                seed=5,
            )
            playing = asyncio.create_task(episodes.sample(prompt_of(), SAMPLING, 1))
            async with asyncio.timeout(60.0):
                await until(lambda: any(marks.glob("fault-*")) or playing.done())
                (address,) = {one.address for one in services._replicas if one.open}
                (holder,) = {known for known, at in buffer.services().items() if at == address}
                (below,) = psutil.Process(processes[holder].pid).children()
                processes[holder].kill()
                return await playing, below.pid
        finally:
            await services.close()

    row, of_the_killed = asyncio.run(main())
    wait_until_gone(of_the_killed)
    assert (row.text, row.earned_reward) == ("one\nbad\nend", 1.5)
    assert row.metadata["resumed_at"] == ([] if name == "Noted" else [1])
    lines = [line.split() for line in (marks / "calls").read_text().splitlines()]
    assert [f"step {line[1].split('/')[-2]}" if line[0] == "step" else line[0] for line in lines] == calls
    same_key = len({line[1] for line in lines if line[0] == "step"}) == 3
    assert same_key == (name != "Noted"), "a step that is made again has the key of the first one"
    assert len([*marks.glob("open-*")]) == 1, "only the killed one could not close its environment"


def test_a_service_that_gets_sigterm_keeps_its_episode_and_ends_with_it(
    tmp_path: Path, buffer: Buffer, serve: Callable[[int], subprocess.Popen[bytes]]
) -> None:
    recipe = recipe_with(tmp_path, buffer, "Noted")
    process = serve(0)
    eventually(lambda: bool(buffer.services()), 60.0)

    async def main() -> None:
        services = EnvironmentServices(recipe, buffer, threading.Event())
        await services.start()
        try:
            async with asyncio.timeout(60.0):
                episode = await services.open("a/0")
                await episode.reset({}, seed=0, episode_id="a/0")
                process.terminate()
                await until(lambda: not buffer.services())
                assert (await episode.step({"content": "one"}, deadline=1e10, idempotency_key="a/0/0")).messages
                assert process.poll() is None
                await episode.close()
                assert await asyncio.to_thread(process.wait, 60.0) == 0
        finally:
            await services.close()

    asyncio.run(main())
    assert "takes no new episodes; 1 are being played" in (tmp_path / "environments-0.log").read_text()


@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("NoSnapshots", "environment.max_turns=2", ":NoSnapshots: the class has no method snapshot and no restore"),
        ("Noted", "environment.service=false", "environment.service is false"),
        ("Noted", "environment.path=", "the recipe has no environment to serve; set environment.path or"),
    ],
)
def test_a_service_that_cannot_serve_the_recipe_says_so_in_one_line(
    tmp_path: Path, buffer: Buffer, redis_url: str, name: str, override: str, says: str
) -> None:
    recipe_with(tmp_path, buffer, name)
    done = run_tandem("serve", "environments", tmp_path / "recipe.json", override, TANDEM_REDIS_URL=redis_url)
    lines = [line for line in done.stderr.splitlines() if line.startswith("tandem: ")]
    assert done.returncode == 2 and "Traceback" not in done.stderr and says in lines[-1], done.stdout + done.stderr


def test_no_process_of_a_run_outlives_its_killed_supervisor_while_environments_step(tmp_path: Path) -> None:
    run = WholeRun(
        tmp_path,
        run={"run_id": "orphans", "total_batches": 100_000},
        environment={"service": True, "path": f"{CLASSES}:Unhurried", "max_turns": 4, "max_turn_tokens": 16},
        reward={"scorer": "earned"},
    )
    supervisor = run.start("run", str(run.recipe))
    run.wait_for(lambda: bool(run.metrics()), supervisor)
    tree = psutil.Process(supervisor.pid).children(recursive=True)
    assert service_process(supervisor, "environments").children(), "the environments' processes"
    supervisor.kill()
    assert psutil.wait_procs(tree, timeout=60)[1] == []
    assert processes_of(run) == [], "nor what was started meanwhile"
    supervisor.wait(10)
