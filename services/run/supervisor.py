"""`tandem run`: starts every service on this machine, restarts what dies, and ends everything when the run ends.

The supervisor stands beside the data path, never in it: if it were only this file, the ring would still turn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

from rich.console import Console

from tandem.protos.errors import TandemError
from tandem.rollout.engine import remove_leftovers
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.run.children import Child, ChildSpec
from tandem.services.run.control import ControlServer
from tandem.services.run.crew import ALONG_THE_RING, FAILED, FINISHED, Crew
from tandem.services.run.folder import CONFIG_FILE, RunAddress, RunLock, external_redis_url
from tandem.services.run.ledger import check_redis_room, create_ledger
from tandem.services.run.placement import place
from tandem.services.run.preflight import check_recipe
from tandem.services.run.progress import Progress, RunWatch
from tandem.services.run.redis_child import RedisChild


def run_recipe(recipe: Recipe, resume: bool, *, console: Console, lock: RunLock | None = None) -> int:
    """Runs a recipe to its end in its run folder. Returns 0 when it is trained, 1 when it failed, 2 when a service
    found the user's input wrong, 130 when it was stopped by Ctrl-C, SIGTERM or StopRun. `lock`: the caller holds the
    folder already.

    Raises:
        UserError: bad input, found before anything was started.
    """
    check_recipe(recipe, resume=resume)
    holding: AbstractContextManager[RunLock] = RunLock(recipe.folder) if lock is None else nullcontext(lock)
    with holding as held, ExitStack() as stack:
        stack.callback(remove_leftovers)  # of samplers that were killed
        crew = Crew(say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
        stack.enter_context(crew.signals())
        redis_url = external_redis_url(recipe)
        if not redis_url:
            redis = stack.enter_context(RedisChild(recipe.folder, say=crew.say))
            redis_url = redis.url
            crew.chores.append(redis.attend)
        buffer = Buffer(redis_url, recipe.run.run_id)
        stack.callback(buffer.close)
        check_redis_room(buffer, recipe)
        create_ledger(buffer, recipe, resume)
        watch = stack.enter_context(RunWatch(recipe, buffer))
        crew.progress_mark = watch.progress_mark
        crew.last_beat = lambda name: watch.last_beats.get(name, 0.0)
        control = stack.enter_context(ControlServer(recipe, crew, buffer))
        buffer.register_service("controller", control.address)
        held.publish(RunAddress(os.getpid(), recipe.run.run_id, redis_url, control.address))
        crew.children = [Child(spec, crew.token) for spec in child_specs(recipe, redis_url)]
        with Progress(watch, crew.states, console):
            outcome = crew.run()
        return _verified(buffer, crew.say) if outcome == FINISHED else outcome


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
            command=(sys.executable, "-m", "tandem.services.cli", "serve", *arguments[name]),
            log_file=recipe.folder / "logs" / f"{name}.log",
            environment={**common_environment(redis_url), **place(recipe, name)},
        )
        for name in order
    ]


def common_environment(redis_url: str) -> dict[str, str]:
    """The environment variables every service gets."""
    return {"TANDEM_REDIS_URL": redis_url}


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
