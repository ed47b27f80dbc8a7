"""summary.json: the figures of a whole run, computed from its metrics and the ledger's counts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tandem.services.config import Recipe
from tandem.services.run.folder import SUMMARY_FILE
from tandem.services.run.metrics import EVALUATIONS_FILE, METRICS_FILE, JsonLines, Line, percentile_99


def write_summary(recipe: Recipe, counts: Mapping[str, int], wall_seconds: float) -> dict[str, Any]:
    """Writes the run folder's summary.json atomically and returns its contents."""
    folder = recipe.folder
    lines = JsonLines(folder / METRICS_FILE).read()
    evaluations = JsonLines(folder / EVALUATIONS_FILE).read()
    summary = summarise(recipe, lines, evaluations, counts, wall_seconds)
    temporary = folder / f"{SUMMARY_FILE}.tmp"
    temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / SUMMARY_FILE)
    return summary


def summarise(
    recipe: Recipe,
    lines: Sequence[Line],
    evaluations: Sequence[Line],
    counts: Mapping[str, int],
    wall_seconds: float,
) -> dict[str, Any]:
    """The figures of a run from the lines of metrics.jsonl and the evaluations, both by version, and ledger counts.

    Rates of the trainer cover all batches, those of the samplers the time from the first line to the last. A figure
    that was not measured (no evaluation file, no sampler that acknowledged an update) is None, not 0.
    """
    ordered = sorted(evaluations, key=lambda line: int(line["version"]))
    train_seconds = sum(float(line["seconds_total"]) for line in lines)
    idle_seconds = sum(float(line["trainer_idle_seconds"]) for line in lines)
    last = lines[-1] if lines else {}
    first = lines[0] if len(lines) > 1 else {}

    def sampled(total: str) -> float:
        return float(last.get(total, 0.0)) - float(first.get(total, 0.0))

    busy, idle = sampled("sampler_busy_seconds"), sampled("sampler_idle_seconds")
    stalls = [float(line["weight_stall_seconds"]) for line in lines if line.get("weight_stall_seconds") is not None]
    return {
        "run_id": recipe.run.run_id,
        "seed": recipe.run.seed,
        "staleness_budget": recipe.run.staleness_budget,
        "groups_per_batch": recipe.run.groups_per_batch,
        "total_batches": recipe.run.total_batches,
        "initial_accuracy": ordered[0]["accuracy"] if ordered and ordered[0]["version"] == 0 else None,
        "final_accuracy": ordered[-1]["accuracy"]
        if ordered and ordered[-1]["version"] == last.get("step", 0)
        else None,
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
        "trainer_idle_fraction": _ratio(idle_seconds, train_seconds),
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
