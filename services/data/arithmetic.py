"""The demo's task: sums of two two-digit numbers, generated from a seed as a dataset in verl's schema.

Most demonstrations omit the carries, so a model that imitates them gives mostly wrong sums. Only the reward tells it
which sums are right.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

EVALUATION_ROWS = 1000
DEMONSTRATED_SHARE = 0.6
"""Fraction of the sums outside the evaluation set that are demonstrated. The others are for reinforcement learning."""
SLOPPY_SHARE = 0.62
"""Fraction of the demonstrations that omit the carries."""


def write_task(
    folder: Path,
    seed: int,
    *,
    evaluation_rows: int = EVALUATION_ROWS,
    demonstrated_share: float = DEMONSTRATED_SHARE,
    sloppy_share: float = SLOPPY_SHARE,
) -> None:
    """Writes demonstrations, train and eval (.parquet), disjoint; `sloppy_share` does not change the split."""
    dice = random.Random(seed)
    sums = [(a, b) for a in range(100) for b in range(100)]
    dice.shuffle(sums)
    evaluation, rest = sums[:evaluation_rows], sums[evaluation_rows:]
    cut = round(demonstrated_share * len(rest))
    sets = {
        "demonstrations": [
            _row(a, b, (sloppy_sum if dice.random() < sloppy_share else right_sum)(a, b)) for a, b in rest[:cut]
        ],
        "train": [_row(a, b, right_sum(a, b)) for a, b in rest[cut:]],
        "eval": [_row(a, b, right_sum(a, b), split="test") for a, b in evaluation],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def right_sum(a: int, b: int) -> str:
    """a + b as three digits."""
    return f"{a + b:03d}"


def sloppy_sum(a: int, b: int) -> str:
    """a + b digit by digit without carries, as three digits."""
    return f"0{(a // 10 + b // 10) % 10}{(a + b) % 10}"


def _row(a: int, b: int, answer: str, *, split: str = "train") -> dict[str, object]:
    return {
        "data_source": "tandem/arithmetic",
        "prompt": [{"role": "user", "content": f"{a:02d}+{b:02d}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": right_sum(a, b)},
        "extra_info": {"split": split, "answer": answer},
    }
