"""Compares the sizes of the KV cache's blocks in vLLM's attention on CPUs. Prints and writes JSON.

    python benchmarks/cache_blocks.py [--rounds 41] [--output benchmarks/records/cache_blocks.json]

A step samples one token of every sequence in four layers with 4 heads of 32, as the demo's model has, in float32 and
with one thread. In each layer vLLM writes the token's keys and values to the cache and attends. The sizes are 16, the
multiple of 32 that holds a whole sequence (one block for each), and 128, which is vLLM's own. They take turns, and
microseconds are medians of a step. A ratio compares 16 with another size in one round. Sequences of fewer than 128
tokens have blocks of 16 (rollout/vllm/small_blocks.py). The exit code is 1 if that is slower for any of them.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.services.run.placement import CPU_ENVIRONMENT  # noqa: E402

os.environ |= {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": "1"}  # read when torch is imported

import torch  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: E402

LAYERS, HEADS, SIZE = 4, 4, 32
SEQUENCES = ((256, 10), (256, 24), (256, 40), (64, 100), (32, 400), (16, 1000))
"""How many, and how many tokens each has."""
SMALL, LARGE = 16, 128
WARM_UP = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "cache_blocks.json")
    arguments = parser.parse_args()
    current_platform.import_kernels()
    record = {
        "command": f"python benchmarks/cache_blocks.py --rounds {arguments.rounds}",
        "cores": os.cpu_count(),
        "avx512": torch.cpu._is_avx512_supported(),
        "cases": [_compare(number, tokens, arguments.rounds) for number, tokens in SEQUENCES],
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    short = [one for one in record["cases"] if one["tokens"] < LARGE]
    return int(any(ratio > 1.0 for one in short for ratio in one["ratios"].values()))


def _compare(number: int, tokens: int, rounds: int) -> dict[str, object]:
    sizes = sorted({SMALL, -(-tokens // 32) * 32, LARGE})
    steps = {size: _step(number, tokens, size) for size in sizes if size <= max(tokens + 31, LARGE)}
    seconds: dict[int, list[float]] = {size: [] for size in steps}
    for _ in range(WARM_UP + rounds):
        for size, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[size].append(time.perf_counter() - began)
    counted = {size: each[WARM_UP:] for size, each in seconds.items()}
    return {
        "sequences": number,
        "tokens": tokens,
        "microseconds": {size: round(1e6 * statistics.median(each)) for size, each in counted.items()},
        "ratios": {
            size: round(statistics.median(a / b for a, b in zip(counted[SMALL], each, strict=True)), 3)
            for size, each in counted.items()
            if size != SMALL
        },
    }


def _step(number: int, tokens: int, block_tokens: int) -> Callable[[], None]:
    """One step of `number` sequences that have this many tokens."""
    isa = _get_attn_isa(torch.float32, block_tokens, SIZE)
    blocks = -(-tokens // block_tokens)
    caches = [torch.zeros(number * blocks, HEADS, 2 * block_tokens, SIZE).chunk(2, dim=2) for _ in range(LAYERS)]
    query, key, value = (torch.randn(number, HEADS, SIZE) for _ in range(3))
    output = torch.empty_like(query)
    starts = torch.arange(number + 1, dtype=torch.int32)
    lengths = torch.full((number,), tokens, dtype=torch.int32)
    tables = torch.arange(number * blocks, dtype=torch.int32).reshape(number, blocks)
    slots = tables[:, -1].long() * block_tokens + (tokens - 1) % block_tokens

    def step() -> None:
        plan = ops.cpu_attn_get_scheduler_metadata(
            number, HEADS, HEADS, SIZE, lengths, torch.float32, starts, True, -1, isa, enable_kv_split=True
        )
        for keys, values in caches:
            ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)
            ops.cpu_attention_with_kv_cache(
                query, keys, values, output, starts, lengths, 0.18, True, None, -1, tables, 0.0, plan, None
            )

    return step


if __name__ == "__main__":
    sys.exit(main())
