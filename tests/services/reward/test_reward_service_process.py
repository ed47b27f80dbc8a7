"""The ring's reward service as a process: over gRPC, killed while it scores, and refused at its start."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.protos import reward_pb2, reward_pb2_grpc
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import dump_recipe, parse_recipe
from tandem.services.rpc.client import connect
from tests.support.paths import ROOT
from tests.support.reward_ring import answers, collect, generate, rewards, run_of
from tests.support.service_wire import check_what_it_says
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


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[tuple[Buffer, Callable[[], subprocess.Popen[bytes]]]]:
    """A run, and the function that starts its reward service as a process."""
    (tmp_path / "score.py").write_text(FUNCTION)
    buffer = run_of(redis_url)
    reward = {
        "scorer": f"{tmp_path}/score.py:compute_score",
        "timeout_seconds": 1.0,
        "num_workers": 2,
        "max_attempts": 2,
    }
    recipe = parse_recipe(
        {"run": {"run_id": buffer.run_id}, "model": {"path": "x"}, "data": {"train_file": "x"}, "reward": reward}
    )
    (tmp_path / "config.json").write_text(dump_recipe(recipe))
    code = (
        "from tandem.services.config import load_resolved\nfrom tandem.services.process import run_service\n"
        "from tandem.services.reward.service import main\n"
        f"run_service(lambda: main(load_resolved({str(tmp_path / 'config.json')!r}), {redis_url!r}))"
    )
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code], cwd=ROOT))
        return started[-1]

    yield buffer, start
    for process in started:
        process.kill()
        process.wait(timeout=10.0)


def test_the_process_serves_grpc_and_stops(service: tuple[Buffer, Callable[[], subprocess.Popen[bytes]]]) -> None:
    buffer, start = service
    before = time.time()
    process = start()
    ids = generate(buffer, [answers("1", "2"), answers("1", "die"), answers("hang", "1"), answers("2", "1")])
    groups = collect(buffer, 2, seconds=30.0)
    assert [rewards(groups[ids[n]]) for n in (0, 3)] == [[1.0, 0.0], [0.0, 1.0]]
    assert groups[ids[0]].scored_rows[0].breakdown == {"acc": 1.0}
    eventually(lambda: buffer.counts()["dropped"] == 2)
    assert buffer.counts()["dropped:timeout"] == buffer.counts()["dropped:crashed"] == 1
    with connect(buffer.services()["reward"]) as channel:
        reply = reward_pb2_grpc.RewardServiceStub(channel).Score(score_request(), timeout=20.0)
    info = check_what_it_says(
        buffer.services()["reward"],
        buffer,
        name="reward",
        service_names=("tandem.v1.RewardService",),
        started_after=before,
    )
    assert [item.WhichOneof("result") for item in reply.items] == [
        "scored",
        "unscored",
        "unscored",
        "scored",
        "unscored",
    ]
    assert [reply.items[n].unscored.reason for n in (1, 2, 4)] == ["invalid_input", "crashed", "invalid_input"]
    assert (reply.items[0].scored.value, dict(reply.items[0].scored.breakdown)) == (1.0, {"acc": 1.0})
    assert reply.items[3].scored.value == 0.0
    assert info.figures["groups_completed"] == 2 and info.figures["workers_replaced"] >= 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10.0) == 0
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


def test_a_killed_service_loses_no_group(service: tuple[Buffer, Callable[[], subprocess.Popen[bytes]]]) -> None:
    buffer, start = service
    first = start()
    eventually(lambda: "reward" in buffer.services())
    generate(buffer, [answers("hang"), answers("hang")])
    eventually(lambda: buffer.counts()["generated_leased"] > 0)
    first.kill()
    first.wait(timeout=10.0)
    generate(buffer, [answers("1")])
    start()
    collect(buffer, 2, seconds=30.0)  # the second `hang` only hangs in groups with even numbers
    eventually(lambda: buffer.counts().get("dropped:timeout") == 1)
    assert buffer.counts()["leases_expired"] == 0, "the new process took its predecessor's leases back at once"
    assert buffer.verify() == []


def test_a_scorer_that_cannot_be_built_is_a_one_line_error(redis_url: str, tmp_path: Path) -> None:
    buffer = run_of(redis_url)
    recipe = {
        "run": {"run_id": buffer.run_id},
        "model": {"path": "x"},
        "data": {"train_file": "x"},
        "reward": {"scorer": "exat"},
    }
    (tmp_path / "config.json").write_text(dump_recipe(parse_recipe(recipe)))
    code = (
        "from tandem.services.config import load_resolved\nfrom tandem.services.process import run_service\n"
        "from tandem.services.reward.service import main\n"
        f"run_service(lambda: main(load_resolved({str(tmp_path / 'config.json')!r}), {redis_url!r}))"
    )
    root = ROOT
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "tandem: reward.scorer 'exat' is unknown; did you mean exact?"
    )
    assert done.stderr.count("\n") == 1
