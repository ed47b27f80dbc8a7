"""Measures padding and budgets of micro-batches and the balance of ranks. Prints a table; --output writes JSON.

    python benchmarks/packing.py [--batches 1000] [--output benchmarks/records/packing.json]

Random batches of lognormal lengths (σ 0.3 to 1.0, median 200 to 2,000 tokens, cut at the budget), 64 to 1,024 rows,
budgets of 8,192 to 32,768 tokens, 1 to 8 ranks. `padded` are the rectangles of `trainer.batch.packing.pack`, with
efficiency real tokens/tokens computed. `flat` are the bins of `pack_flat`, which have no padding; their efficiency is
how full they are. The exit code is 1 if a micro-batch exceeds its budget or if the efficiency of a batch of at least
half a budget is below 0.95. A smaller batch may be a single, partly filled micro-batch.

Imbalance is the largest rank's work over the mean. Padded bins are assigned to ranks by Karmarkar-Karp and, for
comparison, in snake order (0, 1, …, n, n, …, 1, 0).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.trainer.batch.balance import assign_to_ranks, workload  # noqa: E402
from tandem.trainer.batch.packing import SMALL_BATCH, pack, pack_flat  # noqa: E402

WANTED = 0.95
TABLE_ROWS = (64, 128, 256, 512, 1024)
TABLE_SIGMAS = (0.4, 0.7, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "packing.json")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    batches = [_measure(random, **_any_shape(random)) for _ in range(arguments.batches)]
    full = [batch["efficiency"] for batch in batches if batch["budgets"] >= SMALL_BATCH]
    over = sum(batch["over_budget"] for batch in batches)
    record = {
        "command": "python benchmarks/packing.py " + " ".join(sys.argv[1:]),
        "batches": len(batches),
        "micro_batches": sum(batch["padded_bins"] + batch["flat_bins"] for batch in batches),
        "over_budget": over,
        "batches_of_half_a_budget": len(full),
        "efficiency_min": round(min(full), 4),
        "efficiency_mean": round(statistics.mean(full), 4),
        "flat_fill_mean": round(statistics.mean(batch["fill"] for batch in batches), 4),
        "pack_seconds_max": round(max(batch["seconds_padded"] for batch in batches), 3),
        "pack_flat_seconds_max": round(max(batch["seconds_flat"] for batch in batches), 3),
        "imbalance_karmarkar_karp": round(statistics.mean(batch["imbalance"] for batch in batches), 4),
        "imbalance_there_and_back": round(statistics.mean(batch["imbalance_before"] for batch in batches), 4),
        "table": [_table_row(rows, sigma) for rows in TABLE_ROWS for sigma in TABLE_SIGMAS],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    return int(over > 0 or min(full) < WANTED)


def _any_shape(random: np.random.Generator) -> dict[str, Any]:
    return {
        "num_rows": int(random.integers(64, 1025)),
        "median": float(random.uniform(200, 2000)),
        "sigma": float(random.uniform(0.3, 1.0)),
        "budget": int(random.integers(8192, 32769)),
        "num_ranks": int(random.integers(1, 9)),
    }


def _table_row(num_rows: int, sigma: float) -> dict[str, Any]:
    shape = {"num_rows": num_rows, "median": 1000.0, "sigma": sigma, "budget": 16384, "num_ranks": 1}
    found = [_measure(np.random.default_rng(seed), **shape) for seed in range(20)]
    return {
        "rows": num_rows,
        "sigma": sigma,
        "efficiency_mean": round(statistics.mean(batch["efficiency"] for batch in found), 4),
        "efficiency_min": round(min(batch["efficiency"] for batch in found), 4),
        "micro_batches": statistics.mean(batch["padded_bins"] for batch in found),
        "fewest_possible": statistics.mean(batch["budgets"] for batch in found),
    }


def _measure(
    random: np.random.Generator, *, num_rows: int, median: float, sigma: float, budget: int, num_ranks: int
) -> dict[str, Any]:
    lengths = np.clip(random.lognormal(np.log(median), sigma, num_rows).astype(int), 1, budget).tolist()
    began = time.perf_counter()
    padded = pack(lengths, budget, multiple_of=num_ranks)
    packed = time.perf_counter()
    flat = pack_flat(lengths, budget, multiple_of=num_ranks)
    ended = time.perf_counter()
    areas = [len(rows) * max(lengths[row] for row in rows) for rows in padded]
    sums = [sum(lengths[row] for row in rows) for rows in flat]
    assert all(sorted(row for rows in bins for row in rows) == list(range(num_rows)) for bins in (padded, flat))
    works = [len(rows) * workload(max(lengths[row] for row in rows)) for rows in padded]
    return {
        "budgets": sum(lengths) / budget,
        "over_budget": sum(size > budget for size in areas + sums),
        "efficiency": sum(lengths) / sum(areas),
        "fill": sum(lengths) / budget / len(flat),
        "padded_bins": len(padded),
        "flat_bins": len(flat),
        "seconds_padded": packed - began,
        "seconds_flat": ended - packed,
        "imbalance": _imbalance(works, assign_to_ranks(works, num_ranks)),
        "imbalance_before": _imbalance(works, _there_and_back(works, num_ranks)),
    }


def _imbalance(works: Sequence[int], hands: Sequence[Sequence[int]]) -> float:
    totals = [sum(works[number] for number in hand) for hand in hands]
    return max(totals) * len(totals) / sum(totals)


def _there_and_back(works: Sequence[int], num_ranks: int) -> list[list[int]]:
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    for turn, number in enumerate(sorted(range(len(works)), key=lambda number: -works[number])):
        lap, seat = divmod(turn, num_ranks)
        hands[seat if lap % 2 == 0 else num_ranks - 1 - seat].append(number)
    return hands


if __name__ == "__main__":
    sys.exit(main())
