"""Which version is the best, which exports are removed, and when a run has trained long enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.services.config.eval_sets import EvalConfig
from tandem.services.run.best_version import (
    best_versions,
    evaluation_figures,
    keep_best,
    reason_to_stop,
    remove_others,
    values_by_version,
)
from tests.support.made_up_run import evaluation_line

METRIC = "eval/test/pass@1"


def lines(*values: float | None) -> list[dict[str, Any]]:
    """Evaluations of the versions 0, 1, …; None: it failed."""
    return [evaluation_line(version, value) for version, value in enumerate(values)]


def test_the_best_versions_are_the_first_trained_ones_with_the_highest_values() -> None:
    values = values_by_version(lines(0.9, 0.1, None, 0.5, 0.5), METRIC)
    assert values == {1: 0.1, 3: 0.5, 4: 0.5} and best_versions(values, 1) == [3]
    assert (best_versions(values, 2), best_versions(values, 9), best_versions({}, 1)) == ([3, 4], [3, 4, 1], [])
    repeated = [*lines(0.0, 0.1), evaluation_line(1, 0.3)]
    assert values_by_version(repeated, METRIC) == {1: 0.3}, "a version that was evaluated again"


def test_the_sums_over_episodes_are_figures() -> None:
    line = evaluation_line(1, 0.5)
    line["sets"]["test"]["episodes"] = {"num_turns": 9, "stop_terminated": 3}
    figures = evaluation_figures(line)
    assert (figures["eval/test/num_turns"], figures["eval/test/stop_terminated"]) == (9, 3)


@pytest.mark.parametrize(
    ("values", "config", "says"),
    [
        ((0.9, 0.1, 0.2), {"stop_at": 0.8}, ""),
        ((0.1, 0.1, 0.8), {"stop_at": 0.8}, "eval/test/pass@1 is 0.8000 at version 2 (eval.stop_at = 0.8)"),
        ((0.1, 0.5, 0.4), {"patience": 2}, ""),
        ((0.1, 0.5, None, 0.4, 0.6, 0.6), {"patience": 2}, ""),
        (
            (0.1, 0.5, 0.4, 0.5, 0.9),
            {"patience": 2},
            "2 evaluations up to version 3 have no better eval/test/pass@1 than 0.5000 (eval.patience = 2)",
        ),
        ((0.1, 0.5, 0.4, 0.3), {}, ""),
        ((), {"patience": 1}, ""),
    ],
)
def test_a_run_ends_early_by_threshold_or_patience(
    values: tuple[float | None, ...], config: dict[str, Any], says: str
) -> None:
    assert reason_to_stop(lines(*values), EvalConfig(keep_best=METRIC, **config)) == says


def test_only_the_best_exports_and_their_adapters_stay(tmp_path: Path) -> None:
    names = ("000003", "000003-adapter", "000006", "000006-adapter", "000009.partial")
    for name in names:
        (tmp_path / "best" / name).mkdir(parents=True)
    remove_others(tmp_path, [6])
    assert sorted(one.name for one in (tmp_path / "best").iterdir()) == ["000006", "000006-adapter", "000009.partial"]
    remove_others(tmp_path, [])
    assert [one.name for one in (tmp_path / "best").iterdir()] == ["000009.partial"]
    remove_others(tmp_path / "none", [1])


def test_exports_of_as_many_versions_stay_as_are_to_be_kept(tmp_path: Path) -> None:
    for version in (1, 2, 4):
        (tmp_path / "best" / f"{version:06d}").mkdir(parents=True)
    keep_best(tmp_path, lines(0.9, 0.1, 0.4, 0.8, 0.2), METRIC, 2)
    assert sorted(one.name for one in (tmp_path / "best").iterdir()) == ["000002", "000004"], "3 has no export"
