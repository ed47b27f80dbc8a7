"""Converts GSM8K to verl's schema: `python examples/prepare_gsm8k.py FOLDER_WITH_GSM8K OUTPUT_FOLDER`.

The input folder holds the published data set: `train` and `test` as .jsonl or .parquet files with the columns
`question` and `answer`, e.g. the `main` folder of the hub's openai/gsm8k, or grade_school_math/data of the original
repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def main(source: Path, output: Path) -> int:
    """Writes `train.parquet` and `test.parquet` into `output`; returns the exit code."""
    output.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        files = sorted(
            file for file in source.iterdir() if file.name.startswith(split) and file.suffix in (".jsonl", ".parquet")
        )
        if not files:
            print(
                f"{source}: no {split}*.jsonl or {split}*.parquet there; download GSM8K into it first", file=sys.stderr
            )
            return 2
        raw = [row for file in files for row in _read(file)]
        rows = [
            _row(split, index, row["question"], row["answer"])
            for index, row in enumerate(raw)
            if "####" in row["answer"]
        ]
        pq.write_table(pa.Table.from_pylist(rows), output / f"{split}.parquet")
        print(f"{output / split}.parquet: {len(rows)} rows, {len(raw) - len(rows)} without an answer skipped")
    return 0


def _read(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return list(pq.read_table(file).to_pylist())


def _row(split: str, index: int, question: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.rpartition("####")[2].strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
