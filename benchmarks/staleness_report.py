"""Evaluates the record that benchmarks/staleness.py writes: intervals, a Markdown table, verdicts."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

NAIVE, TRUNCATED, DEFAULT = "none", "token_tis", "token_clip"
REALISED_SHARE = 0.7
LOSS_POINTS = 3.0
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

Record = dict[str, Any]


class Cell(NamedTuple):
    """One arm of the study."""

    budget: int
    correction: str

    def __str__(self) -> str:
        return f"{self.budget}/{self.correction}"


SYNCHRONOUS = Cell(0, DEFAULT)


def runs_of(record: Record, cell: Cell, seed: int | None = None) -> list[dict[str, Any]]:
    """The cell's finished runs, or that of one seed."""
    return [
        run
        for run in record["runs"]
        if (run["staleness_budget"], run["correction"]) == cell and seed in (None, run["seed"])
    ]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half of the 95 % interval by the t-distribution); infinite for fewer than two values."""
    mean, freedom = statistics.fmean(values), len(values) - 1
    if freedom < 1:
        return mean, math.inf
    # Beyond the table: the first terms of its expansion around the normal quantile, to 2e-4.
    quantile = _T_975[freedom - 1] if freedom <= len(_T_975) else 1.95996 + 2.37227 / freedom + 2.82250 / freedom**2
    return mean, quantile * statistics.stdev(values) / math.sqrt(len(values))


def _points(record: Record, cell: Cell) -> tuple[float, float]:
    return interval([100.0 * run["accuracy"] for run in runs_of(record, cell)])


def difference(record: Record, cell: Cell, other: Cell) -> tuple[float, float] | None:
    """Accuracy of the first cell minus that of the second in points, paired by seed: cells of a seed share the initial
    model and the questions.
    """
    first, second = ({run["seed"]: run["accuracy"] for run in runs_of(record, one)} for one in (cell, other))
    shared = first.keys() & second.keys()
    return interval([100.0 * (first[seed] - second[seed]) for seed in sorted(shared)]) if shared else None


def table(record: Record) -> list[str]:
    """A Markdown table with a row for each cell that has runs."""
    lines = [
        "| S | correction | accuracy, % | points against S = 0 | mean staleness (least) | KL | ESS | clipped | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in _cells_of(record):
        runs = runs_of(record, cell)
        found = difference(record, cell, SYNCHRONOUS)
        against = "–" if cell == SYNCHRONOUS or found is None else _signed(found)
        staleness = [run["mean_staleness"] for run in runs]
        kl, ess, clipped = (
            statistics.fmean(run[name] for run in runs)
            for name in ("behavior_proximal_kl", "effective_sample_size", "clipped_fraction")
        )
        lines.append(
            f"| {cell.budget} | `{cell.correction}` | {_mean(_points(record, cell))} | {against} | "
            f"{statistics.fmean(staleness):.2f} ({min(staleness):.2f}) | {kl:.4f} "
            f"| {ess:.3f} | {clipped:.3f} | {len(runs)} |"
        )
    return lines


def _cells_of(record: Record) -> list[Cell]:
    found = {Cell(run["staleness_budget"], run["correction"]) for run in record["runs"]}
    rank = {name: place for place, name in enumerate((NAIVE, TRUNCATED, DEFAULT))}
    return sorted(found, key=lambda cell: (cell.budget, rank.get(cell.correction, len(rank)), cell.correction))


def _mean(found: tuple[float, float]) -> str:
    mean, half = found
    return f"{mean:.1f} ± {half:.1f}" if math.isfinite(half) else f"{mean:.1f}"


def _signed(found: tuple[float, float]) -> str:
    mean, half = found
    return f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]" if math.isfinite(half) else f"{mean:+.1f} [one seed]"


def verdicts(record: Record, planned: Sequence[tuple[int, Cell]] = ()) -> tuple[list[str], bool]:
    """The study's conclusions, and whether it passed: no check failed and no planned run (seed, cell) is missing.

    A plan without the cells that the default is judged by can pass.
    """
    lines, passed = [], True
    found = difference(record, Cell(4, DEFAULT), SYNCHRONOUS)
    if found is None or math.isinf(found[1]):
        lines.append(f"Default at S = 4 minus S = 0: not measured yet (4/{DEFAULT} and 0/{DEFAULT} of two seeds).")
    else:
        passed = found[0] - found[1] > -LOSS_POINTS
        told = "passes" if passed else "FAILS"
        lines.append(
            f"Default at S = 4 minus S = 0: {_signed(found)} points; {told}: "
            f"the interval must be above −{LOSS_POINTS:g}."
        )
    naive = Cell(8, NAIVE)
    if runs_of(record, naive):
        against = difference(record, naive, SYNCHRONOUS)
        told = f" ({_signed(against)} points against S = 0)" if against else ""
        lines.append(f"Naive loss at S = 8: {_mean(_points(record, naive))} %{told}.")
    low = [run for run in record["runs"] if run["mean_staleness"] < REALISED_SHARE * run["staleness_budget"]]
    if low:
        named = ", ".join(f"{run['staleness_budget']}/{run['correction']} seed {run['seed']}" for run in low)
        lines.append(f"Realised mean staleness is BELOW {REALISED_SHARE:g}·S in {named}: the sampler was too slow.")
    else:
        lines.append(f"Realised mean staleness is at least {REALISED_SHARE:g}·S in each of {len(record['runs'])} runs.")
    missing = sum(not runs_of(record, cell, seed) for seed, cell in planned)
    if missing:
        lines.append(f"NOT FINISHED: {missing} of {len(planned)} planned runs are missing.")
    return lines, passed and not low and not missing


def page(record: Record) -> str:
    """The study as a Markdown page."""
    settings = ", ".join(f"{name} {value}" for name, value in record["settings"].items())
    legend = (
        f"± and [] are 95 % intervals over seeds. Differences are paired by seed with `{DEFAULT}` at S = 0. "
        "KL is that of behavior and proximal policy (k3, per token), ESS the effective sample size of the weights, "
        "clipped the share of tokens whose gradient the loss bounded; all three are means over a run's batches."
    )
    parts = [
        "# Staleness and correction",
        "\n".join("    " + " \\\n        ".join(textwrap.wrap(command, 100)) for command in record["commands"]),
        *(
            textwrap.fill(text, 120)
            for text in (f"{settings}; {record['cores']} cores.", *record.get("notes", ()), legend)
        ),
        "\n".join(table(record)),
        "\n".join(f"- {line}" for line in record["verdicts"]),
    ]
    return "\n\n".join(parts) + "\n"
