"""`tandem run`: starts every service on this machine, restarts what dies, and ends everything when the run ends.

The supervisor stands beside the data path, never in it: if it were only this file, the ring would still turn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from protos.errors import TandemError, UserError
from services.buffer.buffer import Buffer
from services.children import Child, ChildSpec
from services.config import Recipe, dump_recipe
from services.control import ControlServer
from services.crew import ALONG_THE_RING, FAILED, FINISHED, Crew
from services.placement import place
from services.preflight import check_recipe, worst_case_redis_bytes
from services.progress import Progress, RunWatch
from services.redis_child import RedisChild
from services.run_folder import CONFIG_FILE, RunAddress, RunLock, external_redis_url, write_text


def run_recipe(recipe: Recipe, resume: bool, *, console: Console) -> int:
    """Runs a recipe to its end in its run folder. Returns 0 when it is trained, 1 when it failed, 2 when a service found the
    user's input wrong, 130 when it was stopped by Ctrl-C, SIGTERM or StopRun.

    Raises:
        UserError: bad input, found before anything was started.
    """
    check_recipe(recipe, resume=resume)
    with RunLock(recipe.folder) as lock, ExitStack() as stack:
        crew = Crew(say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
        stack.enter_context(crew.signals())
        redis_url = external_redis_url(recipe)
        if not redis_url:
            redis = stack.enter_context(RedisChild(recipe.folder, say=crew.say))
            redis_url = redis.url
            crew.chores.append(redis.attend)
        buffer = Buffer(redis_url, recipe.run.run_id)
        stack.callback(buffer.close)
        buffer.check_memory(worst_case_redis_bytes(recipe))
        create_ledger(buffer, recipe, resume)
        watch = stack.enter_context(RunWatch(recipe, buffer))
        crew.progress_mark = watch.progress_mark
        crew.last_beat = lambda name: watch.last_beats.get(name, 0.0)
        control = stack.enter_context(ControlServer(recipe, crew, buffer))
        buffer.register_service("controller", control.address)
        lock.publish(RunAddress(os.getpid(), recipe.run.run_id, redis_url, control.address))
        crew.children = [Child(spec, crew.token) for spec in child_specs(recipe, redis_url)]
        with Progress(watch, crew.states, console):
            outcome = crew.run()
        return _verified(buffer, crew.say) if outcome == FINISHED else outcome


def create_ledger(buffer: Buffer, recipe: Recipe, resume: bool) -> None:
    """Saves the resolved recipe and creates the run's ledger in Redis, or on resume finds it there and updates what is wanted.

    Raises:
        UserError: Redis holds a run of that id already, or cannot hold this one; no run is left in the folder then.
    """
    config = recipe.folder / CONFIG_FILE
    write_text(config, dump_recipe(recipe))
    reward = recipe.reward  # its stage gives a group back after each attempt in vain
    try:
        buffer.create(
            groups_per_batch=recipe.run.groups_per_batch,
            staleness_budget=recipe.run.staleness_budget,
            target_groups=recipe.run.total_batches * recipe.run.groups_per_batch,
            failure_budget={"infrastructure": reward.infrastructure_attempts, "data": reward.max_attempts},
            resume=resume,
        )
    except UserError:
        if not resume:
            config.unlink()
        raise


def child_specs(recipe: Recipe, redis_url: str) -> list[ChildSpec]:
    """The services of a run: feed, every rollout replica, reward, trainer; each reads the resolved configuration."""
    config = str(recipe.folder / CONFIG_FILE)
    arguments = {service: [service, config] for service in ("feed", "reward", "trainer")}
    for replica in range(recipe.rollout.num_replicas):
        arguments[f"rollout-{replica}"] = ["rollout", config, "--replica", str(replica)]
    order = sorted(
        arguments, key=lambda name: -ALONG_THE_RING.index(name.partition("-")[0])
    )  # the slowest to be ready first
    return [
        ChildSpec(
            name=name,
            command=(sys.executable, "-m", "services.cli", "serve", *arguments[name]),
            log_file=recipe.folder / "logs" / f"{name}.log",
            environment={**common_environment(redis_url), **place(recipe, name)},
        )
        for name in order
    ]


def common_environment(redis_url: str) -> dict[str, str]:
    """What every service gets. The package's own root is put on the path, so that a run may start in any folder."""
    root = str(Path(__file__).resolve().parents[1])
    search_path = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"TANDEM_REDIS_URL": redis_url, "PYTHONPATH": os.pathsep.join(dict.fromkeys(search_path))}


def _verified(buffer: Buffer, say: Callable[[str], None]) -> int:
    """The last word on a finished run: its ledger must add up."""
    try:
        violations = buffer.verify()
    except TandemError as error:
        say(f"the ledger of the finished run could not be checked: {error}")
        return FAILED
    for violation in violations:
        say(f"ledger: {violation}")
    return FAILED if violations else FINISHED
