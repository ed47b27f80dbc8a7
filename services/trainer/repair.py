"""What `tandem repair` can set right in a run that is not running: what killed writers left in its folder, leases whose
holder is gone, and a ledger that does not agree with the folder.

A trainer that starts does the same. Everything else is only named, with what to do about it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tandem.protos.errors import DeadlineError, RunExistsError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.rollback import run_to_end
from tandem.services.config import load_resolved
from tandem.services.run.best_version import BEST_FOLDER
from tandem.services.run.folder import CONFIG_FILE, EXPORTS_FOLDER, external_redis_url, resume_command, running
from tandem.services.run.resume import from_its_weights
from tandem.services.trainer.folder_check import compare_with_folder
from tandem.services.trainer.recovery import (
    CHECKPOINTS_FOLDER,
    begin_incarnation,
    find_resume_point,
    read_records,
    trainer_lock,
)
from tandem.trainer.batch.record import BATCHES_FOLDER, recorded_versions
from tandem.trainer.batch.rejected import REJECTED_FOLDER
from tandem.trainer.checkpoints.durable import leftovers

_FOLDERS = (BATCHES_FOLDER, BEST_FOLDER, CHECKPOINTS_FOLDER, EXPORTS_FOLDER, REJECTED_FOLDER, "weights")
_HEARTBEAT_WAIT_SECONDS = 2.5  # one is sent each second
_HEARTBEAT_POLL_SECONDS = 0.2
_LOCK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """One repair."""

    text: str
    do: Callable[[], None]


@dataclass(slots=True)
class Plan:
    """What can be repaired, and one line with a remedy for each thing that cannot."""

    steps: list[Step] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)


@contextmanager
def not_running(buffer: Buffer, folder: Path) -> Iterator[None]:
    """Keeps a trainer from starting in the folder. Raises RunExistsError if the run is running."""
    refusal = RunExistsError(f"{folder}: a run is not repaired while it runs; stop it by `tandem stop {folder}`")
    # The embedded Redis is that of the supervisor, or was started for this command alone.
    is_external = bool(external_redis_url(load_resolved(folder / CONFIG_FILE)))
    if running(folder) is not None or (is_external and any(_heartbeats(buffer))):
        raise refusal
    try:
        with trainer_lock(folder, _LOCK_SECONDS):
            yield
    except DeadlineError:
        raise refusal from None


def plan_repair(buffer: Buffer, folder: Path) -> Plan:
    """What there is to repair. Changes nothing."""
    plan = Plan()
    for left in (one for place in _places(folder) for one in leftovers(place)):
        plan.steps.append(Step(f"remove {left}, which a writer that was killed has left", partial(_remove, left)))
    for worker, number in _holders(buffer).items():
        leases = f"{number} lease{'s' if number > 1 else ''}"
        give_back = partial(run_to_end, buffer.connection.run, "give_back", worker)
        plan.steps.append(Step(f"return {leases} of {worker}, which is gone, to the queue", give_back))
    found = compare_with_folder(buffer, folder)
    beyond = found.violations
    if found.needs_rollback and found.can_train:
        point = find_resume_point(folder)
        again = f", and enter versions {point.recorded[0]} to {point.last_version}" if point.recorded else ""
        text = (
            f"set the ledger to the checkpoint of version {point.checkpoint_version}{again}, as a trainer that starts"
        )
        plan.steps.append(Step(text, partial(_roll_back, buffer, folder)))
        beyond = [line for line in found.violations if line not in found.mended]
    plan.beyond += beyond
    if broken := buffer.verify():
        plan.beyond += [*broken, f"the ledger contradicts itself: {_rebuilt(buffer, folder)}"]
    return plan


def _roll_back(buffer: Buffer, folder: Path) -> None:
    """As a trainer that takes the run over."""
    version = find_resume_point(folder).checkpoint_version
    records = read_records(buffer, folder, version)
    buffer.rollback(begin_incarnation(buffer, folder), version, records)


def _rebuilt(buffer: Buffer, folder: Path) -> str:
    """How a ledger that cannot be repaired is replaced."""
    if recorded_versions(folder)[:1] != [1]:  # a new one would not know what the checkpoints already contain
        words = "it cannot be repaired, nor built anew without the records of all batches"
        return f"{words}; start a new run{from_its_weights(folder)}"
    data = folder / "redis"
    away = f"move {data} away" if data.is_dir() else f"remove the keys {buffer.connection.key('*')} from Redis"
    return f"{away} and go on by `{resume_command(folder)}`, which builds it anew from the records of all batches"


def _heartbeats(buffer: Buffer) -> Iterator[str]:
    """The services that send heartbeats. Redis' clock stands still while Redis is away, so new ones are waited for."""
    asked_at = time.monotonic()
    while (silences := buffer.silences()) and time.monotonic() < asked_at + _HEARTBEAT_WAIT_SECONDS:
        elapsed = time.monotonic() - asked_at
        yield from (name for name, silence in silences.items() if silence < elapsed)
        time.sleep(_HEARTBEAT_POLL_SECONDS)


def _holders(buffer: Buffer) -> dict[str, int]:
    """The number of leases of every worker that holds some."""
    connection = buffer.connection
    names = sorted(name.decode() for name in connection.hash("generations"))
    keys = [connection.key(f"leases:{name}") for name in names]
    numbers = connection.retried(lambda: [connection.redis.zcard(key) for key in keys])
    return {name: number for name, number in zip(names, numbers, strict=True) if number}


def _places(folder: Path) -> Iterator[Path]:
    yield folder
    for name in _FOLDERS:
        yield folder / name
    for name in (BATCHES_FOLDER, REJECTED_FOLDER):
        yield from sorted(one for one in (folder / name).glob("[0-9]*") if one.name.isdigit())


def _remove(left: Path) -> None:
    if left.is_dir():
        shutil.rmtree(left)
    else:
        left.unlink()
