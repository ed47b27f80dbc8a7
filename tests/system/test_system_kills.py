"""kill -9 of any process, Ctrl-C, and an engine that cannot start: no group is lost, and no process is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

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


def started(folder: Path, steps: int) -> tuple[WholeRun, subprocess.Popen[str]]:
    """A run that has trained this many batches, and its supervisor."""
    run = WholeRun(folder)
    supervisor = run.start("run", str(run.recipe))
    run.wait_for(lambda: len(run.metrics()) >= steps, supervisor)
    return run, supervisor


def finish(run: WholeRun, supervisor: subprocess.Popen[str]) -> None:
    run.wait_for(lambda: (run.folder / "summary.json").exists(), supervisor)
    assert supervisor.wait(30) == 0, (run.scratch / "run.out").read_text() + run.logs()
    check_finished(run)


def resume(run: WholeRun) -> None:
    assert processes_of(run) == []
    done = run.tandem("run", str(run.recipe), "--resume")
    assert done.returncode == 0, done.stdout + done.stderr + run.logs()
    check_finished(run)


@pytest.mark.timeout(240)
def test_a_killed_trainer_is_restarted_and_every_group_trains_once(tmp_path: Path) -> None:
    run, supervisor = started(tmp_path, 6)
    service_process(supervisor, "trainer").kill()
    finish(run, supervisor)
    assert any(line.get("replayed") for line in run.metrics()), "batches after the checkpoint were trained again"


@pytest.mark.timeout(400)
def test_a_tree_that_is_killed_before_its_first_checkpoint_is_resumed(tmp_path: Path) -> None:
    run, supervisor = started(tmp_path, 1)
    kill_tree(supervisor)
    resume(run)


@pytest.mark.timeout(300)
def test_a_run_survives_kills_of_every_other_service(tmp_path: Path) -> None:
    run, supervisor = started(tmp_path, 2)
    for moment, service in enumerate(("feed", "reward", "rollout"), 2):
        run.wait_for(lambda moment=moment: len(run.metrics()) >= moment, supervisor)
        service_process(supervisor, service).kill()
    finish(run, supervisor)


@pytest.mark.timeout(400)
def test_no_process_outlives_a_killed_supervisor_and_the_run_is_resumed(tmp_path: Path) -> None:
    run, supervisor = started(tmp_path, 6)
    below = psutil.Process(supervisor.pid).children(recursive=True)
    assert len(below) >= 5, "redis, feed, rollout and its engine, reward, trainer"
    supervisor.kill()
    supervisor.wait(10)
    _gone, alive = psutil.wait_procs(below, timeout=10)
    assert alive == []
    resume(run)


@pytest.mark.timeout(200)
def test_ctrl_c_ends_everything_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    run, supervisor = started(tmp_path, 2)
    below = psutil.Process(supervisor.pid).children(recursive=True)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(STOP_SECONDS) == 130, (run.scratch / "run.out").read_text()
    assert psutil.wait_procs(below, timeout=1)[1] == []
    resume(run)


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
