"""Files of answers, as `tandem reward` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.dataset_files import write_lines, write_parquet


def row(solution: Any, /, **more: Any) -> dict[str, Any]:
    return {
        "data_source": "test",
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": 3},
        "solution": str(solution),
        **more,
    }


def answers(folder: Path, *solutions: Any, name: str = "answers.jsonl") -> Path:
    rows = [row(solution) for solution in solutions]
    return write_parquet(folder / name, rows) if name.endswith(".parquet") else write_lines(folder / name, rows)
