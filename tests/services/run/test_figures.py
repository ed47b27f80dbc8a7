"""A run's figures: the lines of metrics.jsonl, the summary of them, and live progress on a terminal and in a log."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tandem.protos.errors import UnavailableError
from tandem.protos.types import ScoredTrajectory, TrajectoryGroup
from tandem.services.buffer.starvation import Observation
from tandem.services.buffer.types import Sampler
from tandem.services.run import progress
from tandem.services.run.metrics import (
    SAMPLER_FIGURES,
    MetricsLog,
    PhaseClock,
    ServiceTotals,
    batch_figures,
    group_figures,
    percentile_99,
    summarise,
)
from tandem.services.run.progress import Progress, ProgressSnapshot, RunWatch, plain_line, snapshot_of, table
from tests.support.run_inputs import recipe_of, small_values
from tests.support.trainer_ring import make_recipe
from tests.support.training_groups import make_batch, make_group
from tests.support.waiting import eventually

NOTHING = Observation()
STATES = {"feed": ("running", 10, 0), "trainer": ("running", 11, 0)}


def metrics_line(step: int, **changes: Any) -> dict[str, Any]:
    """One line of metrics.jsonl: two seconds per step, half of them waiting; samplers are idle for a quarter."""
    return {
        "step": step,
        "optimizer_step": 2 * step,
        "time": 1000.0 + 2 * step,
        "seconds_total": 2.0,
        "trainer_idle_seconds": 1.0,
        "reward_mean": 0.5,
        "reward_min": -1.0,
        "reward_max": 1.0,
        "staleness_mean": 1.5,
        "staleness_max": 3,
        "staleness_counts": [1, 3] if step > 1 else [4],
        "num_tokens": 4000,
        "sampler_tokens": 6000.0 * step,
        "sampler_busy_seconds": 1.5 * step,
        "sampler_idle_seconds": 0.5 * step,
        "weight_stall_seconds": 0.01 * step,
        **changes,
    }


class StandIn:
    """A stand-in for a Buffer."""

    def __init__(self) -> None:
        self.silent = 0.5
        self.completed = 0
        self.starved = 0.0
        self.reachable = True
        self.dropped: dict[str, int] = {}
        self.errors: dict[str, str] = {}

    def counts(self) -> dict[str, int]:
        if not self.reachable:
            raise UnavailableError("Redis is away")
        counts = {"prompts_waiting": 3, "prompts_leased": 1, "scored_claimed": 2, "dropped": sum(self.dropped.values())}
        return counts | {f"dropped:{reason}": number for reason, number in self.dropped.items()}

    def drop_errors(self) -> dict[str, str]:
        return self.errors

    def figures(self) -> dict[str, dict[str, float]]:
        completed, starved = float(self.completed), {"starved_seconds": self.starved}
        return {"feed": {"groups_admitted": 9.0}, "rollout-0": {"groups_completed": completed}, "trainer": starved}

    def silences(self) -> dict[str, float]:
        return {"feed": 0.5, "rollout-0": self.silent, "controller": 999.0, "trainer": 0.5}

    def samplers(self) -> list[Sampler]:
        return []

    def activities(self) -> dict[str, str]:
        return {}

    @property
    def connection(self) -> StandIn:
        return self

    redis = None

    def key(self, name: str) -> str:
        return name

    def retried(self, call: Callable[[], object]) -> set[bytes]:
        """Of the orders to samplers there are none."""
        return set()


def watch_of(folder: Path, buffer: StandIn) -> RunWatch:
    recipe = recipe_of(small_values(folder), run={"total_batches": 100})
    recipe.folder.mkdir()
    return RunWatch(recipe, buffer)  # type: ignore[arg-type]


def append(file: Path, *lines: dict[str, Any]) -> None:
    with open(file, "a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def test_rates_and_fractions_of_a_snapshot() -> None:
    snapshot = snapshot_of(
        [metrics_line(step) for step in range(1, 11)], {"version": 10, "accuracy": 0.75}, NOTHING, 40
    )
    assert (snapshot.step, snapshot.total, snapshot.accuracy, snapshot.accuracy_step) == (10, 40, 0.75, 10)
    assert snapshot.reward == 0.5 and snapshot.staleness_max == 3
    assert snapshot.sampler_tokens_per_second == pytest.approx(3000)
    assert snapshot.trainer_tokens_per_second == pytest.approx(2000)
    assert (snapshot.trainer_idle, snapshot.sampler_idle) == (0.5, 0.25)
    assert snapshot.seconds_left == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("trainer", "sampler", "says"),
    [
        (1.0, 0.1, "trainer waits for samplers (50%)"),
        (0.1, 0.8, "samplers wait for trainer (40%)"),
        (0.1, 0.1, "neither side waits long"),
    ],
)
def test_a_snapshot_names_the_stage_that_waits(trainer: float, sampler: float, says: str) -> None:
    lines = [
        metrics_line(step, trainer_idle_seconds=trainer, sampler_idle_seconds=sampler * step, sampler_busy_seconds=busy)
        for step in (1, 2)
        for busy in [(2.0 - sampler) * step]
    ]
    assert snapshot_of(lines, None, NOTHING, 40).waiting.line == says


def test_a_watch_shows_what_is_starved_and_warns_of_a_long_wait_until_it_ends(tmp_path: Path) -> None:
    buffer = StandIn()
    watch = watch_of(tmp_path, buffer)
    warnings = []
    for step, starved in ((0, 31.0), (1, 5.0), (1, 31.0), (1, 40.0), (1, 63.0), (1, 2.0), (1, 30.0)):
        if step:
            append(tmp_path / "run" / "metrics.jsonl", metrics_line(step))
        buffer.starved, buffer.silent = starved, starved
        watch.ask_redis()
        watch.sample()
        warnings.append(watch.take_warnings())
    line = "warning: no sampler is alive, the last heartbeat came {} s ago; 4 groups wait in prompts"
    assert warnings == [[], [], [line.format(31)], [], [line.format(63)], [], [line.format(30)]]
    assert "no sampler is alive" in plain_line(watch.snapshot, {}, 0.0)


def test_a_snapshot_before_the_first_batch_shows_starting_services() -> None:
    line = plain_line(
        snapshot_of([], None, NOTHING, 40), {"trainer": ("starting", 1, 0), "feed": ("running", 2, 0)}, 4.0
    )
    assert line == "0:04 step 0/40 · starting: trainer"


def test_restarts_and_silent_services_are_named() -> None:
    snapshot = ProgressSnapshot(step=3, total=9, hung=("rollout-1",))
    line = plain_line(snapshot, {"reward": ("restarting", 0, 2), "rollout-1": ("running", 7, 0)}, 61.0)
    assert line.startswith("1:01 step 3/9")
    assert "restarting: reward (restart 2)" in line
    assert "no heartbeat for 30 s: rollout-1" in line
    starting = {"rollout-1": ("starting", 7, 1)}
    assert "no heartbeat" not in plain_line(snapshot, starting, 61.0), "its last beat was that of the life before"


def test_a_watch_forgets_the_batches_that_a_resumed_run_trains_again(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, StandIn())
    file = tmp_path / "run" / "metrics.jsonl"
    append(file, *(metrics_line(step) for step in range(1, 6)))
    assert watch.sample().step == 5
    append(file, metrics_line(4, reward_mean=0.0))
    assert watch.sample().step == 4
    assert watch.sample().reward == pytest.approx((0.5 * 3 + 0.0) / 4)
    assert watch.last_version == 5, "what grows never shrinks"


def test_a_watch_names_silent_services_and_survives_a_redis_outage(tmp_path: Path) -> None:
    buffer = StandIn()
    watch = watch_of(tmp_path, buffer)
    watch.ask_redis()
    assert watch.sample().hung == ()
    buffer.silent = progress.HUNG_SECONDS + 1
    watch.ask_redis()
    assert watch.sample().hung == ("rollout-0",)
    buffer.reachable = False
    watch.ask_redis()
    assert watch.sample().groups["prompts_waiting"] == 3, "the figures of before stay"


def test_a_watch_adds_up_what_a_sampler_completes_over_its_lives(tmp_path: Path) -> None:
    buffer = StandIn()
    watch = watch_of(tmp_path, buffer)
    found = []
    for completed in (0, 3, 3, 0, 0, 2):  # it died after three groups, and its figures stayed until it lived again
        buffer.completed = completed
        watch.ask_redis()
        found.append(watch.progress_of("rollout-0"))
    assert found == [0, 3, 3, 3, 3, 5]
    watch.last_version = 7
    assert watch.progress_of("feed") == watch.progress_of("redis") == 7, "they count no groups"


def test_a_watch_knows_for_how_long_redis_has_been_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tandem.services.run.progress.time.monotonic", lambda: now)
    buffer = StandIn()
    watch = watch_of(tmp_path, buffer)
    now, buffer.reachable = 130.0, False
    watch.ask_redis()
    assert watch.redis_silence == 30.0
    buffer.reachable = True
    watch.ask_redis()
    assert watch.redis_silence == 0.0


def test_progress_is_a_table_on_a_terminal_and_lines_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PRINT_SECONDS", 0.01)
    monkeypatch.setattr(progress, "STATUS_SECONDS", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    watch = watch_of(tmp_path, StandIn())
    append(tmp_path / "run" / "metrics.jsonl", *(metrics_line(step) for step in range(1, 11)))
    watch.sample()
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with Progress(watch, lambda: STATES, console):
            if not terminal:
                eventually(lambda: "step" in console.file.getvalue())  # type: ignore[attr-defined]  # noqa: B023
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert "10/100" in said and "trainer waits for samplers" in said
        assert ("\x1b" in said) is terminal


def test_without_a_terminal_every_step_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PRINT_SECONDS", 0.01)
    watch = watch_of(tmp_path, StandIn())
    file = tmp_path / "run" / "metrics.jsonl"
    append(file, metrics_line(1))  # from the run that is now resumed
    console = Console(file=io.StringIO(), width=100)
    with Progress(watch, lambda: STATES, console):
        append(file, *(metrics_line(step, time=time.time() + step) for step in (2, 3)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.partition(" ")[2] for line in lines if "tokens in" in line] == [
        f"step {step}/100 · reward 0.500 · from -1 to 1 · staleness 1.50 · 4,000 tokens in 2.0 s" for step in (2, 3)
    ]


def test_drops_are_counted_by_reason_and_their_first_errors_shown_once(tmp_path: Path) -> None:
    buffer = StandIn()
    watch = watch_of(tmp_path, buffer)
    watch.ask_redis()
    assert watch.take_warnings() == []
    buffer.dropped = {"zero_variance": 1, "crashed": 3}
    buffer.errors = {"crashed": "ValueError: my bug"}
    watch.ask_redis()
    assert "dropped crashed 3, zero_variance 1" in plain_line(watch.sample(), STATES, 1.0)
    assert watch.take_warnings() == ["warning: a group was dropped (crashed): ValueError: my bug"]
    assert watch.take_warnings() == []


def test_a_batch_whose_rewards_are_all_equal_gives_one_warning(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, StandIn())
    file = tmp_path / "run" / "metrics.jsonl"
    figures = {"reward_mean": 0.0, "num_groups": 2}
    append(file, metrics_line(1, grad_norm=0.3, equal_reward_groups=2, **figures))
    append(file, metrics_line(2, grad_norm=0.0, equal_reward_groups=1, **figures))
    watch.sample()
    assert watch.take_warnings() == [], "another part of the loss has a gradient, or only some groups are equal"
    for step in (3, 4):
        append(file, metrics_line(step, grad_norm=0.0, equal_reward_groups=2, **figures))
        assert "no gradient: every reward is 0" in plain_line(watch.sample(), STATES, 1.0)
        (*warnings,) = watch.take_warnings()
        assert len(warnings) == (step == 3) and all("step 3 has the same reward (0)" in one for one in warnings)


def test_the_pause_before_a_resume_does_not_count_in_the_samplers_rate() -> None:
    before = [metrics_line(step) for step in range(1, 4)]
    after = [metrics_line(step, time=90_000.0 + step) for step in range(4, 7)]
    assert snapshot_of(before + after, None, NOTHING, 9).sampler_tokens_per_second == pytest.approx(3000)


def test_a_table_has_a_row_for_every_figure() -> None:
    console = Console(file=io.StringIO(), width=100)
    snapshot = snapshot_of([metrics_line(step) for step in (1, 2)], None, Observation(counts={"prompts_waiting": 3}), 4)
    console.print(table(snapshot, STATES, 3.0))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    names = ("step", "reward", "accuracy", "staleness", "sampler tokens/s", "trainer tokens/s", "waiting", "groups")
    assert all(name in said for name in (*names, "dropped", "time left"))


# ---- metrics.jsonl and summary.json ----


def test_figures_of_a_run(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    evaluations = [{"version": 4, "accuracy": 0.9}, {"version": 0, "accuracy": 0.5}]
    lines = [
        metrics_line(1),
        metrics_line(2, skipped_steps=0.0),
        metrics_line(3, weight_stall_seconds=None, skipped_steps=2.0),
        metrics_line(4),
    ]
    summary = summarise(recipe, lines, evaluations, {"admitted": 9}, 12.5)
    assert (summary["initial_accuracy"], summary["final_accuracy"]) == (0.5, 0.9)
    assert (summary["train_steps"], summary["optimizer_steps"]) == (4, 8)
    assert (summary["skipped_steps"], summary["critic_skipped_steps"]) == (2, None)
    assert (summary["wall_seconds"], summary["train_seconds"]) == (12.5, 8.0)
    assert (summary["sampler_tokens_per_second"], summary["trainer_tokens_per_second"]) == (3000, 2000)
    assert summary["mean_staleness"] == pytest.approx(9 / 16)
    assert (summary["p99_staleness"], summary["observed_max_staleness"]) == (1, 1)
    assert (summary["sampler_idle_fraction"], summary["trainer_idle_fraction"]) == (0.25, 0.5)
    assert summary["weight_updates"] == 3
    assert summary["weight_stall_seconds_mean"] == pytest.approx(0.07 / 3)
    assert summary["groups"] == {"admitted": 9}


def test_unmeasured_figures_are_none_and_not_zero(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    summary = summarise(recipe, [], [], {}, 1.0)
    for name in ("initial_accuracy", "final_accuracy", "mean_staleness", "sampler_tokens_per_second"):
        assert summary[name] is None
    assert summary["weight_stall_seconds_mean"] is None
    evaluations = [{"version": 0, "accuracy": 0.5}, {"version": 1, "accuracy": 0.7}]
    late = summarise(recipe, [metrics_line(1), metrics_line(2)], evaluations, {}, 1.0)
    assert late["final_accuracy"] is None, "the last version was never evaluated"


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
        log.add(metrics_line(step))
        log.add_evaluation({"version": step, "accuracy": 0.1 * step})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "torn')
    again = MetricsLog(tmp_path)
    again.rewind(checkpoint_version=2, last_recorded=4)
    assert [entry["step"] for entry in again.lines.read()] == [1, 2]
    assert [entry["version"] for entry in again.evaluations.read()] == [1, 2, 3, 4]
    assert again.last["step"] == 2
    again.add(metrics_line(3))
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
