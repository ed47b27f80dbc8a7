"""Compares oneDNN, which vLLM uses on CPUs, with torch for products with weights of different sizes, and writes JSON.

    python benchmarks/small_weights.py [--rounds 7] [--output benchmarks/records/small_weights.json]

In float32 with one thread, by numbers of rows: `torch_over_onednn` is the time of `torch.nn.functional.linear` over
that of a oneDNN kernel which exists already. `kernel_milliseconds` is what a weight's kernel and its first product cost
beyond a later product; every version of the weights needs a new kernel, and each further number of rows adds to it. All
are medians over the rounds. The exit code is 1 if torch takes more than 1.25 times as long, on average over the numbers
of rows, for a weight that a sampler multiplies with it (rollout/vllm/small_weights.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

current_platform.import_kernels()

from vllm import _custom_ops as kernels  # noqa: E402

from tandem.rollout.vllm.small_weights import MOST_ELEMENTS  # noqa: E402

SHAPES = ((128, 128), (128, 768), (256, 512), (256, 1536), (512, 1536), (896, 4864))
"""(inputs, outputs)"""
ROWS = (4, 16, 64, 256)
REPEATS = 20
MOST_TIME = 1.25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "small_weights.json")
    arguments = parser.parse_args()
    results = {shape: _compare(*shape, arguments.rounds) for shape in SHAPES}
    record = {
        "command": f"python benchmarks/small_weights.py --rounds {arguments.rounds}",
        "most_elements": MOST_ELEMENTS,
        "by_weight": {f"{inputs} x {outputs}": result for (inputs, outputs), result in results.items()},
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    missed = [
        f"{inputs} x {outputs}: torch is slower than oneDNN"
        for (inputs, outputs), result in results.items()
        if inputs * outputs <= MOST_ELEMENTS and result["torch_over_onednn"]["mean"] > MOST_TIME
    ]
    print("\n".join([json.dumps(record, indent=1), *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def _compare(inputs: int, outputs: int, rounds: int) -> dict[str, object]:
    weight = torch.randn(outputs, inputs)
    kernel = kernels.create_onednn_mm(weight.t(), 32)
    ratios: dict[int, list[float]] = {rows: [] for rows in ROWS}
    costs = []
    for _ in range(rounds):
        for rows, found in ratios.items():
            x = torch.randn(rows, inputs)
            onednn = _seconds(lambda x=x: kernels.onednn_mm(kernel, x, None))
            found.append(_seconds(lambda x=x: functional.linear(x, weight)) / onednn)
        x = torch.randn(max(ROWS), inputs)
        later = _seconds(lambda x=x: kernels.onednn_mm(kernel, x, None))
        first = _seconds(lambda x=x: kernels.onednn_mm(kernels.create_onednn_mm(weight.t(), 32), x, None))
        costs.append(1e3 * (first - later))
    medians = {str(rows): round(statistics.median(found), 2) for rows, found in ratios.items()}
    medians["mean"] = round(statistics.fmean(medians.values()), 2)
    return {"torch_over_onednn": medians, "kernel_milliseconds": round(statistics.median(costs), 2)}


def _seconds(multiply: Callable[[], object]) -> float:
    multiply()
    began = time.perf_counter()
    for _ in range(REPEATS):
        multiply()
    return (time.perf_counter() - began) / REPEATS


if __name__ == "__main__":
    sys.exit(main())
