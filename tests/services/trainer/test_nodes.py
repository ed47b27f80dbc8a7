"""A trainer on several machines: launchers that meet in Redis. Here they are threads, their ranks small programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from tandem.protos.errors import UnavailableError
from tandem.services.process import in_thread
from tandem.services.trainer import nodes
from tandem.services.trainer.launch import _interface_of
from tests.support.paths import ROOT
from tests.support.trainer_node import make_node
from tests.support.waiting import eventually

SECONDS = 60.0
RANK = """
import os, pathlib, sys, time
from tandem.services.process import die_with_parent
die_with_parent()
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
times = len(list(folder.glob(f"rank{rank}-*")))
said = folder / "saying" / f"rank{rank}-{times}"
said.write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']} {os.environ['LOCAL_RANK']}")
said.rename(folder / said.name)
while not (folder / "go").exists():
    time.sleep(0.01)
    all_started = len(list(folder.glob(f"rank?-{times}"))) == int(os.environ["WORLD_SIZE"])
    if all_started and (folder / f"fail{rank}").exists():
        sys.exit(int((folder / f"fail{rank}").read_text()))
"""


class Machines:
    """Two machines with two ranks each."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        (folder / "saying").mkdir()
        self.arguments = (str(folder), url, uuid.uuid4().hex, RANK)
        self.nodes: list[nodes.Node] = []
        self.stops: list[threading.Event] = []
        self.codes: list[Future[int]] = []

    def start(self, number: int = 1) -> None:
        """Starts that many launchers."""
        folder, *arguments = self.arguments
        for _ in range(number):
            self.stops.append(threading.Event())
            self.nodes.append(make_node(Path(folder), *arguments))
            self.codes.append(in_thread("node", self.nodes[-1].run, self.stops[-1]))

    def start_process(self) -> subprocess.Popen[bytes]:
        """Starts a launcher that can be killed."""
        return subprocess.Popen([sys.executable, "-m", "tests.support.trainer_node", *self.arguments], cwd=ROOT)

    def started(self, times: int) -> bool:
        """Whether every rank was started so often."""
        wanted = {f"rank{rank}-{before}" for rank in range(4) for before in range(times)}
        return {file.name for file in self.folder.glob("rank*-*")} == wanted

    def said(self, start: str) -> list[int]:
        """Pid, world size and local rank of a rank."""
        return [int(part) for part in (self.folder / start).read_text().split()]

    def fail(self, rank: int, code: int) -> None:
        (self.folder / f"fail{rank}").write_text(str(code))

    def go(self) -> list[int]:
        """Lets the ranks succeed; returns the exit codes of the launchers."""
        (self.folder / "go").touch()
        return self.exit_codes()

    def exit_codes(self) -> list[int]:
        return [code.result(SECONDS) for code in self.codes]

    def close(self) -> None:
        for stop in self.stops:
            stop.set()
        for code in self.codes:
            code.exception(SECONDS)


@pytest.fixture
def machines(tmp_path: Path, redis_url: str) -> Iterator[Machines]:
    made = Machines(tmp_path, redis_url)
    yield made
    made.close()


def test_the_ranks_of_all_machines_start_once_all_are_there(machines: Machines) -> None:
    machines.start()
    time.sleep(3 * nodes._REPORT_SECONDS)
    assert machines.started(0) and [node._ranks for node in machines.nodes] == [None]
    machines.start()
    eventually(lambda: machines.started(1))
    assert [machines.said(f"rank{rank}-0")[1:] for rank in range(4)] == [[4, rank % 2] for rank in range(4)]
    assert machines.go() == [0, 0]


def test_a_killed_rank_restarts_the_ranks_of_all_machines(machines: Machines) -> None:
    machines.start(2)
    eventually(lambda: machines.started(1))
    before = [machines.said(f"rank{rank}-0")[0] for rank in range(4)]
    os.kill(before[3], signal.SIGKILL)
    eventually(lambda: machines.started(2))
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert machines.go() == [0, 0]


def test_a_user_error_on_one_machine_ends_all_with_its_code(machines: Machines) -> None:
    machines.start(2)
    eventually(lambda: machines.started(1))
    machines.fail(rank=2, code=2)
    assert machines.exit_codes() == [2, 2]
    assert machines.started(1), "nothing is restarted"


def test_ranks_that_always_fail_end_all_machines(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MOST_FAILURES", 2)
    machines.fail(rank=1, code=7)
    machines.start(2)
    assert machines.exit_codes() == [1, 1]
    assert machines.started(3)


def test_a_machine_that_is_killed_is_noticed_and_can_be_replaced(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "LEASE_SECONDS", 2.0)
    machines.start()
    killed = machines.start_process()
    eventually(lambda: machines.started(1))
    killed.kill()
    killed.wait(SECONDS)
    machines.start()
    eventually(lambda: machines.started(2))
    assert machines.go() == [0, 0]


def test_a_stopped_machine_lets_its_ranks_end_and_the_others_wait(machines: Machines) -> None:
    machines.start(2)
    eventually(lambda: machines.started(1))
    machines.stops[0].set()
    assert machines.codes.pop(0).result(SECONDS) == 128 + signal.SIGTERM
    machines.start()
    eventually(lambda: machines.started(2))
    assert machines.go() == [0, 0]


@pytest.mark.parametrize(
    ("host", "interface"), [("127.0.0.1", "lo"), ("localhost", "lo"), ("0.0.0.0", ""), ("no.such.host.invalid", "")]
)
def test_ranks_connect_over_the_interface_of_the_machines_address(host: str, interface: str) -> None:
    assert _interface_of(host) == interface


def test_machines_that_do_not_come_are_reported(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_GATHER_SECONDS", 0.5)
    machines.start()
    with pytest.raises(UnavailableError, match="1 of 2 machines are there; run `tandem serve trainer` on each"):
        machines.exit_codes()
    assert machines.started(0)
