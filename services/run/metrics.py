"""The metrics of a run: metrics.jsonl, evaluations.jsonl (one JSON object per line), TensorBoard and summary.json."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tandem.protos.contracts import is_fault
from tandem.protos.types import RowHeader, TrainBatch, TrajectoryGroup, scored_trajectories
from tandem.services.config import Recipe
from tandem.services.metrics.trackers import TrackerThread
from tandem.services.run.best_version import evaluation_figures
from tandem.services.run.folder import SUMMARY_FILE, write_text
from tandem.services.run.json_files import EVALUATIONS_FILE, GENERATIONS_FOLDER, METRICS_FILE, JsonLines, Line

# Field of a service's heartbeat → name of its sum over all such services in metrics.jsonl.
SAMPLER_FIGURES = {
    "sampled_tokens": "sampler_tokens",
    "busy_seconds": "sampler_busy_seconds",
    "idle_seconds": "sampler_idle_seconds",
    "cpu_seconds": "sampler_cpu_seconds",
}
SCORER_FIGURES = {"groups_busy_seconds": "scorer_busy_seconds", "cpu_seconds": "scorer_cpu_seconds"}


class MetricsLog:
    """Writes a line for every trained batch to metrics.jsonl, and its figures to TensorBoard and the trackers."""

    def __init__(self, folder: Path, trackers: Sequence[TrackerThread] = ()) -> None:
        self._trackers = trackers
        self.lines = JsonLines(folder / METRICS_FILE)
        self.evaluations = JsonLines(folder / EVALUATIONS_FILE)
        self._generations = folder / GENERATIONS_FOLDER
        self.last: Line = {}
        self.last_evaluation: Line = {}
        self._events = EventFileWriter(str(folder / "tensorboard"), flush_secs=10)

    def rewind(self, checkpoint_version: int, last_recorded: int) -> None:
        """Removes the lines that retraining the recorded batches will write again.

        Evaluations up to the last recorded batch stay, since retraining reproduces the weights of those versions.
        """
        self.lines.keep(lambda line: line["step"] <= checkpoint_version)
        self.evaluations.keep(lambda line: line["version"] <= last_recorded)
        for samples in self._generations.glob("[0-9]*"):
            if int(samples.name) > last_recorded:
                shutil.rmtree(samples)
        kept = self.lines.read()
        self.last = kept[-1] if kept else {}
        start = SessionLog(status=SessionLog.START)  # makes TensorBoard discard the steps from here on
        self._events.add_event(Event(wall_time=time.time(), step=checkpoint_version + 1, session_log=start))

    def add(self, line: Line) -> None:
        """Writes the line of one batch. Its `step` is the policy version that the batch produced."""
        self.last = line
        self.lines.append(line)
        self._scalars(line["step"], {name: value for name, value in line.items() if name not in ("step", "time")})

    def add_evaluation(self, line: Line) -> None:
        """Writes one evaluation, `{version, accuracy, sets, …}`."""
        if line["accuracy"] is not None:
            self.last_evaluation = line
        self.evaluations.append(line)
        self._scalars(line["version"], evaluation_figures(line))

    def close(self) -> None:
        """Flushes the events, and waits some seconds for the trackers."""
        self._events.close()
        for tracker in self._trackers:
            tracker.close()

    def _scalars(self, step: int, values: Mapping[str, Any]) -> None:
        figures = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        for tracker in self._trackers:
            tracker.add(step, figures)


class PhaseClock:
    """Measures seconds by phase since the last lap. Time outside all phases counts only in the total."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._started = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the block's duration to the phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - began

    def lap(self) -> dict[str, float]:
        """`seconds_<phase>` and `seconds_total` since the last lap."""
        now = time.monotonic()
        figures = {f"seconds_{name}": seconds for name, seconds in self._seconds.items()}
        figures["seconds_total"] = now - self._started
        self._seconds.clear()
        self._started = now
        return figures


class ServiceTotals:
    """Sums counters of services of one kind since its creation. Handles counters that restart at 0 with their service.

    `names`: field of the heartbeats → name of the sum. `base`: the sums of the run's earlier life.
    """

    def __init__(
        self, names: Mapping[str, str], figures: Mapping[str, Mapping[str, float]], base: Mapping[str, Any]
    ) -> None:
        self._names = names
        self._seen = {name: dict(values) for name, values in figures.items()}
        self.totals = {total: float(base.get(total, 0.0)) for total in names.values()}

    def update(self, figures: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """The sums after these heartbeats, by their names in metrics.jsonl."""
        for service, values in figures.items():
            before = self._seen.get(service, {})
            for figure, total in self._names.items():
                now, then = values.get(figure, 0.0), before.get(figure, 0.0)
                self.totals[total] += now - then if now >= then else now
            self._seen[service] = dict(values)
        return dict(self.totals)


def baseline_rewards(headers: Iterable[RowHeader]) -> list[float]:
    """The rewards of the scored greedy answers."""
    greedy = (header for header in headers if header.role == "baseline" and header.segment == 0)
    return [header.reward for header in greedy if header.reward is not None]


def oldest_version(segments: Sequence[RowHeader]) -> int:
    """The version that sampled the oldest token of a trajectory (or of a whole group)."""
    return min(span.policy_version for segment in segments for span in segment.spans)


def has_unknown_version(segments: Sequence[RowHeader], start_version: int, incarnation: int) -> bool:
    """Whether a trajectory names no version, or one that no trainer can have published before this incarnation trains
    a batch from `start_version`.
    """
    spans = [span for segment in segments for span in segment.spans]
    known = (0 <= span.policy_version <= start_version and span.incarnation <= incarnation for span in spans)
    return not spans or not all(known)


def batch_figures(batch: TrainBatch) -> Line:
    """Figures from a batch's headers: rewards, lengths (sampled tokens), and staleness in versions.

    `staleness_counts[k]` is the number of trajectories k versions old; the summary adds these up over the run.
    `equal_reward_groups` counts groups whose answers all have the same reward. Greedy answers are not trained and
    count only in `baseline_reward_mean`. A batch that was recorded with rows of unknown versions has their number as
    `unknown_version_rows`; their staleness counts as 0.
    """
    greedy = baseline_rewards(batch.headers)
    by_trajectory = scored_trajectories(batch.headers)
    found = list(by_trajectory.values())
    by_group: defaultdict[str, set[float | None]] = defaultdict(set)
    for (group_id, _), segments in by_trajectory.items():
        by_group[group_id].add(segments[0].reward)
    start = batch.policy_version - 1
    rewards = np.array([segments[0].reward for segments in found], np.float64)
    unknown = [has_unknown_version(segments, start, batch.incarnation) for segments in found]
    staleness = np.array(
        [0 if bad else start - oldest_version(segments) for bad, segments in zip(unknown, found, strict=True)]
    )
    lengths = np.array([sum(segment.num_loss_tokens for segment in segments) for segments in found])
    versions = [{span.policy_version for segment in segments for span in segment.spans} for segments in found]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "equal_reward_groups": sum(len(different) == 1 for different in by_group.values()),
        "staleness_mean": float(staleness.mean()),
        "staleness_p99": percentile_99(np.bincount(staleness)),
        "staleness_max": int(staleness.max()),
        "staleness_counts": np.bincount(staleness).tolist(),
        "multi_version_fraction": float(np.mean([len(seen) > 1 for seen in versions])),
        "length_limited_fraction": float(np.mean([segments[-1].finish_reason == "length" for segments in found])),
        "response_length_mean": float(lengths.mean()),
        "num_loss_tokens": int(lengths.sum()),
        "num_tokens": int(sum(segment.num_tokens for segments in found for segment in segments)),
        "num_groups": len(batch.group_ids),
        **({"baseline_reward_mean": float(np.mean(greedy))} if greedy else {}),
        **({"unknown_version_rows": sum(unknown)} if any(unknown) else {}),
    }


def group_figures(groups: Iterable[TrajectoryGroup]) -> Line:
    """Prompt lengths in tokens; `reward/<component>`: each component's mean over the trajectories that have it; and
    `answers_at_fault`: how many got a worst score because they made a scorer fail.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    prompt_lengths: list[int] = []
    at_fault = 0
    for group in groups:
        prompt_lengths.append(len(group.prompt.token_ids))
        for row in group.scored_rows:
            if row.trajectory.role == "policy" and row.reward is not None:
                at_fault += any(is_fault(name) for name in row.breakdown)
                for name, value in row.breakdown.items():
                    if not is_fault(name):
                        found[f"reward/{name}"].append(value)
    figures = {"prompt_length_mean": float(np.mean(prompt_lengths)), "prompt_length_max": max(prompt_lengths)}
    return figures | {"answers_at_fault": at_fault} | {name: float(np.mean(found[name])) for name in sorted(found)}


def percentile_99(counts: Sequence[int] | NDArray[np.generic]) -> int:
    """The smallest k such that 99 % of the observations are ≤ k, where `counts[k]` observations have the value k."""
    cumulative = np.cumsum(counts)
    return int(np.searchsorted(cumulative, 0.99 * cumulative[-1]))


def write_summary(recipe: Recipe, counts: Mapping[str, int], set_aside: Mapping[str, str], wall_seconds: float) -> None:
    """Writes the run folder's summary.json atomically. `set_aside`: why prompts failed in every attempt, by group."""
    lines, evaluations = (JsonLines(recipe.folder / name).read() for name in (METRICS_FILE, EVALUATIONS_FILE))
    summary = summarise(recipe, lines, evaluations, counts, wall_seconds) | {"set_aside": dict(set_aside)}
    write_text(recipe.folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def summarise(
    recipe: Recipe, lines: Sequence[Line], evaluations: Sequence[Line], counts: Mapping[str, int], wall_seconds: float
) -> dict[str, Any]:
    """The figures of a run from the lines of metrics.jsonl and the evaluations, both by version, and ledger counts.

    Rates of the trainer cover all batches, those of the samplers the time from the first line to the last. A figure
    that was not measured (no evaluation file, no sampler that acknowledged an update) is None, not 0.
    """
    measured = [line for line in evaluations if line["accuracy"] is not None]
    ordered = sorted(measured, key=lambda line: int(line["version"]))
    train_seconds = sum(float(line["seconds_total"]) for line in lines)
    last = lines[-1] if lines else {}
    first = lines[0] if len(lines) > 1 else {}

    def sampled(total: str) -> float:
        return float(last.get(total, 0.0)) - float(first.get(total, 0.0))

    busy, idle = sampled("sampler_busy_seconds"), sampled("sampler_idle_seconds")
    stalls = [float(line["weight_stall_seconds"]) for line in lines if line.get("weight_stall_seconds") is not None]
    was_evaluated = bool(ordered) and ordered[-1]["version"] == last.get("step", 0)
    return {
        "run_id": recipe.run.run_id,
        "seed": recipe.run.seed,
        "staleness_budget": recipe.run.staleness_budget,
        "groups_per_batch": recipe.run.groups_per_batch,
        "total_batches": recipe.run.total_batches,
        "initial_accuracy": ordered[0]["accuracy"] if ordered and ordered[0]["version"] == 0 else None,
        "final_accuracy": ordered[-1]["accuracy"] if was_evaluated else None,
        "train_steps": len(lines),
        "optimizer_steps": last.get("optimizer_step", 0),
        "skipped_steps": _total(lines, "skipped_steps"),
        "critic_skipped_steps": _total(lines, "critic_skipped_steps"),
        "wall_seconds": wall_seconds,
        "train_seconds": train_seconds,
        "sampler_tokens_per_second": _ratio(
            sampled("sampler_tokens"), train_seconds - float(first.get("seconds_total", 0.0))
        ),
        "trainer_tokens_per_second": _ratio(sum(line["num_tokens"] for line in lines), train_seconds),
        **_staleness(lines),
        "sampler_idle_fraction": _ratio(idle, busy + idle),
        "trainer_idle_fraction": _ratio(sum(float(line["trainer_idle_seconds"]) for line in lines), train_seconds),
        "weight_updates": len(stalls),
        "weight_stall_seconds_mean": _ratio(sum(stalls), len(stalls)),
        "groups": dict(counts),
    }


def _staleness(lines: Sequence[Line]) -> dict[str, float | int | None]:
    width = max((len(line["staleness_counts"]) for line in lines), default=0)
    if width == 0:
        return {"mean_staleness": None, "p99_staleness": None, "observed_max_staleness": None}
    counts = np.zeros(width, np.int64)
    for line in lines:
        counts[: len(line["staleness_counts"])] += line["staleness_counts"]
    return {
        "mean_staleness": float(counts @ np.arange(width) / counts.sum()),
        "p99_staleness": percentile_99(counts),
        "observed_max_staleness": width - 1,
    }


def _total(lines: Sequence[Line], name: str) -> int | None:
    found = [int(line[name]) for line in lines if name in line]
    return sum(found) if found else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
