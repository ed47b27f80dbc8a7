"""The supervisor's gRPC service: health, reflection, Info, and the state of its processes and ledger."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.protos import control_pb2, control_pb2_grpc
from tandem.protos.errors import DeadlineError, UnavailableError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import parse_recipe
from tandem.services.rpc.client import connect, translated
from tandem.services.run.children import Child, ChildSpec
from tandem.services.run.control import ControlServer
from tandem.services.run.process_group import ProcessGroup
from tests.services.run.conftest import Run
from tests.support.redis_ring import SAMPLER, new_run, score, train
from tests.support.run_inputs import small_values
from tests.support.service_wire import ask_info, check_what_it_says

CONTROL_SERVICE = "tandem.v1.ControlService"
RPC_SECONDS = 5.0


def test_a_running_supervisor_answers_health_reflection_and_info(run: Run) -> None:
    before = time.time()
    process, address = run.start_run()
    buffer = Buffer(address.redis_url, "small")
    # Nothing is published yet and no trainer has started.
    info = check_what_it_says(
        address.control, buffer, name="controller", service_names=(CONTROL_SERVICE,), started_after=before
    )
    assert (info.figures["admitted"], info.figures["prompts_waiting"]) == (6.0, 6.0)
    assert buffer.services()["controller"] == address.control, "it is found through the buffer, too"

    (run.folder / "finish").touch()
    assert process.wait(timeout=30.0) == 0
    with pytest.raises((UnavailableError, DeadlineError)):
        ask_info(address.control)


@pytest.fixture
def processes(tmp_path: Path) -> ProcessGroup:
    """A process group with one process that was never started."""
    made = ProcessGroup(report=print)
    made.children = [Child(ChildSpec("trainer", (sys.executable, "-c", ""), tmp_path / "trainer.log"), made.token)]
    return made


@pytest.fixture
def served(redis_url: str, processes: ProcessGroup, tmp_path: Path) -> Iterator[tuple[ControlServer, Buffer]]:
    values = small_values(tmp_path)
    values["run"]["run_id"] = f"control-{tmp_path.name}"
    recipe = parse_recipe(values)
    buffer = new_run(redis_url, groups_per_batch=2, run_id=recipe.run.run_id)
    with ControlServer(recipe, processes, buffer) as server:
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


def test_control_reports_the_processes_and_the_ledger_and_stops_the_run(
    served: tuple[ControlServer, Buffer], processes: ProcessGroup
) -> None:
    server, buffer = served
    buffer.register_service("trainer", "127.0.0.1:7")
    with connect(server.address) as channel, translated():
        stub = control_pb2_grpc.ControlServiceStub(channel)
        status = stub.GetStatus(control_pb2.GetStatusRequest(), timeout=RPC_SECONDS)
        ledger = stub.GetLedger(control_pb2.GetLedgerRequest(), timeout=RPC_SECONDS)
        stub.StopRun(control_pb2.StopRunRequest(), timeout=RPC_SECONDS)
    (trainer,) = status.services
    assert (trainer.name, trainer.state, trainer.pid, trainer.address) == ("trainer", "stopped", 0, "127.0.0.1:7")
    assert Path(status.run_dir).name == "run"
    assert dict(ledger.counts) == buffer.counts() and list(ledger.violations) == []
    assert processes.run() == 130, "stopped as by Ctrl-C before it started, it starts nothing"
