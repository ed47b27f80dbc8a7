"""Samplers join and leave a run with real engines; no group is lost or trained twice."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tandem.services.run.folder import CONFIG_FILE
from tests.support.whole_run import UNHURRIED, WholeRun, processes_of

pytestmark = pytest.mark.system


@pytest.mark.timeout(300)
def test_a_sampler_joins_a_running_run_and_leaves_it(tmp_path: Path) -> None:
    run = WholeRun(tmp_path, run={"total_batches": 100_000}, reward=UNHURRIED)
    supervisor = run.start("run", str(run.recipe))
    run.wait_for(lambda: len(run.metrics()) >= 1, supervisor)
    asked_at, began = len(run.metrics()), time.monotonic()
    assert run.tandem("scale", str(run.folder), "rollout=2").returncode == 0
    run.wait_for(lambda: run.last_batch().get("samplers_acknowledged") == 2, supervisor)
    print(f"the second sampler has the weights of a trained batch {time.monotonic() - began:.1f} s after the order")
    assert len(run.metrics()) > asked_at + 2, "the run went on while the second engine started"
    assert run.tandem("scale", str(run.folder), "rollout=1").returncode == 0
    said = tmp_path / "run.out"
    run.wait_for(lambda: "rollout-1 has left the run" in said.read_text(), supervisor)
    run.wait_for(lambda: run.last_batch().get("samplers_acknowledged") == 1, supervisor)
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(30) == 130, said.read_text()[-3000:] + run.logs()

    assert "rollout-1 joins the run" in said.read_text() and "without draining" not in said.read_text()
    assert "died" not in said.read_text()
    assert run.ledger()["violations"] == [] and max(run.instances().values()) == 1
    groups = [group for groups in run.records().values() for group in groups]
    assert {row.unscored_reason for group in groups for row in group.scored_rows} == {None}
    assert json.loads((run.folder / CONFIG_FILE).read_text())["rollout"]["num_replicas"] == 1
    assert processes_of(run) == []
