"""What is computed for a line of metrics.jsonl: figures of a batch, sums over the lives of services, phases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.protos.types import ScoredTrajectory, TrajectoryGroup
from tandem.services.run.metrics import (
    SAMPLER_FIGURES,
    MetricsLog,
    PhaseClock,
    ServiceTotals,
    batch_figures,
    group_figures,
    percentile_99,
)
from tests.support.made_up_run import evaluation_line
from tests.support.training_groups import make_batch, make_group


def test_figures_of_a_batch() -> None:
    groups = [
        make_group(0, versions=(1, 3), rewards=(0.0, 1.0, None, 1.0)),
        make_group(1, versions=(3,), rewards=(1.0,) * 4),
    ]
    batch, _ = make_batch(groups, policy_version=5)
    figures = batch_figures(batch)
    assert figures["reward_mean"] == pytest.approx(6 / 7)
    assert figures["staleness_counts"] == [0, 4, 0, 3], "version 4 began; the oldest token counts"
    assert figures["staleness_mean"] == pytest.approx(13 / 7)
    assert (figures["staleness_max"], figures["staleness_p99"]) == (3, 3)
    assert figures["multi_version_fraction"] == pytest.approx(3 / 7)
    assert figures["num_groups"] == 2


def test_greedy_answers_have_their_own_figures() -> None:
    def figures(*baselines: float) -> dict[str, object]:
        rewards = (0.0, 1.0, 1.0, 1.0)
        groups = [
            make_group(index, versions=(3,), rewards=(*rewards, *greedy), baseline=bool(greedy), num_segments=2)
            for index, greedy in enumerate([[one] for one in baselines] or [[], []])
        ]
        return batch_figures(make_batch(groups, policy_version=5)[0])

    assert figures(1.0, 0.5) == {**figures(), "baseline_reward_mean": 0.75}


def test_components_of_the_reward_are_figures() -> None:
    """Only policy rows with a reward count; rows without a component are left out of its mean."""
    given = [
        {"format": 1.0, "math": 0.0},
        {"format": 0.0, "math/fault/limit": 1.0, "fault/timeout": 1.0},
        {"format": 9.0},
        {"format": 0.5, "math": 1.0},
    ]
    group = make_group(0, versions=(3,), rewards=(1.0, 0.0, None, 1.0), num_segments=2)
    greedy = make_group(1, versions=(3,), rewards=(1.0, 1.0), baseline=True, num_segments=2)
    rows = [
        ScoredTrajectory(row.trajectory, row.reward, parts, row.unscored_reason, row.unscored_detail)
        for row, parts in zip(group.scored_rows, given, strict=True)
    ]
    others = [
        ScoredTrajectory(row.trajectory, row.reward, {"format": 0.5} if row.trajectory.role == "policy" else {"x": 1.0})
        for row in greedy.scored_rows
    ]
    groups = [TrajectoryGroup(group.prompt, tuple(rows)), TrajectoryGroup(greedy.prompt, tuple(others))]
    lengths = [len(one.prompt.token_ids) for one in (group, greedy)]
    assert group_figures(groups) == {
        "prompt_length_mean": sum(lengths) / 2,
        "prompt_length_max": max(lengths),
        "answers_at_fault": 1,
        "reward/format": pytest.approx(0.5),
        "reward/math": pytest.approx(0.5),
    }


def test_percentile_99_of_a_histogram() -> None:
    assert [percentile_99(counts) for counts in ([1], [99, 1], [98, 2], [0, 0, 5])] == [0, 0, 1, 2]


def test_a_rewound_log_keeps_what_the_checkpoint_contains(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in range(1, 6):
        log.add({"step": step})
        log.add_evaluation(evaluation_line(step, 0.1 * step))
        (tmp_path / "evaluations" / f"{step:06d}").mkdir(parents=True)
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "torn')
    again = MetricsLog(tmp_path)
    again.rewind(checkpoint_version=2, last_recorded=4)
    assert [entry["step"] for entry in again.lines.read()] == [1, 2]
    assert [entry["version"] for entry in again.evaluations.read()] == [1, 2, 3, 4]
    assert sorted(folder.name for folder in (tmp_path / "evaluations").iterdir()) == [f"{n:06d}" for n in range(1, 5)]
    assert again.last["step"] == 2
    again.add({"step": 3})
    again.close()
    assert [entry["step"] for entry in again.lines.read()] == [1, 2, 3]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_sampler_sums_survive_restarts_and_start_at_the_first_observation() -> None:
    totals = ServiceTotals(SAMPLER_FIGURES, {"a": {"sampled_tokens": 100.0}}, {"sampler_tokens": 7.0})
    assert totals.update({"a": {"sampled_tokens": 130.0}})["sampler_tokens"] == 37.0
    assert totals.update({"a": {"sampled_tokens": 10.0}})["sampler_tokens"] == 47.0, "a restarted sampler counts from 0"
    assert totals.update({"a": {"sampled_tokens": 10.0}, "b": {"sampled_tokens": 5.0}})["sampler_tokens"] == 52.0


def test_a_phase_clock_sums_each_phase_and_resets_at_a_lap() -> None:
    clock = PhaseClock()
    for _ in range(2):
        with clock.phase("read"):
            pass
    seconds = clock.lap()
    assert set(seconds) == {"seconds_read", "seconds_total"}
    assert 0 <= seconds["seconds_read"] <= seconds["seconds_total"]
    assert set(clock.lap()) == {"seconds_total"}
