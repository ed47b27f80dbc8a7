"""`tandem run` and its gRPC service, with real Redis and processes; small programs stand in for the four services."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from tandem.protos import control_pb2, control_pb2_grpc
from tandem.protos.errors import AccessError, DeadlineError, EnvironmentLackError, UnavailableError, UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import parse_recipe
from tandem.services.control.controller import Controller, Lease
from tandem.services.control.server import control_server
from tandem.services.launchers.children import ChildSpec
from tandem.services.launchers.local import LocalLauncher
from tandem.services.launchers.process_group import ProcessGroup
from tandem.services.launchers.supervisor import child_specs, early_end
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.tokens import Role
from tandem.services.run.folder import CONFIG_FILE, running
from tests.services.launchers.conftest import DEADLINE_SECONDS, Run
from tests.support.processes import has_ended
from tests.support.redis_ring import SAMPLER, new_run, score, train
from tests.support.run_inputs import small_values
from tests.support.service_wire import ask_info, check_what_it_says, token_of
from tests.support.waiting import eventually


def test_a_run_is_shown_while_it_runs_and_afterwards(run: Run) -> None:
    code, said = run.tandem("run", str(run.recipe_file), "--resume")
    assert code == 2 and CONFIG_FILE in said and len(said.splitlines()) == 1, "there is nothing to resume yet"
    assert not run.folder.exists()

    before = time.time()
    process, address = run.start_run()
    for arguments in ((), ("--resume",)):
        code, said = run.tandem("run", str(run.recipe_file), *arguments)
        assert code == 2 and f"pid {process.pid}" in said and len(said.splitlines()) == 1, "it is the only supervisor"
    code, said = run.tandem("status", str(run.folder))
    assert code == 0
    assert all(name in said for name in ("feed", "reward", "trainer", "running", "prompts_waiting"))
    code, said = run.tandem("ledger", str(run.folder), "--json")
    assert code == 0 and json.loads(said)["counts"]["prompts_waiting"] == 6
    buffer = Buffer(address.redis_url, "small")
    expected = {"name": "controller", "service_names": ("tandem.v1.ControlService",), "started_after": before}
    figures = check_what_it_says(address.control, buffer, **expected).figures  # nothing is published yet
    assert (figures["admitted"], figures["prompts_waiting"]) == (6.0, 6.0)
    assert buffer.services()["controller"] == address.control, "it is found through the buffer, too"
    for name in ("supervisor.lock", CONFIG_FILE):  # they hold a token, and the Redis URL
        assert stat.S_IMODE((run.folder / name).stat().st_mode) == 0o600, name

    pids = run.pids()
    said = run.end(process)
    assert "hint about the dtype" in said
    why = "the training data ended after 1 epoch (data.max_epochs=1). Of 6 groups, 6 were trained and 0 dropped"
    assert f"trained 0 of 3 batches: {why}" in said
    assert f"summary: {run.folder / 'summary.json'} · trained model: {run.folder / 'hf'}" in said
    assert all(map(has_ended, pids))
    with pytest.raises((UnavailableError, DeadlineError)):
        ask_info(address.control)
    code, said = run.tandem("ledger", str(run.folder))
    assert code == 0 and "sound" in said
    assert run.tandem("repair", str(run.folder)) == (0, "nothing to repair\n")
    code, said = run.tandem("status", str(run.folder))
    assert code == 0 and "not running" in said


def test_the_ledger_of_a_run_that_does_not_add_up_exits_with_1(run: Run) -> None:
    process, address = run.start_run()
    server = redis.Redis.from_url(address.redis_url)
    assert server.delete("tandem:{small}:payload:0-3") == 1
    code, said = run.tandem("ledger", str(run.folder))
    assert code == 1 and "VIOLATION" in said and "0-3" in said
    assert "0-3" in run.end(process, 1), "a run that lost a group has failed"


def test_stop_run_ends_it_as_ctrl_c_does_and_the_command_that_resumes_it_is_named(run: Run) -> None:
    process, address = run.start_run()
    (run.folder / "batches" / "000001").mkdir(parents=True)  # the run took a step
    pids = run.pids()
    with connect(address.control, address.token) as channel:
        control_pb2_grpc.ControlServiceStub(channel).Stop(control_pb2.StopRequest(), timeout=5.0)
    said, _ = process.communicate(timeout=10.0)
    assert process.returncode == 130
    assert f"go on with: tandem run {run.folder / CONFIG_FILE} --resume" in said and (run.folder / CONFIG_FILE).exists()
    assert all(map(has_ended, pids))
    assert running(run.folder) is None
    shutil.rmtree(run.folder / "redis")  # as `tandem repair` recommends if it is damaged
    resumed, _ = run.start_run("--resume")
    assert "hint about the dtype" not in run.end(resumed), "a run that has begun keeps its dtype"


def test_an_insecure_run_on_a_public_address_warns_once(run: Run) -> None:
    process, _address = run.start_run("run.host=0.0.0.0", "run.insecure=true")
    warnings = [line for line in run.end(process).splitlines() if "loopback" in line]
    assert [re.sub(r":\d+: ", ":PORT: ", line) for line in warnings] == [
        "listens on 0.0.0.0:PORT: 0.0.0.0 is not a loopback address, and the service has no certificates"
    ]


@pytest.mark.system
def test_a_redis_that_dies_is_restarted_with_its_data(run: Run) -> None:
    _process, address = run.start_run()
    before = run.pids()
    os.kill(before[-1], signal.SIGKILL)
    eventually(lambda: has_ended(before[-1]))
    assert Buffer(address.redis_url, "small", connect_timeout_seconds=10.0).counts()["prompts_waiting"] == 6
    eventually(run.all_running)
    assert run.pids()[:-1] == before[:-1], "the services have waited for it"
    assert run.tandem("ledger", str(run.folder))[0] == 0


def test_a_run_that_took_no_step_does_not_occupy_its_folder(run: Run) -> None:
    process, _address = run.start_run()
    process.kill()
    process.communicate(timeout=DEADLINE_SECONDS)
    process, address = run.start_run("run.seed=5")
    assert Buffer(address.redis_url, "small").counts()["admitted"] == 6, "the first attempt's groups are forgotten"
    process.terminate()
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130
    assert f"no batch was trained; {run.folder} can be used for a new run" in said
    assert not (run.folder / CONFIG_FILE).exists()
    process, _address = run.start_run("run.seed=6")
    run.end(process)
    code, said = run.tandem("ledger", str(run.folder), "--json")
    assert code == 0 and json.loads(said)["counts"]["admitted"] == 6


def test_dropped_groups_and_missing_batches_are_reported(run: Run) -> None:
    """The first error of each reason for a drop is shown once, prompts that failed in every attempt are named, and the
    end says what was not trained.
    """
    process, address = run.start_run("data.max_epochs=0")
    buffer = Buffer(address.redis_url, "small")
    buffer.register_sampler("rollout-0", "", 1)
    buffer.publish(buffer.begin_incarnation(), 0, ["rollout-0"])
    crashing = buffer.claim("prompts", "rollout-0", 2, 60.0, 5.0)
    others = buffer.claim("prompts", "rollout-0", 4, 60.0, 5.0)
    assert len(others) == 4, "they stay under way"
    while crashing:
        for claim in crashing:
            buffer.release(claim, "crashed", "data", f"ValueError: {claim.group_id}")
        crashing = buffer.claim("prompts", "rollout-0", 2, 60.0, 0.0)
    buffer.complete(others[0], b"answers")
    (scoring,) = buffer.claim("generated", "reward", 1, 60.0, 5.0)
    buffer.complete(scoring, b"scores", "[]")
    data = run.folder.parent / "train.jsonl"
    code, listed = run.tandem("ledger", str(run.folder), "--dropped")
    for place in range(2):
        assert f"set aside: group 0-{place}, row {place} of {data}: crashed: ValueError: 0-{place}" in listed
    code, refused = run.tandem("repair", str(run.folder), "--dry-run")
    assert code == 2 and f"stop it by `tandem stop {run.folder}`" in refused
    said = run.end(process, 3)
    for place in range(2):
        assert said.count(f"warning: the prompt of group 0-{place} failed in every attempt (crashed: ") == 1, said
    assert said.count("warning: a group was dropped (crashed): ValueError: ") == 1, said
    why = "no further group could be scored. Of 6 groups, 4 were trained and 2 dropped (crashed 2)"
    assert f"trained 0 of 3 batches: {why}" in said


def test_a_run_that_its_evaluations_end_says_why_and_counts_what_was_trained(tmp_path: Path) -> None:
    recipe = parse_recipe(small_values(tmp_path))
    counts = {"admitted": 10, "dropped": 2, "dropped:run_ended": 2}
    said = early_end(recipe, 2, counts, "eval/test/pass@1 is 0.9 at version 2")
    why = "eval/test/pass@1 is 0.9 at version 2. Of 10 groups, 4 were trained and 2 dropped (run_ended 2)"
    assert said == f"trained 2 of 3 batches: {why}"


# ---- the supervisor's gRPC service ----

RPC_SECONDS = 5.0


@pytest.fixture
def processes(tmp_path: Path) -> ProcessGroup:
    """A process group with one process that was never started."""
    made = ProcessGroup(report=print)
    made.add([ChildSpec("trainer", (sys.executable, "-c", ""), tmp_path / "trainer.log")])
    return made


@pytest.fixture
def served(redis_url: str, processes: ProcessGroup, tmp_path: Path) -> Iterator[tuple[str, Buffer]]:
    values = small_values(tmp_path)
    values["run"]["run_id"] = f"control-{tmp_path.name}"
    recipe = parse_recipe(values)
    buffer = new_run(redis_url, groups_per_batch=2, run_id=recipe.run.run_id)
    launcher = LocalLauncher("local", recipe, buffer, processes, lambda scaled: child_specs(scaled, redis_url))
    with ExitStack() as stack:
        lease = stack.enter_context(Lease(buffer, "test"))
        controller = stack.enter_context(Controller(recipe, buffer, launcher, lease))
        address = stack.enter_context(control_server(controller, threading.Event()))
        yield address, buffer
    buffer.close()


def test_info_follows_the_ledger(served: tuple[str, Buffer]) -> None:
    address, buffer = served
    token = token_of(buffer)
    info = ask_info(address, token)
    assert (info.policy_version, info.incarnation, info.figures["admitted"]) == (0, 1, 0.0)
    score(buffer, 2)
    train(buffer, 1, 1, 2)
    buffer.publish(1, 1, [SAMPLER])
    info = ask_info(address, token)
    assert (info.policy_version, info.incarnation) == (1, 1)
    figures = dict(info.figures)
    assert figures.pop("cpu_seconds") > 0.0
    assert figures == {name: float(count) for name, count in buffer.counts().items()}
    assert info.figures["admitted"] == info.figures["retired"] == 2.0
    assert buffer.begin_incarnation() == ask_info(address, token).incarnation == 2


def test_control_reports_the_processes_and_the_ledger_and_stops_the_run(
    served: tuple[str, Buffer], processes: ProcessGroup
) -> None:
    address, buffer = served
    buffer.register_service("trainer", "127.0.0.1:7")
    with connect(address, token_of(buffer, Role.operate)) as channel, translated():
        stub = control_pb2_grpc.ControlServiceStub(channel)
        status = stub.Status(control_pb2.StatusRequest(), timeout=RPC_SECONDS)
        ledger = stub.GetLedger(control_pb2.GetLedgerRequest(), timeout=RPC_SECONDS)
        stub.Stop(control_pb2.StopRequest(), timeout=RPC_SECONDS)
    with connect(address, token_of(buffer, Role.read)) as channel, pytest.raises(AccessError), translated():
        control_pb2_grpc.ControlServiceStub(channel).Scale(control_pb2.ScaleRequest(), timeout=RPC_SECONDS)
    (trainer,) = status.services
    assert (trainer.name, trainer.state, trainer.pid, trainer.address) == ("trainer", "stopped", 0, "127.0.0.1:7")
    assert Path(status.run_dir).name == "run"
    assert dict(status.counts) == buffer.counts()
    assert dict(ledger.counts) == buffer.counts() and list(ledger.violations) == []
    assert processes.run() == 130, "stopped as by Ctrl-C before it started, it starts nothing"


def test_a_watcher_sees_the_status_at_once_and_then_its_changes(served: tuple[str, Buffer]) -> None:
    address, buffer = served
    with connect(address, token_of(buffer, Role.read)) as channel, translated():
        replies = control_pb2_grpc.ControlServiceStub(channel).Watch(control_pb2.WatchRequest(), timeout=20.0)
        first = next(replies)
        assert (first.run_id, first.counts["admitted"]) == (buffer.run_id, 0)
        score(buffer, 2)
        assert next(reply for reply in replies if reply.counts["admitted"] == 2).counts["scored_waiting"] == 2
        replies.cancel()


@pytest.mark.parametrize(
    ("service", "replicas", "fault"),
    [
        ("trainer", 2, "trainer cannot be scaled; only rollout can under the launcher local"),
        ("", 2, "a service without a name cannot be scaled"),
        ("rollout", -1, "there must be at least 0"),
        ("rollout", 10_000, "more sampler"),
    ],
)
def test_replicas_that_the_run_cannot_have_are_refused(
    served: tuple[str, Buffer], processes: ProcessGroup, service: str, replicas: int, fault: str
) -> None:
    address, buffer = served
    request = control_pb2.ScaleRequest(service=service, replicas=replicas)
    refused = pytest.raises((UserError, EnvironmentLackError), match=fault)
    with connect(address, token_of(buffer, Role.operate)) as channel, refused, translated():
        control_pb2_grpc.ControlServiceStub(channel).Scale(request, timeout=RPC_SECONDS)
    assert len(processes.children) == 1
