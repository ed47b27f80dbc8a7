"""What a request to stop, a doubled one and a second one do to the children of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.services.launchers import process_group
from tandem.services.launchers.children import ChildSpec
from tandem.services.launchers.process_group import INTERRUPTED, ProcessGroup

SAVES = """
import signal, sys, time
def save(*_):
    time.sleep(1.0)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def stopped(tmp_path: Path) -> Callable[[int], tuple[list[str], str]]:
    """A run whose trainer takes a second to stop. It gets so many requests once it works; what it says, and its log."""

    def run(num_requests: int) -> tuple[list[str], str]:
        said: list[str] = []
        log = tmp_path / "trainer.log"
        processes = ProcessGroup(report=said.append)
        processes.add([ChildSpec("trainer", (sys.executable, "-c", SAVES), log)])

        def poll() -> None:
            if log.read_text().endswith("ready\n"):  # the first line names the program, with its "ready"
                for _ in range(num_requests):
                    processes.request_stop()

        processes.on_poll.append(poll)
        assert processes.run() == INTERRUPTED
        return said, log.read_text()

    return run


def test_requests_that_come_together_are_one(stopped: Callable[[int], tuple[list[str], str]]) -> None:
    said, log = stopped(3)
    assert said == ["stopping all services ..."] and log.endswith("saved\n")


def test_a_second_request_kills_and_says_why(
    stopped: Callable[[int], tuple[list[str], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "DOUBLED_SECONDS", 0.0)
    said, log = stopped(3)
    assert said == ["stopping all services ...", "trainer is killed, as a second request wants it"]
    assert log.endswith("ready\n")
