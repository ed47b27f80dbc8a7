"""`tandem run` with real Redis, gRPC and processes; small programs stand in for the four services."""

from __future__ import annotations

import json
import os
import signal

import pytest
import redis

from tandem.protos import control_pb2, control_pb2_grpc
from tandem.services.buffer.buffer import Buffer
from tandem.services.rpc.client import connect
from tandem.services.run.folder import CONFIG_FILE, running
from tests.services.run.conftest import DEADLINE_SECONDS, Run
from tests.support.processes import has_ended
from tests.support.waiting import eventually


def test_a_run_shows_its_status_while_it_runs_and_its_ledger_afterwards(run: Run) -> None:
    process, _address = run.start_run()
    code, said = run.tandem("status", str(run.folder))
    assert code == 0
    assert all(name in said for name in ("feed", "reward", "trainer", "running", "prompts_waiting"))
    code, said = run.tandem("ledger", str(run.folder), "--json")
    assert code == 0 and json.loads(said)["counts"]["prompts_waiting"] == 6

    pids = run.pids()
    (run.folder / "finish").touch()
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, said
    assert all(map(has_ended, pids))
    code, said = run.tandem("ledger", str(run.folder))
    assert code == 0 and "sound" in said
    code, said = run.tandem("status", str(run.folder))
    assert code == 0 and "not running" in said


def test_the_ledger_of_a_run_that_does_not_add_up_exits_with_1(run: Run) -> None:
    process, address = run.start_run()
    server = redis.Redis.from_url(address.redis_url)
    assert server.delete("tandem:{small}:payload:0-3") == 1
    code, said = run.tandem("ledger", str(run.folder))
    assert code == 1 and "VIOLATION" in said and "0-3" in said
    (run.folder / "finish").touch()
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 1, "a run that lost a group has failed"
    assert "0-3" in said


def test_stop_run_ends_it_as_ctrl_c_does_and_the_command_that_resumes_it_is_named(run: Run) -> None:
    process, address = run.start_run()
    (run.folder / "batches" / "000001").mkdir(parents=True)  # the run took a step
    pids = run.pids()
    with connect(address.control) as channel:
        control_pb2_grpc.ControlServiceStub(channel).StopRun(control_pb2.StopRunRequest(), timeout=5.0)
    said, _ = process.communicate(timeout=10.0)
    assert process.returncode == 130
    assert f"go on with: tandem run {run.folder / CONFIG_FILE} --resume" in said and (run.folder / CONFIG_FILE).exists()
    assert all(map(has_ended, pids))
    assert running(run.folder) is None


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


@pytest.mark.system
def test_a_run_ended_by_kill_9_leaves_no_process_and_is_resumed(run: Run) -> None:
    process, _address = run.start_run()
    pids = run.pids()
    (run.folder / "batches" / "000001").mkdir(parents=True)  # the run took a step
    process.kill()
    eventually(lambda: all(map(has_ended, pids)), seconds=10.0)

    code, said = run.tandem("run", str(run.recipe_file))
    assert code == 2 and "--resume" in said and len(said.splitlines()) == 1
    code, said = run.tandem("run", str(run.recipe_file), "run.seed=5", "--resume")
    assert code == 2 and "run.seed was 0" in said and len(said.splitlines()) == 1
    (run.folder / "finish").touch()
    code, said = run.tandem("run", str(run.recipe_file), "--resume")
    assert code == 0, said


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_run_that_took_no_step_does_not_occupy_its_folder(run: Run, killed: bool) -> None:
    process, _address = run.start_run()
    (process.kill if killed else process.terminate)()
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    if not killed:
        assert process.returncode == 130
        assert f"no batch was trained; {run.folder} can be used for a new run" in said
        assert not (run.folder / CONFIG_FILE).exists()
    process, _address = run.start_run("run.seed=5")
    (run.folder / "finish").touch()
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, said
    code, said = run.tandem("ledger", str(run.folder), "--json")
    assert code == 0 and json.loads(said)["counts"]["admitted"] == 6, "the groups of the first attempt are forgotten"


@pytest.mark.parametrize(
    ("max_epochs", "exit_code", "says"),
    [(1, 0, "the training data ended after 1 epoch (data.max_epochs=1)"), (0, 3, "no further group could be scored")],
)
def test_a_run_with_fewer_batches_than_requested_reports_it(
    run: Run, max_epochs: int, exit_code: int, says: str
) -> None:
    process, _address = run.start_run(f"data.max_epochs={max_epochs}")
    (run.folder / "finish").touch()
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == exit_code, said
    assert f"trained 0 of 3 batches: {says}. Of 6 groups, 6 were trained and 0 dropped" in said
    assert f"summary: {run.folder / 'summary.json'} · trained model: {run.folder / 'hf'}" in said


def test_the_first_error_of_each_reason_for_a_drop_is_shown_once(run: Run) -> None:
    process, address = run.start_run()
    buffer = Buffer(address.redis_url, "small")
    buffer.register_sampler("rollout-0", "", 1)
    buffer.publish(buffer.begin_incarnation(), 0, ["rollout-0"])
    while buffer.counts()["dropped"] < 2:
        for claim in buffer.claim("prompts", "rollout-0", 6, 60.0, 5.0):
            buffer.release(claim, "crashed", "data", f"ValueError: {claim.group_id}")
    (run.folder / "finish").touch()
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert said.count("warning: a group was dropped (crashed): ValueError: ") == 1, said


def test_one_folder_has_one_supervisor_and_an_empty_one_cannot_be_resumed(run: Run) -> None:
    code, said = run.tandem("run", str(run.recipe_file), "--resume")
    assert code == 2 and CONFIG_FILE in said and len(said.splitlines()) == 1
    assert not run.folder.exists()
    process, _ = run.start_run()
    for arguments in ((), ("--resume",)):
        code, said = run.tandem("run", str(run.recipe_file), *arguments)
        assert code == 2 and f"pid {process.pid}" in said and len(said.splitlines()) == 1
    assert process.poll() is None
