"""The supervisor's gRPC side over the wire: health, reflection, Info, and what it says of its crew and ledger."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from protos import common_pb2, common_pb2_grpc, control_pb2, control_pb2_grpc
from protos.errors import DeadlineError, UnavailableError
from services import rpc
from services.buffer.buffer import Buffer
from services.children import Child, ChildSpec
from services.config import parse_recipe
from services.control import ControlServer, software_version
from services.crew import Crew
from tests.redis_ring import SAMPLER, new_run, running_redis, score, train
from tests.run_inputs import small_values
from tests.test_run_recipe import Run, wait_for

CONTROL_SERVICE = "tandem.v1.ControlService"
RPC_SECONDS = 5.0


def ask_info(address: str) -> common_pb2.InfoReply:
    with rpc.connect(address) as channel, rpc.translated():
        return common_pb2_grpc.InfoServiceStub(channel).Info(common_pb2.InfoRequest(), timeout=RPC_SECONDS)


def health_of(address: str, name: str) -> int:
    with rpc.connect(address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=RPC_SECONDS).status)


def listed_services(address: str) -> set[str]:
    with rpc.connect(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        reply = next(stub.ServerReflectionInfo(iter([request]), timeout=RPC_SECONDS))
    return {service.name for service in reply.list_services_response.service}


# --- a real supervisor -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """`tandem run` in a process of its own, with small programs in place of the four services."""
    made = Run(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30.0)
        assert process.stdout is not None
        process.stdout.close()


def test_a_running_supervisor_answers_health_reflection_and_info(run: Run) -> None:
    before = time.time()
    process, address = run.start_run()
    buffer = Buffer(address.redis_url, "small")
    wait_for(lambda: buffer.counts()["admitted"] == 6)

    for name in ("", CONTROL_SERVICE, rpc.INFO_SERVICE):
        assert health_of(address.control, name) == health_pb2.HealthCheckResponse.SERVING, name
    assert listed_services(address.control) == {
        CONTROL_SERVICE,
        rpc.INFO_SERVICE,
        health.SERVICE_NAME,
        reflection.SERVICE_NAME,
    }
    info = ask_info(address.control)
    assert (info.service, info.run_id, info.software_version) == ("controller", "small", software_version())
    assert before < info.started_at < time.time()
    assert (info.policy_version, info.incarnation) == (-1, 0), "nothing is published yet, no trainer has begun"
    assert dict(info.figures) == {name: float(count) for name, count in buffer.counts().items()}
    assert (info.figures["admitted"], info.figures["prompts_waiting"]) == (6.0, 6.0)
    assert info.activity
    assert buffer.services()["controller"] == address.control, "it is found through the buffer, too"

    (run.folder / "finish").touch()
    assert process.wait(timeout=30.0) == 0
    with pytest.raises((UnavailableError, DeadlineError)):
        ask_info(address.control)


# --- the server alone ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def crew(tmp_path: Path) -> Crew:
    """A crew of one that was never started."""
    made = Crew(say=print)
    made.children = [Child(ChildSpec("trainer", (sys.executable, "-c", ""), tmp_path / "trainer.log"), made.token)]
    return made


@pytest.fixture
def served(redis_url: str, crew: Crew, tmp_path: Path) -> Iterator[tuple[ControlServer, Buffer]]:
    values = small_values(tmp_path)
    values["run"]["run_id"] = f"control-{tmp_path.name}"
    recipe = parse_recipe(values)
    buffer = new_run(redis_url, groups_per_batch=2, run_id=recipe.run.run_id)
    with ControlServer(recipe, crew, buffer) as server:
        yield server, buffer
    buffer.close()


def test_info_follows_the_ledger(served: tuple[ControlServer, Buffer]) -> None:
    server, buffer = served
    info = ask_info(server.address)
    assert (info.policy_version, info.incarnation, info.figures["admitted"]) == (0, 1, 0.0)
    score(buffer, 2)
    train(buffer, 1, 1, 2)
    buffer.publish(1, 1, [SAMPLER])
    info = ask_info(server.address)
    assert (info.policy_version, info.incarnation) == (1, 1)
    assert dict(info.figures) == {name: float(count) for name, count in buffer.counts().items()}
    assert info.figures["admitted"] == info.figures["retired"] == 2.0
    assert buffer.begin_incarnation() == ask_info(server.address).incarnation == 2


def test_control_speaks_for_the_crew_and_the_ledger(served: tuple[ControlServer, Buffer], crew: Crew) -> None:
    server, buffer = served
    buffer.register_service("trainer", "127.0.0.1:7")
    with rpc.connect(server.address) as channel, rpc.translated():
        stub = control_pb2_grpc.ControlServiceStub(channel)
        status = stub.GetStatus(control_pb2.GetStatusRequest(), timeout=RPC_SECONDS)
        ledger = stub.GetLedger(control_pb2.GetLedgerRequest(), timeout=RPC_SECONDS)
    (trainer,) = status.services
    assert (trainer.name, trainer.state, trainer.pid, trainer.address) == ("trainer", "stopped", 0, "127.0.0.1:7")
    assert Path(status.run_dir).name == "run"
    assert dict(ledger.counts) == buffer.counts() and list(ledger.violations) == []


def test_stop_run_ends_the_crew_as_ctrl_c_does(served: tuple[ControlServer, Buffer], crew: Crew) -> None:
    server, _buffer = served
    with rpc.connect(server.address) as channel, rpc.translated():
        control_pb2_grpc.ControlServiceStub(channel).StopRun(control_pb2.StopRunRequest(), timeout=RPC_SECONDS)
    assert crew.run() == 130, "asked before it started, it starts nothing"
