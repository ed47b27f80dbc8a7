"""What a killed service leaves behind is noticed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import cast

import psutil
import pytest

from tandem.services.chaos import faults
from tandem.services.chaos.faults import Run
from tandem.services.chaos.injector import Injector
from tandem.services.chaos.processes import Supervisor
from tandem.services.chaos.schedule import Fault
from tests.support.redis_ring import SAMPLER, new_run
from tests.support.run_inputs import recipe_of, small_values

SERVICE = """
import subprocess, sys, time
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(below.pid, flush=True)
time.sleep(600)
"""


class OneService:
    """In place of `tandem run`: a service, and a process below it that does not end with it."""

    def __init__(self) -> None:
        self.service = subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True)
        assert self.service.stdout is not None
        self.below = psutil.Process(int(self.service.stdout.readline()))

    def processes_of(self, service: str) -> list[psutil.Process]:
        assert service == SAMPLER
        return [psutil.Process(self.service.pid), self.below]

    def exit_code(self) -> int | None:
        return None if self.service.poll() is None else 0

    def close(self) -> None:
        self.service.kill()
        with self.service, suppress(psutil.NoSuchProcess):
            self.below.kill()


def test_a_process_that_outlives_its_killed_service_is_a_violation(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_END_SECONDS", 0.0)
    recipe = recipe_of(small_values(tmp_path))
    with closing(OneService()) as one, closing(new_run(redis_url)) as buffer:
        run = Run(cast("Supervisor", one), None, None, None)
        result = Injector([Fault(1, "kill", SAMPLER, 0.0, 0)], run, buffer, recipe, print).run()
        said = f"fault 1 of 1, version 0: kill {SAMPLER}: process {one.below.pid}, which had to end with it, lives"
        assert result.violations[0] == said
        monkeypatch.setattr(faults, "_END_SECONDS", 60.0)
        one.below.kill()
        assert result.made[0].effect.left_behind() == []
