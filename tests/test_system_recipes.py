"""Every shipped recipe runs: the demo as a user sees it, GSM8K on a stand-in for its model and file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from services.arithmetic import EVALUATION_ROWS
from services.tiny_model import build_tiny_model
from tests.test_examples import prepare, write_gsm8k
from tests.whole_run import ROOT, environment

pytestmark = pytest.mark.system


def tandem(folder: Path, *arguments: str, deadline: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    variables = {**environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=deadline, check=False
    )


def summary(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "summary.json").read_text()))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_learns_and_its_control_does_not(tmp_path: Path, seed: int) -> None:
    done = tandem(tmp_path, "demo", "--seed", str(seed), deadline=700)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "demo"
    figures = summary(run)
    print(json.dumps(figures, indent=1))
    assert figures["initial_accuracy"] <= 0.55 and figures["final_accuracy"] >= 0.85
    assert figures["train_steps"] == figures["weight_updates"] == figures["total_batches"]
    assert figures["groups"]["committed"] == figures["total_batches"] * figures["groups_per_batch"]
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert all(e["num_rows"] == e["num_scored"] == EVALUATION_ROWS for e in evaluations)
    with pa.ipc.open_file(run / "batches" / "000001" / "groups.arrow") as reader:
        assert reader.read_all().num_rows == 32 * 8
    assert list((run / "tensorboard").iterdir())

    recipe = str(ROOT / "examples" / "recipes" / "arithmetic.toml")
    changes = ["run.run_id=control", "run.folder=runs/control", "run.total_batches=20", "trainer.learning_rate=0"]
    control = tandem(tmp_path, "run", recipe, *changes, f"run.seed={seed}", deadline=200)
    assert control.returncode == 0, control.stdout[-3000:] + control.stderr[-3000:]
    figures = summary(tmp_path / "runs" / "control")
    assert abs(figures["final_accuracy"] - figures["initial_accuracy"]) <= 0.03


@pytest.mark.timeout(300)
def test_the_gsm8k_recipe_runs_on_a_stand_in(tmp_path: Path) -> None:
    write_gsm8k(tmp_path / "raw")
    assert prepare(tmp_path / "raw", tmp_path / "data" / "gsm8k").returncode == 0
    build_tiny_model(tmp_path / "model")
    small = [
        "model.path=model",
        "trainer.dtype=float32",
        "weights.backend=gloo",
        "run.total_batches=2",
        "run.groups_per_batch=2",
        "rollout.max_response_tokens=64",
        "trainer.drop_zero_variance=false",
        f'reward.scorer="{ROOT}/examples/gsm8k_reward.py:compute_score"',
    ]
    done = tandem(tmp_path, "run", str(ROOT / "examples/recipes/gsm8k.toml"), *small, deadline=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert summary(tmp_path / "runs" / "gsm8k")["train_steps"] == 2
