"""A run is resumed once after a fault that can have ended it so; any other end is the run's own."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.protos.errors import EnvironmentLackError
from tandem.services.chaos.faults import EFFECTS
from tandem.services.chaos.injector import RECOVERY_SECONDS, Injector, Made, described
from tandem.services.chaos.recovery import Observation
from tandem.services.chaos.schedule import DISK, SUPERVISOR, Fault
from tandem.services.chaos.summary import as_json
from tandem.services.command_line import full_disk_named
from tandem.services.run.folder import cannot_write
from tandem.trainer.checkpoints.durable import disk_full_error
from tests.support.run_inputs import recipe_of, small_values

FULL = Fault(1, "disk", DISK, 3.0, 1)
KILLED = Fault(1, "kill", SUPERVISOR, 0.0, 1)


class EndedSupervisor:
    """One whose run has ended."""

    def __init__(self, code: int, said: str) -> None:
        self.code = code
        self.said = ["0:10 step 4/10", said, "4 of 10 batches are trained; go on with: tandem run config.json --resume"]
        self.num_resumed = 0

    def exit_code(self) -> int:
        return self.code

    def last_lines(self, count: int) -> list[str]:
        return self.said[-count:]

    def resume(self) -> None:
        self.num_resumed += 1


def ended(folder: Path, fault: Fault, code: int, said: str, seconds_ago: float = 1.0) -> tuple[Injector, Made]:
    """An injector that finds its run ended some time after the fault, and works on it."""
    run: Any = SimpleNamespace(supervisor=EndedSupervisor(code, said), proxy=None, redis=None, disk=None)
    buffer: Any = None  # it is not asked
    injector = Injector([], run, buffer, recipe_of(small_values(folder)), print)
    ended_at = time.monotonic() - seconds_ago
    made = Made(
        EFFECTS[fault.kind](fault, run), Observation({}, {}, 1, 1), 1, 0.0, ended_at=ended_at, recovery_seconds=0.5
    )
    injector.result.made.append(made)
    injector._check_supervisor()
    assert run.supervisor.num_resumed == int(made.resumed) == int(injector.result.exit_code is None)
    return injector, made


def test_a_run_that_ends_after_its_disk_was_full_is_resumed_once(tmp_path: Path) -> None:
    injector, made = ended(tmp_path, FULL, 2, "tandem: trainer: the disk of /runs/a/logs is full; free space there")
    assert made.resumed and made.recovery_seconds is None
    injector._check_supervisor()
    assert injector.result.exit_code == 2, "the second end is the run's own"


@pytest.mark.parametrize(
    ("fault", "code", "said", "seconds_ago"),
    [
        (FULL, 1, "the disk of /runs/a is full", 1.0),
        (FULL, 2, "tandem: reward: scorer 'mine' cannot be imported", 1.0),
        (FULL, 2, "tandem: Redis at unix:///redis.sock is full: raise maxmemory", 1.0),
        (FULL, 2, "the disk of /runs/a is full", RECOVERY_SECONDS + 1.0),
        (FULL, -signal.SIGKILL, "", 1.0),
        (KILLED, 1, "", 1.0),
        (KILLED, 2, "the disk of /runs/a is full", 1.0),
        (KILLED, -signal.SIGSEGV, "", 1.0),
    ],
)
def test_a_fault_is_not_blamed_for_an_end_that_it_cannot_cause(
    tmp_path: Path, fault: Fault, code: int, said: str, seconds_ago: float
) -> None:
    injector, made = ended(tmp_path, fault, code, said, seconds_ago)
    assert injector.result.exit_code == code and not made.resumed


def test_line_and_json_have_the_exit_code_and_the_version_of_the_fault(tmp_path: Path) -> None:
    injector, made = ended(tmp_path, KILLED, -signal.SIGKILL, "")
    made.recovery_seconds = 7.0
    line = "fault 1 of 1, version 1: kill supervisor: works again after 7.0 s"
    assert described(made, 1) == f"{line}; it ended the run (SIGKILL), which was resumed"
    (fault,) = as_json(injector.result, 1)["faults"]  # type: ignore[misc]
    assert (fault["resumed"], fault["exit_code"], fault["at_version"]) == (True, -9, 1)
    _, full = ended(tmp_path / "other", FULL, 2, "no space left on the disk of /runs/a: free some")
    full.recovery_seconds = 7.0
    expected = "disk for 3 s: works again after 7.0 s; it ended the run (exit code 2), which was resumed"
    assert described(full, 1).endswith(expected)


def by_write_text(folder: Path, error: OSError) -> None:
    raise cannot_write(folder, error)


def by_checkpoint(folder: Path, error: OSError) -> None:
    with disk_full_error(folder):
        raise error


def by_command(folder: Path, error: OSError) -> None:
    with full_disk_named(folder):
        raise error


@pytest.mark.parametrize("writer", [by_write_text, by_checkpoint, by_command])
def test_a_full_disk_is_recognized_in_every_message_about_it(
    tmp_path: Path, writer: Callable[[Path, OSError], None]
) -> None:
    with pytest.raises(EnvironmentLackError) as caught:
        writer(tmp_path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert ended(tmp_path, FULL, 2, f"tandem: trainer: {caught.value}")[1].resumed


def test_a_redis_that_does_not_start_again_is_a_violation_in_the_result(tmp_path: Path) -> None:
    class DeadRedis:
        def restart_if_dead(self) -> None:
            raise EnvironmentLackError("redis-server ended as it started: Bad file format")

    supervisor = SimpleNamespace(exit_code=lambda: None)
    run: Any = SimpleNamespace(supervisor=supervisor, proxy=None, redis=DeadRedis(), disk=None)
    buffer: Any = None
    result = Injector([], run, buffer, recipe_of(small_values(tmp_path)), print).run()
    assert result.exit_code is None
    assert result.violations == ["EnvironmentLackError: redis-server ended as it started: Bad file format"]
