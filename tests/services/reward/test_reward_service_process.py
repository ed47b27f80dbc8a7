"""The reward service as a process: of a run (groups, calls and jobs), and alone with its own Redis."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.protos import reward_pb2
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import dump_recipe, parse_recipe
from tandem.services.reward.server import SERVICE_NAME
from tandem.services.rpc.tokens import Role
from tests.services.reward.conftest import answers, collect, generate, rewards, run_of
from tests.support.paths import ROOT
from tests.support.reward_process import RewardProcess, running_reward
from tests.support.reward_server import EXACT, Calls
from tests.support.reward_server import answers as job_items
from tests.support.service_wire import ask_info, check_what_it_says, health_of, token_of
from tests.support.waiting import eventually

FUNCTION = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang" and extra_info["n"] % 2 == 0:
        time.sleep(600)
    if solution_str == "die":
        os._exit(9)
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}
"""
SERVE = """
import sys
from tandem.services.command_line import run_service
from tandem.services.config import load_resolved
from tandem.services.process import die_with_parent
from tandem.services.reward.service import main
die_with_parent()
run_service(lambda: main(load_resolved(sys.argv[1]), sys.argv[2]))
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def buffer(redis_url: str) -> Buffer:
    return run_of(redis_url)


@pytest.fixture
def start(redis_url: str, buffer: Buffer, tmp_path: Path) -> Iterator[Start]:
    """Starts the run's service as a process; the scorer is that of FUNCTION."""
    (tmp_path / "score.py").write_text(FUNCTION)
    started: list[subprocess.Popen[str]] = []

    def start(scorer: str = f"{tmp_path}/score.py:compute_score", **popen: Any) -> subprocess.Popen[str]:
        reward = {"scorer": scorer, "timeout_seconds": 1.0, "num_workers": 2, "max_attempts": 2}
        sections = {"run": {"run_id": buffer.run_id}, "model": {"path": "x"}, "data": {"train_file": "x"}}
        (tmp_path / "config.json").write_text(dump_recipe(parse_recipe({**sections, "reward": reward})))
        command = [sys.executable, "-c", SERVE, str(tmp_path / "config.json"), redis_url]
        started.append(subprocess.Popen(command, cwd=ROOT, text=True, **popen))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=10.0)


LOADING = """
import os, time
from pathlib import Path

Path("{started}").write_text(str(os.getpid()))
time.sleep(600)
"""


def test_a_service_whose_scorer_is_loading_ends_at_once(start: Start, tmp_path: Path) -> None:
    started = tmp_path / "started"
    (tmp_path / "slow.py").write_text(LOADING.format(started=started))
    process = start(f"{tmp_path}/slow.py:compute_score")
    eventually(lambda: started.exists() and started.read_text(), seconds=60.0)
    process.terminate()
    assert process.wait(timeout=30.0) == -signal.SIGTERM
    eventually(lambda: not psutil.pid_exists(int(started.read_text())))


def test_the_process_serves_groups_calls_and_jobs_and_stops(buffer: Buffer, start: Start) -> None:
    before = time.time()
    process = start()
    ids = generate(buffer, [answers("1", "2"), answers("1", "die"), answers("hang", "1"), answers("2", "1")])
    groups = collect(buffer, 4, seconds=30.0)
    assert [rewards(groups[one]) for one in ids] == [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    assert groups[ids[0]].scored_rows[0].breakdown == {"acc": 1.0}
    assert groups[ids[1]].scored_rows[1].breakdown == {"acc": 0.0, "fault/crashed": 1.0}
    assert groups[ids[2]].scored_rows[0].breakdown == {"acc": 0.0, "fault/timeout": 1.0}
    assert buffer.counts()["dropped"] == 0
    address = buffer.services()["reward"]
    with Calls(address, token_of(buffer, Role.score)) as calls:
        reply = calls.stub.Score(score_request(), timeout=20.0)
        submitted = calls.submit(job_items("1", "2"), rubric=EXACT)
        (*_, event) = calls.watch(submitted.job.job_id)
    assert (event.job.num_scored, event.job.mean_value) == (2, 0.5)
    info = check_what_it_says(
        address, buffer, name="reward", service_names=("tandem.v1.RewardService",), started_after=before
    )
    kinds = ["scored", "unscored", "unscored", "scored", "unscored"]
    assert [item.WhichOneof("result") for item in reply.items] == kinds
    assert [reply.items[n].unscored.reason for n in (1, 2, 4)] == ["invalid_input", "crashed", "invalid_input"]
    assert (reply.items[0].scored.value, dict(reply.items[0].scored.breakdown)) == (1.0, {"acc": 1.0})
    assert reply.items[3].scored.value == 0.0
    assert info.figures["groups_completed"] == 4 and info.figures["workers_replaced"] >= 3
    assert info.figures["jobs:items_scored"] == 2
    process.terminate()
    assert process.wait(timeout=20.0) == 0
    assert buffer.verify() == []


def score_request() -> reward_pb2.ScoreRequest:
    item = reward_pb2.ScoreRequest.Item
    return reward_pb2.ScoreRequest(
        items=[
            item(solution="1", ground_truth=json.dumps("1"), extra_info="{}"),
            item(solution="1", ground_truth="not json"),
            item(solution="die", ground_truth=json.dumps("1")),
            item(solution="3", ground_truth=json.dumps("1")),
            item(solution="1", ground_truth=json.dumps("1"), extra_info="[]"),
        ]
    )


@pytest.mark.system
def test_a_killed_service_loses_no_group(buffer: Buffer, start: Start) -> None:
    first = start()
    eventually(lambda: "reward" in buffer.services())
    generate(buffer, [answers("hang"), answers("hang")])
    eventually(lambda: buffer.counts()["generated_leased"] > 0)
    first.kill()
    first.wait(timeout=10.0)
    generate(buffer, [answers("1")])
    start()
    collect(buffer, 3, seconds=30.0)  # the second `hang` only hangs in groups with even numbers
    assert buffer.counts()["leases_expired"] == 0, "the new process took its predecessor's leases back at once"
    assert buffer.verify() == []


def test_a_scorer_that_cannot_be_built_is_a_one_line_error(start: Start) -> None:
    process = start("exat", stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and said.startswith("tandem: reward.scorer 'exat' is unknown; did you mean exact?")
    assert said.count("\n") == 1


# ---- without a run ----


def test_a_service_runs_alone_with_its_own_redis(tmp_path: Path) -> None:
    with running_reward(tmp_path) as address, Calls(address) as one:
        for name in ("", SERVICE_NAME):
            assert health_of(address, name) == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(one.channel)
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME)
        assert next(reflection.ServerReflectionInfo(iter([asked]), timeout=20)).HasField("file_descriptor_response")
        reply = one.submit(job_items("1", "2"), key="kept")
        one.watch(reply.job.job_id)
        info = ask_info(address)
        assert (info.service, info.figures["items_ended"], info.figures["jobs"]) == ("reward", 2, 1)
    service = RewardProcess(tmp_path)
    try:
        with Calls(service.address) as one:
            again = one.open("kept")
            assert (again.job.job_id, again.job.state) == (reply.job.job_id, reward_pb2.Job.DONE)
            assert (again.job.num_scored, again.next_chunk) == (2, 1)
    finally:
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(timeout=20) == 0
