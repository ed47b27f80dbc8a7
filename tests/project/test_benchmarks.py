"""Every benchmark answers `--help`, so its imports work, and the staleness study draws the right conclusions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.staleness_report import Cell, difference, interval, table, verdicts
from tests.support.paths import ROOT
from tests.support.processes import run_python

SCRIPTS = sorted(file.name for file in (ROOT / "benchmarks").glob("*.py") if "\ndef main(" in file.read_text())


HELP = """
import contextlib, io, json, runpy, sys
said = {}
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            runpy.run_path(f"benchmarks/{script}", run_name="__main__")
        except SystemExit as ended:
            said[script] = ended.code, text.getvalue()
print(json.dumps(said))
"""
"""Runs all scripts in one process, because most load torch."""


def test_every_benchmark_answers_help() -> None:
    done = run_python("-c", HELP, *SCRIPTS)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert sorted(said) == SCRIPTS
    assert all(code == 0 and text.startswith(f"usage: {script}") for script, (code, text) in said.items())


def run(seed: int, budget: int, correction: str, accuracy: float, staleness: float | None = None) -> dict[str, Any]:
    return {
        "seed": seed,
        "staleness_budget": budget,
        "correction": correction,
        "accuracy": accuracy,
        "mean_staleness": budget if staleness is None else staleness,
        "behavior_proximal_kl": 0.0,
        "effective_sample_size": 1.0,
        "clipped_fraction": 0.0,
    }


def study(losses: list[float], **more: Any) -> dict[str, Any]:
    """Default runs, one seed each, whose accuracy at S = 4 is the given number of points below that at S = 0."""
    runs = [run(seed, 0, "token_clip", 0.9 + seed / 100) for seed in range(len(losses))]
    runs += [run(seed, 4, "token_clip", 0.9 + seed / 100 - loss / 100, **more) for seed, loss in enumerate(losses)]
    return {"runs": runs}


def test_the_interval_comes_from_the_t_distribution() -> None:
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0 and math.isclose(half, 2.776 * math.sqrt(2.5 / 5))
    assert interval([1.0])[1] == math.inf
    assert math.isclose(interval([0.0, 1.0] * 20)[1], 2.0227 * 0.506370 / math.sqrt(40), rel_tol=1e-3)


@pytest.mark.parametrize(
    ("losses", "passes"), [([0.5, 1.0, 0.8], True), ([2.9, 3.1, 3.0], False), ([-2.0, 2.0, 6.0], False)]
)
def test_the_default_passes_only_if_its_whole_interval_passes(losses: list[float], passes: bool) -> None:
    lines, passed = verdicts(study(losses))
    assert passed is passes
    assert ("passes" in lines[0]) is passes


def test_a_study_that_did_not_reach_its_staleness_fails() -> None:
    lines, passed = verdicts(study([0.1, 0.2, 0.0], staleness=2.7))
    assert not passed and "BELOW" in lines[-1] and "4/token_clip seed 2" in lines[-1]


def test_differences_are_paired_by_seed() -> None:
    record = study([1.0, 1.0, 1.0])  # accuracies differ between seeds, their loss does not
    found = difference(record, Cell(4, "token_clip"), Cell(0, "token_clip"))
    assert found is not None and math.isclose(found[0], -1.0) and math.isclose(found[1], 0.0, abs_tol=1e-9)
    assert any("| 4 | `token_clip` |" in line and "-1.0 [-1.0, -1.0]" in line for line in table(record))
    assert difference(record, Cell(8, "none"), Cell(0, "token_clip")) is None


def test_a_study_that_ended_early_fails_with_the_reason(tmp_path: Path) -> None:
    """A study fails without a run or with one of two seeds; a plan without the judged cells may be complete."""
    output = tmp_path / "record.json"
    paths = ["--folder", str(tmp_path), "--output", str(output)]
    done = run_python("benchmarks/staleness.py", "--minutes", "-1", *paths)
    assert done.returncode == 1, done.stderr
    told = "NOT FINISHED: 60 of 60 planned runs are missing."
    assert told in done.stdout and told in output.with_suffix(".md").read_text()
    record, cell = {"runs": [run(0, 8, "none", 0.9)]}, Cell(8, "none")
    lines, passed = verdicts(record, [(0, cell), (1, cell)])
    assert not passed and lines[-1].startswith("NOT FINISHED: 1 of 2")
    assert verdicts(record, [(0, cell)])[1]
