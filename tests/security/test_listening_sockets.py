"""Every listening socket of a default `tandem run` refuses strangers of the same machine.

There are three kinds, and no others:
- gRPC ports of the services: all methods need a token. Health checks do not, because probes of containers have none,
  and they tell only whether a service serves.
- gloo's listeners in the trainer and in the sampler's engine, one for each process group, even one of a single rank.
  gloo knows no authentication. It reads the number of an expected connection and never answers; a connection that it
  does not expect stays open without effect.
- unix sockets of Redis and of vLLM's engine, which file permissions close to other users.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2

from tandem.services.buffer.buffer import Buffer
from tandem.services.run.folder import running
from tests.security.test_tokens import METHODS, status_of
from tests.support.service_wire import health_of, listed_services
from tests.support.strangers import answering, listening_ports
from tests.support.whole_run import UNHURRIED, WholeRun, service_process

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SERVICES = {
    "controller": "ControlService",
    "feed": "",
    "reward": "RewardService",
    "rollout-0": "RolloutService",
    "trainer": "",
}
"""Of each service: what it serves besides Info, health and reflection."""
CONNECT_AS_NOBODY = """
import os, socket, sys
stranger = socket.socket(socket.AF_UNIX)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
stranger.connect(sys.argv[1])
"""


class OpenSockets(NamedTuple):
    """What the processes of a run listen on."""

    grpc: dict[str, str]
    """Addresses of the services by name."""
    tcp: dict[tuple[str, int], int]
    """Pids by address."""
    unix: set[str]
    engine: set[int]
    """Pids of the sampler's engine."""
    trainer: int

    def is_grpc(self, address: tuple[str, int]) -> bool:
        return f"127.0.0.1:{address[1]}" in self.grpc.values()


@pytest.fixture(scope="module")
def sockets() -> Iterator[OpenSockets]:
    """The sockets of a run that goes on while and after the tests try them. Its folder is open to all users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        run = WholeRun(Path(folder), run={"total_batches": 100_000}, reward=UNHURRIED)
        supervisor = run.start("run", str(run.recipe))
        try:
            run.wait_for(lambda: len(run.metrics()) >= 2, supervisor)
            yield open_sockets(run, supervisor)
            tried_at = len(run.metrics())
            run.wait_for(lambda: len(run.metrics()) >= tried_at + 2, supervisor)
        finally:
            supervisor.terminate()
            assert supervisor.wait(30) == 130
        assert " died (" not in (run.scratch / "run.out").read_text()


def open_sockets(run: WholeRun, supervisor: subprocess.Popen[str]) -> OpenSockets:
    address = running(run.folder)
    assert address is not None
    with closing(Buffer(address.redis_url, "whole")) as buffer:
        addresses = buffer.services() | {sampler.id: sampler.address for sampler in buffer.samplers()}
    family = [psutil.Process(supervisor.pid), *psutil.Process(supervisor.pid).children(recursive=True)]
    return OpenSockets(
        addresses,
        {port: process.pid for process in family for port in listening_ports(process)},
        {str(one.laddr) for process in family for one in process.net_connections("unix") if one.laddr},
        {child.pid for child in service_process(supervisor, "rollout").children(recursive=True)},
        service_process(supervisor, "trainer").pid,
    )


def test_every_port_is_bound_to_loopback_and_accounted_for(sockets: OpenSockets) -> None:
    assert sockets.grpc.keys() == SERVICES.keys()
    assert {host for host, _ in sockets.tcp} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert sum(sockets.is_grpc(address) for address in sockets.tcp) == len(SERVICES)
    owners = {pid for address, pid in sockets.tcp.items() if not sockets.is_grpc(address)}
    assert owners == {sockets.trainer, *sockets.engine}, "only these have process groups"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_refuses_every_call_without_a_token(sockets: OpenSockets, service: str) -> None:
    address = sockets.grpc[service]
    for method in METHODS:
        is_served = method.containing_service.name in ("InfoService", SERVICES[service])
        refusal = grpc.StatusCode.UNAUTHENTICATED if is_served else grpc.StatusCode.UNIMPLEMENTED
        assert status_of(address, method) == refusal, method.full_name
    with pytest.raises(grpc.RpcError) as refused:
        listed_services(address)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert health_of(address, "") == health_pb2.HealthCheckResponse.SERVING


def test_the_ports_of_process_groups_answer_nothing(sockets: OpenSockets) -> None:
    ports = {address for address in sockets.tcp if not sockets.is_grpc(address)}
    assert ports and answering(ports) == set()


def test_unix_sockets_are_closed_to_other_users(sockets: OpenSockets) -> None:
    folders = {Path(path).parent.name.partition("-vllm-")[0] for path in sockets.unix}
    assert folders == {"redis", "tandem"}, "Redis and vLLM, and none without a file"
    if os.geteuid() != 0:
        pytest.skip("only root can try as another user")
    for path in sockets.unix:
        command = [sys.executable, "-S", "-c", CONNECT_AS_NOBODY, path]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "PermissionError" in tried.stderr, (path, tried.stderr)
