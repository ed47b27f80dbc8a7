"""A run that a fault has ended is resumed once, even if it ends when the fault is over."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tandem.services.chaos.faults import EFFECTS
from tandem.services.chaos.injector import Injector, Made
from tandem.services.chaos.recovery import Observation
from tandem.services.chaos.schedule import DISK, Fault
from tests.support.run_inputs import recipe_of, small_values


class EndedSupervisor:
    """One whose run has ended with exit code 2."""

    num_resumed = 0

    def exit_code(self) -> int:
        return 2

    def resume(self) -> None:
        self.num_resumed += 1


def test_a_run_that_ends_after_its_disk_was_full_is_resumed_once(tmp_path: Path) -> None:
    supervisor = EndedSupervisor()
    run: Any = SimpleNamespace(supervisor=supervisor, proxy=None, redis=None, disk=None)
    buffer: Any = None  # it is not asked
    injector = Injector([], run, buffer, recipe_of(small_values(tmp_path)), print)
    effect = EFFECTS["disk"](Fault(1, "disk", DISK, 0.0, 1), run)
    ended_at = time.monotonic()
    made = Made(effect, Observation({}, {}, 1, 1), 1, 0.0, ended_at=ended_at, recovery_seconds=0.5)
    injector.result.made.append(made)
    injector._check_supervisor()
    assert supervisor.num_resumed == 1 and injector.result.exit_code is None
    assert made.resumed and made.recovery_seconds is None and made.ended_at is not None and made.ended_at >= ended_at
    injector._check_supervisor()
    assert supervisor.num_resumed == 1 and injector.result.exit_code == 2, "the second end is the run's own"
