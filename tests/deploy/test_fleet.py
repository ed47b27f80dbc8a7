"""One run whose samplers come, go and die: counts survive the supervisor, and nobody's death stops the training."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.services.commands.find_controller import controller_of
from tests.support.whole_run import UNHURRIED, WholeRun, processes_of, service_process

pytestmark = pytest.mark.system

CREDITS = 20
"""(S + 1)·P of the run."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[WholeRun]:
    made = WholeRun(
        tmp_path,
        run={"total_batches": 100_000},
        rollout={"engine": "transformers", "max_response_tokens": 32, "max_groups_in_flight": 4},
        reward=UNHURRIED,
        trainer={"checkpoint_every": 20, "num_ranks": 2},
    )
    yield made
    for process in processes_of(made):
        process.kill()


def said(run: WholeRun) -> str:
    return (run.scratch / "run.out").read_text()


def samplers(run: WholeRun) -> list[str]:
    """The states of those that the supervisor knows; none while it starts."""
    running = controller_of(run.folder) is not None
    return [one.state for one in run.status().services if one.kind == "rollout"] if running else []


def scale(run: WholeRun, replicas: int) -> None:
    done = run.tandem("scale", str(run.folder), f"rollout={replicas}")
    assert done.returncode == 0, done.stdout + done.stderr


def wait_for_samplers(run: WholeRun, supervisor: subprocess.Popen[str], number: int) -> None:
    """Waits until a version reached so many samplers, and these are the ones that run."""
    run.wait_for(lambda: samplers(run) == ["running"] * number, supervisor)
    run.wait_for(lambda: run.last_batch().get("samplers_acknowledged") == number, supervisor)


def check_that_samplers_outlive_a_rank(run: WholeRun, supervisor: subprocess.Popen[str]) -> None:
    """Kills one of two ranks. The samplers work until all credits are out, and the ranks go on from the checkpoint."""

    def pids() -> set[int]:
        return {one.pid for one in run.status().services if one.kind == "rollout"}

    def all_credits_are_scored() -> bool:
        counts = run.status().counts
        unscored = (f"{stage}_{state}" for stage in ("prompts", "generated") for state in ("waiting", "leased"))
        return counts["outstanding"] >= CREDITS and not any(counts[state] for state in unscored)

    before, ranks = pids(), psutil.Process(service_process(supervisor, "trainer").pid).children()
    assert len(ranks) == 2
    ranks[1].kill()
    run.wait_for(lambda: "trainer died" in said(run), supervisor)
    run.wait_for(all_credits_are_scored, supervisor)
    at = run.last_batch()["step"]
    run.wait_for(lambda: run.last_batch()["step"] > at + 1, supervisor)
    assert pids() == before and any(line.get("replayed") for line in run.metrics())


@pytest.mark.timeout(600)
def test_samplers_come_and_go_through_faults_and_the_run_trains_every_group_once(run: WholeRun) -> None:
    supervisor = run.start("run", str(run.recipe))
    run.wait_for(lambda: len(run.metrics()) >= 2, supervisor)
    scale(run, 4)
    for service in ("rollout", "reward"):  # while the others start
        service_process(supervisor, service).kill()
    wait_for_samplers(run, supervisor, 4)

    below = psutil.Process(supervisor.pid).children(recursive=True)
    supervisor.kill()
    supervisor.wait(10)
    assert psutil.wait_procs(below, timeout=10)[1] == []
    supervisor = run.start("run", str(run.recipe), "--resume")
    wait_for_samplers(run, supervisor, 4)
    assert dict(run.status().desired_replicas) == {"rollout": 4}, "the recipe says one"
    scale(run, 2)
    wait_for_samplers(run, supervisor, 2)

    check_that_samplers_outlive_a_rank(run, supervisor)
    scale(run, 0)
    run.wait_for(lambda: any("no sampler is alive" in line for line in run.status().warnings), supervisor)
    run.wait_for(lambda: "waits for scored groups" in run.status().services[-1].activity, supervisor)
    waits_at = run.last_batch()["step"]
    scale(run, 1)
    run.wait_for(lambda: run.last_batch()["step"] > waits_at + 1, supervisor)
    assert not any("no sampler is alive" in line for line in run.status().warnings)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(30) == 130, said(run)[-3000:] + run.logs()

    assert "without draining" not in said(run) and "giving up" not in said(run)
    steps = [line["step"] for line in run.metrics()]
    assert steps == list(range(1, len(steps) + 1))
    assert run.ledger()["violations"] == [] and max(run.instances().values()) == 1
    counts = run.ledger()["counts"]
    assert counts["dropped"] == 0, f"leavers and the dead cost no group its budget: {json.dumps(counts)}"
    assert processes_of(run) == []
