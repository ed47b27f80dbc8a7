"""What a service reports of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.services import service_info
from tandem.services.service_info import cpu_seconds

BUSY = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"


def test_the_time_of_a_child_counts_once_while_it_runs_and_after_it_ended() -> None:
    before = cpu_seconds()
    service_info._children.cache_clear()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with_child = cpu_seconds()
        child.communicate(b"\n", timeout=30)
    after = cpu_seconds()
    assert before + 0.4 <= with_child <= after < with_child + 0.4


def test_the_processes_of_the_machine_are_not_read_for_each_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_info.time, "monotonic", lambda: 25.0)
    cpu_seconds()
    found = service_info._children.cache_info().misses
    cpu_seconds()
    assert service_info._children.cache_info().misses == found
    monkeypatch.setattr(service_info.time, "monotonic", lambda: 31.0)
    cpu_seconds()
    assert service_info._children.cache_info().misses == found + 1
