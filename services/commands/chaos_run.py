"""What `tandem chaos` does: it runs a recipe, brings random faults over it, and checks that nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import psutil
from rich.console import Console
from rich.table import Table

from tandem.protos.errors import ConfigError, EnvironmentLackError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import STATES
from tandem.services.chaos.disk import SmallDisk, check_empty, check_mountable
from tandem.services.chaos.faults import Run
from tandem.services.chaos.injector import LAST_LINES, Injector, Result, described
from tandem.services.chaos.processes import Supervisor, service_of
from tandem.services.chaos.proxy import RedisProxy, check_passable
from tandem.services.chaos.redis import OwnRedis
from tandem.services.chaos.schedule import KINDS, Kind, schedule
from tandem.services.chaos.signals import DeferredSignals
from tandem.services.chaos.summary import as_json, recoveries
from tandem.services.command_line import cell, print_line
from tandem.services.config import Recipe, load_recipe
from tandem.services.launchers.children import describe_exit
from tandem.services.run.estimates import disk_need_bytes
from tandem.services.run.folder import external_redis_url
from tandem.services.run.model_check import ModelFacts
from tandem.services.run.preflight import check_recipe
from tandem.trainer.checkpoints.durable import write_file

_SPARE_DISK_BYTES = 1 << 30  # Redis' log, which is rewritten from 256 MiB on, and the logs of the services
_REDIS_SECONDS = 2.0


def run_under_faults(
    recipe_file: Path,
    overrides: Sequence[str],
    faults: int,
    seed: int,
    kinds: str,
    output: Path | None,
    console: Console,
) -> int:
    """Returns 0 if the run ended with all faults made and nothing lost, else 1. Raises UserError for bad input, and
    KeyboardInterrupt after SIGINT, SIGTERM or SIGHUP, once the run is stopped and the result shown.
    """
    if output is not None:
        check_writable(output)
    given = [*overrides, "run.keep_batches=0"]  # the last check reads all batches
    recipe = load_recipe(recipe_file, given)
    report = partial(print_line, console)
    with DeferredSignals():
        usable = usable_kinds(kinds, recipe, report)
    facts = check_recipe(recipe, resume=False)
    redis_url = external_redis_url(recipe)
    planned = schedule(recipe, faults, seed, usable, own_redis=not redis_url)
    with DeferredSignals() as signals, ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-chaos-", dir="/tmp")))  # a short path
        disk = stack.enter_context(_small_disk(recipe, facts)) if "disk" in usable else None
        redis = None if redis_url else stack.enter_context(OwnRedis(recipe.folder))
        place = redis.url if redis is not None else redis_url
        proxy = None
        if {"cut", "slow"}.intersection(usable):
            proxy = stack.enter_context(RedisProxy(scratch / "redis.sock", place, service_of))
        buffer = Buffer(place, recipe.run.run_id, outage_seconds=_REDIS_SECONDS)
        stack.enter_context(closing(buffer))
        # The address is in the environment, not in the recipe: the run can go on without the proxy.
        arguments = [str(recipe_file), *given, "run.redis_url="]
        log_file = scratch / "run.log"
        supervisor = Supervisor(arguments, recipe.folder, proxy.url if proxy else place, log_file)
        stack.callback(_keep_log, log_file, recipe.folder)
        stack.enter_context(supervisor)
        run = Run(supervisor, proxy, redis, disk)
        report(f"{faults} faults ({', '.join(usable)}) come over {recipe.run.total_batches} batches")
        result = Injector(planned, run, buffer, recipe, report).run(lambda: signals.came)
        failed = show(result, faults, supervisor.last_lines(LAST_LINES), console)
        if output is not None:
            settings = {"recipe": str(recipe_file), "overrides": list(overrides), "seed": seed, "kinds": usable}
            _write(output, json.dumps({**settings, **as_json(result, faults)}, indent=2) + "\n")
        if result.exit_code is None:
            report(f"stopping the run in {recipe.folder} ...")
    return 1 if failed else 0


def check_writable(file: Path) -> None:
    """Raises ConfigError if the result cannot be written there."""
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--json: {file} cannot be written ({error.strerror}); name another file") from None


def usable_kinds(given: str, recipe: Recipe, report: Callable[[str], None]) -> list[Kind]:
    """The kinds named in `given`, separated by commas. If it is empty, all that are possible here; says why others are
    not. Raises ConfigError for an unknown kind, EnvironmentLackError for one that is named and not possible.
    """
    names = [name.strip() for name in given.split(",")] if given else list(KINDS)
    if unknown := [name for name in names if name not in KINDS]:
        raise ConfigError(f"--kinds: {unknown[0]!r} is no kind of fault; there are {', '.join(KINDS)}")
    usable: list[Kind] = []
    for kind in KINDS:
        if kind not in names:
            continue
        try:
            _check_kind(kind, recipe)
        except EnvironmentLackError as error:
            if given:
                raise
            report(f"without {kind}: {error}")
        else:
            usable.append(kind)
    return usable


def _check_kind(kind: Kind, recipe: Recipe) -> None:
    """Raises EnvironmentLackError if there can be no such fault."""
    redis_url = external_redis_url(recipe)
    if kind == "redis-loss" and redis_url:
        remedy = "leave out redis-loss, or run.redis_url and TANDEM_REDIS_URL"
        raise EnvironmentLackError(f"the run uses a Redis that is not its own and is not restarted; {remedy}")
    if kind in ("cut", "slow") and redis_url:
        check_passable(redis_url)
    if kind == "disk":
        check_empty(recipe.folder)
        check_mountable()


def _small_disk(recipe: Recipe, facts: ModelFacts | None) -> SmallDisk:
    """Raises EnvironmentLackError if the disk, whose files are in memory, may take more than there is."""
    need, free = int(disk_need_bytes(recipe, facts)) + _SPARE_DISK_BYTES, psutil.virtual_memory().available
    if need > free:
        need_and_free = f"{need / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        raise EnvironmentLackError(f"the small disk of the run folder may take {need_and_free}; leave out disk")
    return SmallDisk(recipe.folder, need)


def _write(file: Path, text: str) -> None:
    try:
        write_file(file, text.encode())
    except OSError as error:
        raise EnvironmentLackError(f"--json: {file} cannot be written ({error.strerror})") from None


def _keep_log(log_file: Path, folder: Path) -> None:
    """What `tandem run` has printed, beside the logs of its services."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    shutil.copy(log_file, folder / "logs" / "run.log")


def show(result: Result, wanted: int, last_lines: Sequence[str], console: Console) -> bool:
    """Prints how fast what recovered, where the groups are, and what went wrong. Returns whether something did."""
    for made in result.made:
        if made.recovery_seconds is None:
            print_line(console, described(made, wanted))
    table = Table("fault", "of", "times", "median s", "worst s", box=None, header_style="bold", pad_edge=False)
    for row in recoveries(result.made):
        seconds = ("–" if one is None else f"{one:.1f}" for one in (row.median_seconds, row.worst_seconds))
        table.add_row(row.kind, cell(row.target), str(row.faults), *seconds)
    if result.made:
        console.print(table)
    if result.groups:
        states = " + ".join(f"{result.groups[state]} {state}" for state in STATES if result.groups[state])
        print_line(console, f"groups: {result.groups['admitted']} admitted = {states or 0}")
    failures = [f"VIOLATION: {violation}" for violation in result.violations]
    if result.exit_code:
        failures += [f"the run failed ({describe_exit(result.exit_code)}); it printed last:", *last_lines]
    if result.interrupted:
        failures.append(f"interrupted after {len(result.made)} of {wanted} faults")
    elif len(result.made) < wanted:
        more = "; raise run.total_batches" if result.exit_code == 0 else " before the run ended"
        failures.append(f"only {len(result.made)} of {wanted} faults were made{more}")
    for line in failures:
        print_line(console, line)
    sound = " and was sound" if result.num_checks and not result.violations else ""
    checked = f"the ledger was checked {result.num_checks} times{sound}"
    print_line(console, f"{len(result.made)} faults in {result.seconds:.0f} s; {checked}")
    return bool(failures)
