"""`tandem run`: starts all services on this machine, restarts those that die, and stops all when the run ends."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

from rich.console import Console

from tandem.rollout.engine import remove_leftovers
from tandem.services.buffer.buffer import Buffer
from tandem.services.command_line import print_line
from tandem.services.config import Recipe
from tandem.services.run.children import Child, ChildSpec, RedisChild
from tandem.services.run.control import ControlServer
from tandem.services.run.folder import CONFIG_FILE, RunAddress, RunLock, external_redis_url
from tandem.services.run.ledger import check_redis_room, create_ledger
from tandem.services.run.outcome import report_outcome
from tandem.services.run.placement import place, starts_after
from tandem.services.run.preflight import check_recipe
from tandem.services.run.process_group import INTERRUPTED, SERVICE_ORDER, ProcessGroup
from tandem.services.run.progress import Progress, RunWatch


def run_recipe(recipe: Recipe, resume: bool, *, console: Console, lock: RunLock | None = None) -> int:
    """Runs a recipe in its run folder until it ends. `lock` is given if the caller has locked the folder already.

    Returns 0 if all batches were trained, 1 after a failure, 2 if a service rejected the user's input, 3 if the run
    ended with fewer batches although epochs were not limited, 130 after Ctrl-C, SIGTERM or StopRun. Raises UserError
    for bad input that is found before any process is started.
    """
    check_recipe(recipe, resume=resume)
    holding: AbstractContextManager[RunLock] = RunLock(recipe.folder) if lock is None else nullcontext(lock)
    with holding as held, ExitStack() as stack:
        stack.callback(remove_leftovers)  # of killed samplers
        processes = ProcessGroup(report=partial(print_line, console))
        stack.enter_context(processes.signals())
        redis_url = external_redis_url(recipe)
        if not redis_url:
            redis = stack.enter_context(RedisChild(recipe.folder, report=processes.report))
            redis_url = redis.url
            processes.on_poll.append(redis.restart_if_dead)
        buffer = Buffer(redis_url, recipe.run.run_id)
        stack.callback(buffer.close)
        check_redis_room(buffer, recipe)
        create_ledger(buffer, recipe, resume)
        watch = stack.enter_context(RunWatch(recipe, buffer))
        processes.on_poll.append(lambda: _report_warnings(watch, processes))
        processes.last_version = watch.last_version
        processes.last_heartbeat = lambda name: watch.last_heartbeats.get(name, 0.0)
        control = stack.enter_context(ControlServer(recipe, processes, buffer))
        buffer.register_service("controller", control.address)
        held.publish(RunAddress(os.getpid(), redis_url, control.address))
        processes.children = [Child(spec, processes.token) for spec in child_specs(recipe, redis_url)]
        with Progress(watch, processes.states, console):
            outcome = processes.run()
            if outcome != INTERRUPTED:
                watch.ask_redis()
                _report_warnings(watch, processes)
        return report_outcome(recipe, buffer, outcome, watch.snapshot.step, processes.report)


def _report_warnings(watch: RunWatch, processes: ProcessGroup) -> None:
    for warning in watch.take_warnings():
        processes.report(warning)


def child_specs(recipe: Recipe, redis_url: str) -> list[ChildSpec]:
    """The services of a run: feed, rollout replicas, reward, trainer. Each reads the resolved configuration."""
    config = str(recipe.folder / CONFIG_FILE)
    arguments = {service: [service, config] for service in ("feed", "reward", "trainer")}
    for replica in range(recipe.rollout.num_replicas):
        arguments[f"rollout-{replica}"] = ["rollout", config, "--replica", str(replica)]
    order = sorted(arguments, key=lambda name: -SERVICE_ORDER.index(name.partition("-")[0]))
    return [
        ChildSpec(
            name=name,
            command=(sys.executable, "-m", "tandem.services.cli", "serve", *arguments[name]),
            log_file=recipe.folder / "logs" / f"{name}.log",
            environment={"TANDEM_REDIS_URL": redis_url, **place(recipe, name)},
            start_after=starts_after(recipe, name),
        )
        for name in order  # the slowest to start comes first
    ]
