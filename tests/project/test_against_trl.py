"""The parts of the comparison with TRL that need no TRL: lengths, rewards, settings, ratios, bounds, measurement."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

from benchmarks import process_usage
from benchmarks.against_trl import ROOT, WORKLOADS, lognormal_lengths, missed_bounds, seconds_to, summary, trl_settings
from benchmarks.process_usage import Sample, cpu_at, kind_of, peak_memory, peaks, run_measured
from benchmarks.trl_environment import REQUIREMENTS
from benchmarks.trl_side import REWARDS
from tandem.protos.contracts import Scored, ScoreItem
from tandem.reward.scorers.exact import ExactMatch
from tandem.reward.scorers.repetition import Repetition
from tandem.services.config import load_recipe


def rounds(*seconds: tuple[float | None, float | None]) -> list[dict[str, dict[str, float | None]]]:
    return [{"trl": {"seconds_a_step": trl}, "tandem": {"seconds_a_step": tandem}} for trl, tandem in seconds]


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_not_the_ratio_of_medians() -> None:
    found = summary(rounds((1.0, 0.5), (2.0, 0.6), (4.0, 4.0)))["figures"]["seconds_a_step"]
    assert found == {"trl": 2.0, "tandem": 0.6, "ratio": 0.5, "ratios": [0.5, 0.3, 1.0]}


@pytest.mark.parametrize(("tandem", "lines"), [(0.35, 0), (0.36, 1), (None, 1)])
def test_a_ratio_above_its_bound_and_a_figure_that_was_not_measured_are_named(tandem: float | None, lines: int) -> None:
    found = {"bounds": {"seconds_a_step": 0.35}, **summary(rounds((1.0, tandem), (1.0, tandem)))}
    missed = list(missed_bounds(found))
    assert len(missed) == lines and all(line.startswith("seconds_a_step") for line in missed)


def test_the_bounds_are_the_goals_of_the_project() -> None:
    bounds = {name: dict(workload.bounds) for name, workload in WORKLOADS.items()}
    assert bounds == {
        "demo": {"seconds_a_step": 0.7, "seconds_to_accuracy_0.9": 0.8},
        "demo_transformers": {"seconds_a_step": 0.7, "seconds_to_accuracy_0.9": 0.8},
        "lognormal": {"seconds_a_step": 0.35},
        "prompts": {"seconds_a_step": 0.4},
    }


def test_the_time_to_an_accuracy_is_interpolated_to_its_first_crossing() -> None:
    points = [(0.0, 0.3), (10.0, 0.5), (20.0, 0.75), (30.0, 0.7)]
    assert seconds_to(0.7, points) == pytest.approx(18.0)
    assert seconds_to(0.3, points) == 0.0
    assert seconds_to(0.8, points) is None


def test_lognormal_lengths_have_their_mean_and_longest() -> None:
    lengths = lognormal_lengths(2000)
    assert statistics.fmean(lengths) == pytest.approx(96.0, rel=0.02)
    assert max(lengths) == 480 and min(lengths) >= 4
    assert statistics.fmean(lengths[:480]) == pytest.approx(96.0, rel=0.05), "those that 30 steps of 16 prompts read"


@pytest.mark.parametrize("answer", ["", "a", "abab abab", " 042 ", "Hello, hello!\nHELLO"])
def test_both_sides_score_alike(answer: str) -> None:
    for name, scorer in {"exact": ExactMatch(), "repetition": Repetition(n=2, unit="characters")}.items():
        score = scorer.judge(ScoreItem("", answer, "042"))
        assert isinstance(score, Scored) and REWARDS[name](answer, "042") == pytest.approx(score.value)


def test_trl_is_given_what_the_recipe_says() -> None:
    recipe = load_recipe(ROOT / "examples" / "recipes" / "arithmetic.toml", ["trainer.export_every=5"])
    settings = trl_settings(recipe)
    assert (settings.prompts_per_step, settings.answers_per_prompt, settings.longest_answer) == (32, 8, 8)
    assert (settings.learning_rate, settings.schedule, settings.warmup_steps) == (3e-4, "cosine", 10)
    assert (settings.steps, settings.checkpoint_every, settings.export_every, settings.shuffle) == (200, 50, 5, True)


def test_every_requirement_is_pinned_and_torch_comes_from_the_constraints_of_tandem() -> None:
    wanted = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert "trl==1.16.0" in wanted and all("==" in line for line in wanted)
    assert not any(line.startswith(("torch=", "transformers=")) for line in wanted)


def test_cpu_time_is_interpolated_and_memory_summed_over_the_processes_of_one_moment() -> None:
    samples = [Sample(10.0, 1.0, {"a": 5, "b": 1}), Sample(12.0, 5.0, {"a": 1, "b": 6})]
    assert [cpu_at(samples, moment) for moment in (9.0, 11.0, 13.0)] == [1.0, 3.0, 5.0]
    assert peak_memory(samples) == 7
    assert peaks(samples) == {"a": 5, "b": 6}


def test_processes_are_named_after_their_service_or_program() -> None:
    assert kind_of(["python", "-m", "tandem.services.cli", "serve", "rollout", "config.json"]) == "rollout"
    assert kind_of(["/usr/bin/redis-server unixsocket:/x"]) == "redis-server"
    assert kind_of([]) == "other"


TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "held = b'x' * (64 << 20); import time; time.sleep(0.5)"])
sys.exit(child.wait())
"""


def test_a_measured_run_counts_the_processes_below_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_usage, "INTERVAL_SECONDS", 0.1)
    samples = run_measured([sys.executable, "-c", TREE], {}, tmp_path / "log", 30.0)
    assert peak_memory(samples) > 64 << 20
    assert samples[-1].cpu_seconds > 0.0


@pytest.mark.parametrize(
    ("code", "deadline"), [("raise SystemExit('no model')", 30.0), ("import time; time.sleep(60)", 0.5)]
)
def test_a_run_that_fails_or_passes_its_deadline_ends_the_benchmark(tmp_path: Path, code: str, deadline: float) -> None:
    with pytest.raises(SystemExit, match="failed with"):
        run_measured([sys.executable, "-c", code], {}, tmp_path / "log", deadline)
