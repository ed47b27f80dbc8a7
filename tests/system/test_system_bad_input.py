"""Bad input that only the running services find: still one line, exit code 2, and no process left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.whole_run import WholeRun, processes_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]


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
