"""kill -9 of any process, Ctrl-C, and an engine that cannot start: no group is lost, and no process is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.gated_scores import Gate, gated_reward
from tests.support.whole_run import WholeRun, kill_tree, processes_of, service_process

pytestmark = pytest.mark.system

TOTAL, P = 10, 4
STOP_SECONDS = 10.0
"""How long Ctrl-C may take while all services work."""


def check_finished(run: WholeRun) -> None:
    """Checks trained = total batches × P, a reason for every other group, no instance twice, and no process left."""
    instances = run.instances()
    assert sum(instances.values()) == TOTAL * P
    assert max(instances.values()) == 1
    counts = run.ledger()["counts"]
    trained = counts["trained"] + counts["committed"]
    assert trained == TOTAL * P, counts
    assert counts["admitted"] == trained + counts["dropped"], counts
    assert sum(number for name, number in counts.items() if name.startswith("dropped:")) == counts["dropped"]
    assert [line["step"] for line in run.metrics()] == list(range(1, TOTAL + 1))
    assert processes_of(run) == []
    assert run.summary()["train_steps"] == TOTAL


def start(run: WholeRun, gate: Gate, steps: int, *options: str) -> subprocess.Popen[str]:
    """Starts the run, waits until it has this many trained batches, and returns its supervisor. The run trains at most
    one batch more.
    """
    gate.allow((steps + 1) * P)
    metrics = run.folder / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    supervisor = run.start("run", str(run.recipe), *options)
    # A resumed run first drops the lines after its checkpoint.
    run.wait_for(lambda: len(run.metrics()) >= steps and metrics.stat().st_mtime_ns > before, supervisor)
    return supervisor


@pytest.mark.timeout(300)
def test_a_run_survives_kills_of_every_service_and_every_group_trains_once(tmp_path: Path) -> None:
    """The scorer holds the run back so that it has enough left to do at each kill."""
    run, gate = WholeRun(tmp_path, reward=gated_reward(tmp_path / "gate")), Gate(tmp_path / "gate")
    gate.allow(0)
    supervisor = run.start("run", str(run.recipe))
    for moment, service in ((2, "feed"), (3, "reward"), (4, "rollout"), (6, "trainer")):
        gate.allow((moment + 1) * P)  # the trainer is killed before the checkpoint of batch 8
        run.wait_for(lambda moment=moment: len(run.metrics()) >= moment, supervisor)
        service_process(supervisor, service).kill()
    gate.allow((TOTAL - 1) * P)
    run.wait_for(lambda: len(run.metrics()) >= 8 and said(run).count("restarting it") == 4, supervisor)
    hang(run, supervisor, "redis-server", lambda: "does not answer; the services wait" in said(run))
    run.wait_for(lambda: "answers again" in said(run), supervisor)
    gate.allow(TOTAL * P)
    run.wait_for(lambda: (run.folder / "summary.json").exists(), supervisor)
    assert supervisor.wait(30) == 0, (run.scratch / "run.out").read_text() + run.logs()
    check_finished(run)
    assert any(line.get("replayed") for line in run.metrics()), "batches after the checkpoint were trained again"


def said(run: WholeRun) -> str:
    return (run.scratch / "run.out").read_text()


def hang(run: WholeRun, supervisor: subprocess.Popen[str], name: str, until: Callable[[], bool]) -> None:
    """Stops the processes of that name below the supervisor until the condition is true."""
    below = psutil.Process(supervisor.pid).children(recursive=True)
    stopped = [process for process in below if name in " ".join(process.cmdline())]
    assert stopped
    for process in stopped:
        process.suspend()
    run.wait_for(until, supervisor)
    for process in stopped:
        process.resume()


@pytest.mark.timeout(400)
def test_a_run_is_resumed_after_kill_9_of_its_tree_ctrl_c_and_kill_9_of_its_supervisor(tmp_path: Path) -> None:
    """The scorer holds the run back so that it is not over before the kills."""
    run, gate = WholeRun(tmp_path, reward=gated_reward(tmp_path / "gate")), Gate(tmp_path / "gate")
    kill_tree(start(run, gate, 1))
    assert not any(run.folder.glob("checkpoints/*")), "the tree was killed before its first checkpoint"

    supervisor = start(run, gate, 3, "--resume")
    below = psutil.Process(supervisor.pid).children(recursive=True)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(STOP_SECONDS) == 130, (run.scratch / "run.out").read_text()
    assert psutil.wait_procs(below, timeout=1)[1] == []

    supervisor = start(run, gate, 6, "--resume")
    below = psutil.Process(supervisor.pid).children(recursive=True)
    assert len(below) >= 5, "redis, feed, rollout and its engine, reward, trainer"
    supervisor.kill()
    supervisor.wait(10)
    assert psutil.wait_procs(below, timeout=10)[1] == []

    gate.allow(TOTAL * P)
    done = run.tandem("run", str(run.recipe), "--resume")
    assert done.returncode == 0, done.stdout + done.stderr + run.logs()
    check_finished(run)


@pytest.mark.timeout(200)
def test_an_engine_that_does_not_start_is_reported_with_its_cause(tmp_path: Path) -> None:
    run = WholeRun(tmp_path)
    config = run.model / "config.json"
    values = json.loads(config.read_text())
    # One layer more than the files hold: every header is valid, and only the engine finds that weights are missing.
    config.write_text(json.dumps({**values, "num_hidden_layers": values["num_hidden_layers"] + 1, "layer_types": None}))
    done = run.tandem("run", str(run.recipe), deadline=150)
    assert done.returncode == 2, done.stdout + done.stderr + run.logs()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("tandem: ")]
    log = run.folder / "logs" / "rollout-0.log"
    assert line.startswith(f"tandem: rollout-0: the engine for {run.model} does not start on this machine")
    assert f"{log} names the cause: ValueError: " in line and "not initialized" in line
    assert "Traceback" not in done.stdout + done.stderr
    assert processes_of(run) == []
