"""A child that lives but is silent: its supervisor restarts it as one that died."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem.services.launchers import process_group
from tandem.services.launchers.children import ChildSpec
from tandem.services.launchers.process_group import FINISHED, ProcessGroup
from tandem.services.run import redis_child


@pytest.mark.parametrize("began", [True, False])
def test_a_child_that_lives_but_is_silent_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: bool
) -> None:
    monkeypatch.setattr(redis_child, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(process_group, "POLL_SECONDS", 0.01)
    hangs_once = (
        f"import pathlib, os, signal; mark = pathlib.Path({str(tmp_path / 'mark')!r}); done = mark.exists()\n"
        "mark.touch(); done or os.kill(os.getpid(), signal.SIGSTOP)"
    )
    said: list[str] = []
    processes = ProcessGroup(report=said.append)
    processes.add([ChildSpec("trainer", (sys.executable, "-c", hangs_once), tmp_path / "trainer.log")])
    processes.last_heartbeat = lambda name: float("inf") if began or processes.states()[name][2] else 0.0
    first_life = (tmp_path / "mark").exists
    processes.silence = lambda name: 61.0 if first_life() and processes.states()[name][2] == 0 else 59.0
    if not began:
        monkeypatch.setattr(process_group, "START_SECONDS", 0.0)
        processes.redis_silence = lambda: 0.0 if first_life() else float("inf")  # an outage counts against nobody
    assert processes.run() == FINISHED
    told = "for 60 s" if began else "in the 0 s since its start"
    assert said[0] == f"trainer has sent no heartbeat {told}; it is killed"
    assert said[1].startswith("trainer died (SIGKILL") and len(said) == 2
    assert processes.states()["trainer"] == ("stopped", 0, 1)


def test_a_machine_of_a_trainer_that_sends_no_heartbeats_is_not_taken_for_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "START_SECONDS", 0.0)
    said: list[str] = []
    processes = ProcessGroup(report=said.append)
    others = [("trainer-1", "import time; time.sleep(60)"), ("trainer", "import time; time.sleep(0.5)")]
    log = tmp_path / "log"
    processes.add([ChildSpec(name, (sys.executable, "-c", program), log) for name, program in others])
    processes.last_heartbeat = lambda name: float("inf") if name == "trainer" else 0.0
    assert processes.run() == FINISHED and said == []
