"""A run on its way: the summary of metrics.jsonl, and live progress on a terminal and in a log."""

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
from tandem.services.buffer.starvation import Observation
from tandem.services.buffer.types import Sampler
from tandem.services.run import progress
from tandem.services.run.metrics import (
    summarise,
)
from tandem.services.run.progress import Progress, ProgressSnapshot, RunWatch, plain_line, snapshot_of, table
from tests.support.run_inputs import recipe_of, small_values
from tests.support.trainer_ring import make_recipe
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
        self.failed: dict[str, str] = {}

    def counts(self) -> dict[str, int]:
        if not self.reachable:
            raise UnavailableError("Redis is away")
        counts = {"prompts_waiting": 3, "prompts_leased": 1, "scored_claimed": 2, "set_aside": len(self.failed)}
        by_reason = {f"dropped:{reason}": number for reason, number in self.dropped.items()}
        return counts | by_reason | {"dropped": sum(by_reason.values())}

    def drop_errors(self) -> dict[str, str]:
        return self.errors

    def set_aside(self) -> dict[str, str]:
        return self.failed

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


def test_an_outage_makes_no_old_heartbeat_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis' clock stands still during an outage, so that the silence that it knows does not grow."""
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    buffer = StandIn()
    watch = watch_of(tmp_path, buffer)
    watch.ask_redis()
    beat = watch.last_heartbeats["rollout-0"]
    buffer.silent, now = 5.0, 1004.5
    watch.ask_redis()
    assert watch.last_heartbeats["rollout-0"] == beat
    now = 1060.0  # the sampler was killed, and loads its model; Redis was away
    watch.ask_redis()
    assert watch.last_heartbeats["rollout-0"] == beat
    buffer.silent, now = 3.0, 1070.0
    watch.ask_redis()
    assert watch.last_heartbeats["rollout-0"] == 1067.0, "a heartbeat came"


def test_a_watch_names_silent_services_and_survives_a_redis_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    buffer = StandIn()
    watch = watch_of(tmp_path, buffer)
    watch.ask_redis()
    assert watch.sample().hung == ()
    buffer.silent = progress.HUNG_SECONDS + 1
    now += buffer.silent
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
    buffer.dropped = {"zero_variance": 1, "crashed": 3}
    buffer.errors = {"crashed": "ValueError: my bug"}
    buffer.failed = {"0-7": "crashed: 3"}
    watch.ask_redis()
    assert "dropped crashed 3, zero_variance 1" in plain_line(watch.sample(), STATES, 1.0)
    dropped, set_aside = watch.take_warnings()
    assert dropped == "warning: a group was dropped (crashed): ValueError: my bug"
    assert set_aside.startswith("warning: the prompt of group 0-7 failed in every attempt (crashed: 3); no later epoch")
    assert watch.take_warnings() == []
    buffer.failed = {f"0-{index}": "" for index in range(30)}
    watch.ask_redis()
    assert len(watch.take_warnings()) == 9, "ten prompts are listed in all"


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
    evaluations = [{"version": 4, "accuracy": 0.9}, {"version": 4, "accuracy": None}, {"version": 0, "accuracy": 0.5}]
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
