"""`tandem run --launcher ray` on a real cluster: a service dies with its actor and comes back, samplers and environment
services join and leave, ports refuse strangers, and nothing is left behind.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from string import ascii_letters
from typing import Any

import grpc
import psutil
import pytest

from tandem.services.buffer.buffer import Buffer
from tandem.services.run.folder import running
from tests.support.processes import MARK, carriers
from tests.support.programs import needed_package
from tests.support.strangers import listening_ports
from tests.support.waiting import eventually
from tests.support.whole_run import UNHURRIED, WholeRun, processes_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

CRASHES = "/ray.rpc.syncer.RaySyncer/StartSync"
"""Ray 2.60: this call without metadata ends the process that answers it, before it asks for a token. See deploy.md."""
ECHO = {"path": "tests.support.environments:Echo", "max_turns": 2, "service": True}
"""Episodes in environment services."""


class RayRun(WholeRun):
    """A run under `--launcher ray` that goes on until it is stopped; all its processes carry a mark."""

    def __init__(self, folder: Path, **sections: dict[str, Any]) -> None:
        rollout = {"engine": "transformers", **sections.pop("rollout", {})}
        super().__init__(folder, run={"total_batches": 100_000}, rollout=rollout, **sections)
        self.mark = uuid.uuid4().hex

    def launch(self, *arguments: str) -> subprocess.Popen[str]:
        os.environ[MARK] = self.mark
        try:
            return self.start("run", str(self.recipe), "--launcher", "ray", *arguments)
        finally:
            del os.environ[MARK]

    def wait_for(self, condition: Callable[[], bool], process: subprocess.Popen[str], deadline: float = 300.0) -> None:
        super().wait_for(condition, process, deadline)  # a cluster starts slowly beside other tests

    def said(self) -> str:
        return (self.scratch / "run.out").read_text()

    def pids(self) -> dict[str, int]:
        """Pids of the services that run, by name."""
        return {one.name: one.pid for one in self.status().services if one.state == "running"}

    def opened(self, service: str) -> float:
        """How many environments a service has opened."""
        address = running(self.folder)
        assert address is not None
        with closing(Buffer(address.redis_url, "whole")) as buffer:
            return buffer.figures().get(service, {}).get("opened", 0.0)

    def wait_for_batches(self, number: int, supervisor: subprocess.Popen[str]) -> None:
        wanted = len(self.metrics()) + number
        self.wait_for(lambda: len(self.metrics()) >= wanted, supervisor)

    def check_ledger(self) -> None:
        assert self.ledger()["violations"] == [] and max(self.instances().values()) == 1


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    needed_package("ray")


# ---- first, because the run that all other tests try goes on to the end of this file and takes the processors ----


def test_a_killed_driver_leaves_nothing_and_its_run_can_be_resumed(tmp_path: Path) -> None:
    run = RayRun(tmp_path)
    killed = run.launch()
    run.wait_for(lambda: len(run.metrics()) >= 3, killed)
    killed.kill()
    killed.wait(10)
    # Ray 2.60's two agents end last: they try for 60 s to report to the cluster that it is gone.
    eventually(lambda: not list(carriers(run.mark)), 120.0)
    total = len(run.metrics()) + 9
    resumed = run.launch("--resume", f"run.total_batches={total}")
    run.wait_for(lambda: resumed.poll() is not None or len(run.metrics()) >= total, resumed)
    assert resumed.wait(60) == 0, run.said() + run.logs()
    assert sorted(run.records()) == list(range(1, total + 1))
    run.check_ledger()
    assert list(carriers(run.mark)) == []


def test_a_run_that_the_cluster_cannot_hold_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    run = RayRun(tmp_path)
    done = run.tandem("run", str(run.recipe), "rollout.num_replicas=500", "--launcher", "ray")
    assert done.returncode == 2
    assert re.search(r"the run wants .*500 samplers of 0.25 CPU each.*; the cluster has [\d.]+ CPU free", done.stderr)
    assert done.stderr.count("\n") == 1 and not run.folder.exists()


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:9", "the Ray cluster at 127.0.0.1:9 cannot be reached"),
        ("ray://127.0.0.1:10001", "a run is not driven from outside its cluster"),
        ("somewhere", "is not host:port"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_named(tmp_path: Path, address: str, told: str) -> None:
    run = RayRun(tmp_path)
    done = run.tandem("run", str(run.recipe), "--launcher", "ray", RAY_ADDRESS=address)
    assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1


# ---- a run that goes on ----


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RayRun:
    rollout = {"stop": tuple(ascii_letters)}
    return RayRun(tmp_path_factory.mktemp("ray"), rollout=rollout, environment=ECHO, reward=UNHURRIED)


@pytest.fixture(scope="module")
def supervisor(run: RayRun) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on while the tests below try it, and afterwards leaves no process."""
    process = run.launch()
    try:
        run.wait_for(lambda: len(run.metrics()) >= 2, process)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(30)
    assert code == 130, run.said() + run.logs()
    assert list(carriers(run.mark)) == [] and processes_of(run) == []
    run.check_ledger()


def test_a_service_dies_with_its_actor_and_is_started_again(run: RayRun, supervisor: subprocess.Popen[str]) -> None:
    for name in ("rollout-0", "environments-0", "trainer"):
        service = psutil.Process(run.pids()[name])
        actor = service.parent()
        assert actor is not None and actor.name().startswith("ray::")
        actor.kill()
        eventually(lambda service=service: not service.is_running() or service.status() == psutil.STATUS_ZOMBIE, 10.0)
        run.wait_for(lambda name=name: f"{name} died (SIGKILL: its Ray actor died" in run.said(), supervisor)
        run.wait_for(lambda name=name, pid=service.pid: run.pids().get(name, pid) != pid, supervisor)
    run.wait_for_batches(2, supervisor)
    run.check_ledger()


def test_a_sampler_joins_and_leaves(run: RayRun, supervisor: subprocess.Popen[str]) -> None:
    assert run.tandem("scale", str(run.folder), "rollout=2").returncode == 0
    run.wait_for(lambda: run.last_batch().get("samplers_acknowledged") == 2, supervisor)
    refused = run.tandem("scale", str(run.folder), "rollout=100")
    assert refused.returncode == 2
    assert re.search(r"the run wants 98 samplers of 0.25 CPU each; the cluster has [\d.]+ CPU free", refused.stderr)
    assert run.tandem("scale", str(run.folder), "rollout=1").returncode == 0
    run.wait_for(lambda: "rollout-1 has left the run" in run.said(), supervisor)
    run.wait_for_batches(1, supervisor)
    assert "rollout-1 died" not in run.said()


def test_an_environment_service_joins_and_leaves(run: RayRun, supervisor: subprocess.Popen[str]) -> None:
    assert run.tandem("scale", str(run.folder), "environments=2").returncode == 0
    run.wait_for(lambda: run.opened("environments-1") > 0, supervisor)
    assert run.tandem("scale", str(run.folder), "environments=1").returncode == 0
    run.wait_for(lambda: "environments-1 has left the run" in run.said(), supervisor)
    opened = run.opened("environments-0")
    run.wait_for(lambda: run.opened("environments-0") > opened, supervisor)
    run.wait_for_batches(1, supervisor)
    assert "environments-1 died" not in run.said() and "without draining" not in run.said()


def test_services_do_not_get_the_token_of_the_cluster(run: RayRun, supervisor: subprocess.Popen[str]) -> None:
    for pid in run.pids().values():
        assert not [name for name in psutil.Process(pid).environ() if name.startswith("RAY_")]


def test_every_port_of_the_cluster_refuses_strangers(run: RayRun, supervisor: subprocess.Popen[str]) -> None:
    address = running(run.folder)
    assert address is not None
    services = {pid for root in run.pids().values() for pid in family_of(root)}
    ports = {port: pid for pid in family_of(supervisor.pid) for port in listening_ports(psutil.Process(pid))}
    assert {host for host, _ in ports} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    control = int(address.control.rpartition(":")[2])
    of_ray = {port: pid for (_, port), pid in ports.items() if pid not in services and port != control}
    assert len(of_ray) >= 5, "driver, GCS, raylet, object manager, agent, workers"
    methods = methods_of_ray()
    answers = {port: answers_of(port, methods) for port in of_ray}
    assert all(found in REFUSALS for found in answers.values()), answers
    run.wait_for_batches(1, supervisor)


REFUSALS = ({"UNAUTHENTICATED", "UNIMPLEMENTED"}, {"401"})


def family_of(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def methods_of_ray() -> set[str]:
    """The gRPC methods that Ray's programs name."""
    programs = (Path(importlib.util.find_spec("ray").submodule_search_locations[0]) / "core/src/ray").glob("*/*")
    found = {
        name.decode()
        for program in programs
        if program.name in ("gcs_server", "raylet")
        for name in re.findall(rb"/ray\.rpc[\w.]*/\w+", program.read_bytes())
    }
    assert len(found) > 100 and CRASHES in found
    return found - {CRASHES}


def answers_of(port: int, methods: set[str]) -> set[str]:
    """The status of an HTTP request if the port speaks HTTP, else those of all gRPC methods, called without a token."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.settimeout(5)
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if (reply := stranger.recv(100)).startswith(b"HTTP/"):
            return {reply.split()[1].decode()}
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return {status_without_token(channel, method) for method in methods}


def status_without_token(channel: grpc.Channel, method: str) -> str:
    try:
        channel.unary_unary(method)(b"", timeout=10)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"
