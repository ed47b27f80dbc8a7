"""`tandem plan` reads the folder of a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.services.planning.calibration import measure
from tandem.services.planning.proposals import predict
from tests.support.whole_run import WholeRun

pytestmark = pytest.mark.system


@pytest.mark.timeout(300)
def test_a_measured_run_is_enough_for_a_plan(tmp_path: Path) -> None:
    run = WholeRun(tmp_path, run={"total_batches": 12, "staleness_budget": 0}, trainer={"checkpoint_every": 100})
    run.finish()
    measured = measure(run.folder)
    assert measured.num_batches == 12 - 3
    assert {size.answer_tokens for size in measured.groups} == {(256,) * 4}, "answers have the maximum length"
    rates = measured.rates
    assert min(rates.step_seconds + rates.row_seconds, rates.batch_seconds + rates.token_seconds) > 0.0
    assert min(rates.publish_seconds, rates.stall_seconds, rates.score_seconds) > 0.0
    speeds = []
    for budget in (0, 1, 2):
        settings = measured.recipe.run.model_copy(update={"staleness_budget": budget})
        speeds.append(predict(measured, measured.recipe.model_copy(update={"run": settings})).steps_per_minute)
    assert speeds[0] < speeds[1] <= 1.05 * speeds[2]
    done = run.tandem("plan", str(run.folder / "config.json"), "--gpus", "4", "--from", str(run.folder))
    assert done.returncode == 0, done.stderr
    assert "ranks  samplers  GPUs each  steps/min" in done.stdout and "trainer.num_ranks=" in done.stdout
