"""Compares the learner in bfloat16 with float32 on CPUs, for models of different hidden sizes. Prints and writes JSON.

    python benchmarks/dtypes.py [--rounds 5] [--output benchmarks/records/dtypes.json]

A batch is that of benchmarks/learner.py: 32 prompts of 2 to 7 tokens with 8 answers of 1 to 6. The models have four
layers and random weights. Each dtype is a process, with the threads and the ZeRO stage that `auto` takes: stage 0 in
float32, 1 in bfloat16. They train batches in turns. `ratio` is bfloat16's time over float32's, the median over the
rounds. On a processor with AMX, the exit code is 1 if the hint of `tandem run` advises bfloat16 for a model that it
does not make faster by a tenth, or does not advise it for one that it makes faster by a third.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learner import DTYPES, measure  # noqa: E402
from tandem.services.data.tiny_model import build_tiny_model  # noqa: E402
from tandem.services.run.dtypes import WIDE, has_amx  # noqa: E402
from tandem.services.run.placement import CPU_ENVIRONMENT, automatic_threads  # noqa: E402
from tandem.trainer.config import TrainerConfig  # noqa: E402

HIDDEN_SIZES = (64, 256, WIDE, 896)
LAYERS = 4
MOST_IF_ADVISED, LEAST_IF_NOT = 0.9, 0.67
SIDES = {dtype: f"{dtype} stage {TrainerConfig(dtype=dtype).resolved_zero_stage}" for dtype in DTYPES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "dtypes.json")
    arguments = parser.parse_args()
    results = {hidden_size: _compare(hidden_size, arguments.rounds) for hidden_size in HIDDEN_SIZES}
    record = {
        "command": f"python benchmarks/dtypes.py --rounds {arguments.rounds}",
        "cores": os.cpu_count(),
        "amx": has_amx(),
        "wide": WIDE,
        "by_hidden_size": results,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    missed = [
        f"hidden size {hidden_size}: bfloat16 takes {result['ratio']} of the time of float32"
        for hidden_size, result in results.items()
        if not (result["ratio"] <= MOST_IF_ADVISED if hidden_size >= WIDE else result["ratio"] >= LEAST_IF_NOT)
    ]
    missed = missed if has_amx() else []
    print("\n".join([json.dumps(record, indent=1), *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def _compare(hidden_size: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-dtypes-") as scratch:
        model = build_tiny_model(Path(scratch) / "model", hidden=hidden_size, layers=LAYERS, initializer_range=0.02)
        variables = {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(automatic_threads(1, hidden_size))}
        found = measure(model, [*SIDES.values()], rounds, variables)
    wide, narrow = (found[SIDES[dtype]] for dtype in DTYPES)
    return {
        "float32_seconds": round(statistics.median(wide), 3),
        "bfloat16_seconds": round(statistics.median(narrow), 3),
        "ratio": round(statistics.median(b / a for a, b in zip(wide, narrow, strict=True)), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
