"""Measures what it saves to compute the output head's gradient in bfloat16 from several chunks of logits at once.

    python benchmarks/head_gradient.py [--rounds 3] [--output benchmarks/records/head_gradient.json]

The head has the size of Qwen2.5-0.5B's, 151,936 × 896. One way adds a part to the gradient in float32 for each chunk of
logits, the other for each group of chunks. Both run in turns on CPUs, with a thread for each core. Seconds are those of
the backward pass, medians over the rounds; `ratio` is the second way's over the first's. The exit code is 1 if it is
above 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.services.run.dtypes import has_amx  # noqa: E402
from tandem.services.run.placement import CPU_ENVIRONMENT  # noqa: E402

os.environ |= {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}  # read when torch is imported

import torch  # noqa: E402

from tandem.trainer.models import token_logprobs  # noqa: E402

VOCABULARY, HIDDEN = 151_936, 896
TOKENS = (400, 1600)
KEPT = {"chunks": 0, "groups": token_logprobs._KEPT_SLOPES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "head_gradient.json")
    arguments = parser.parse_args()
    record = {
        "command": f"python benchmarks/head_gradient.py --rounds {arguments.rounds}",
        "cores": os.cpu_count(),
        "amx": has_amx(),
        "by_tokens": {tokens: _compare(tokens, arguments.rounds) for tokens in TOKENS},
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return int(any(one["ratio"] > 1.0 for one in record["by_tokens"].values()))


def _compare(tokens: int, rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    hidden_NH = torch.randn(tokens, HIDDEN).bfloat16().requires_grad_()
    weight_VH = (0.02 * torch.randn(VOCABULARY, HIDDEN)).bfloat16().requires_grad_()
    target_N = torch.randint(VOCABULARY, (tokens,))
    seconds: dict[str, list[float]] = {way: [] for way in KEPT}
    for _ in range(rounds + 1):
        for way, kept in KEPT.items():
            token_logprobs._KEPT_SLOPES = kept
            found = token_logprobs.token_statistics(hidden_NH, weight_VH, None, target_N, torch.ones(tokens))
            began = time.perf_counter()
            torch.autograd.grad(found.logprobs_N.sum(), [hidden_NH, weight_VH])
            seconds[way].append(time.perf_counter() - began)
    first, second = (seconds[way][1:] for way in KEPT)  # the first round warms up
    return {
        "chunks_seconds": round(statistics.median(first), 2),
        "groups_seconds": round(statistics.median(second), 2),
        "ratio": round(statistics.median(b / a for a, b in zip(first, second, strict=True)), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
