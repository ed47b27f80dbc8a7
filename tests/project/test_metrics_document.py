"""docs/metrics.md names every figure of metrics.jsonl. Tests that train compare it with what they write."""

from __future__ import annotations

from typing import get_args

from tandem.services.run.metrics import batch_figures
from tandem.trainer.batch.rejected import Rejection
from tests.support.figures_page import unnamed
from tests.support.training_groups import make_batch, make_group


def test_figures_that_few_runs_have_are_named() -> None:
    groups = [
        make_group(0, versions=(9,), rewards=(0.0, 1.0)),
        make_group(1, versions=(3,), rewards=(0.0, 1.0, 1.0), baseline=True),
    ]
    figures = batch_figures(make_batch(groups, policy_version=5)[0])
    assert {"baseline_reward_mean", "unknown_version_rows"} <= figures.keys()
    reasons = {f"rejected_{reason}" for reason in get_args(Rejection)}
    assert unnamed({*figures, *reasons, "rejected_response_length_mean", "replayed"}) == set()


def test_a_figure_without_a_name_is_found() -> None:
    there = {"step", "staleness_8_plus/num_rows", "staleness_0/rejection/veto/mean", "reward/format"}
    missing = {"actor/grad_norm", "staleness_0/nothing", "staleness_0", "reward/a/b", "nothing_fraction"}
    assert unnamed(there | missing) == missing
