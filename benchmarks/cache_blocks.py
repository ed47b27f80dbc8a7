"""Compares the sizes of the KV cache's blocks in vLLM's attention on CPUs. Prints and writes JSON.

    python benchmarks/cache_blocks.py [--rounds 41] [--output benchmarks/records/cache_blocks.json]

A step of four layers, in float32 and with one thread: in each layer vLLM writes keys and values of the new tokens to
the cache and attends. A sequence gets one more token, or begins with a prompt of `new` tokens. `heads` are those of
queries and of keys, and their size: first those of the demo's model, then of Qwen2.5-0.5B's. The sizes of blocks are
16, the multiple of 32 that holds a whole sequence (one block for each), and 128, which is vLLM's own. They take turns,
and microseconds are medians of a step. A ratio compares 16 with another size in one round. Sequences of fewer than 128
tokens have blocks of 16 (rollout/vllm/small_blocks.py). The exit code is 1 if that takes more than 1.05 of the time for
any of them.
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

LAYERS = 4
DEMO, QWEN = (4, 4, 32), (14, 2, 64)
CASES = (
    *((DEMO, number, tokens, 1) for number, tokens in ((256, 10), (256, 24), (256, 40), (64, 100))),
    *((DEMO, number, tokens, tokens) for number, tokens in ((64, 10), (16, 100))),
    *((QWEN, 32, 100, new) for new in (1, 100)),
    *((DEMO, number, tokens, 1) for number, tokens in ((32, 400), (16, 1000))),
)
"""Heads, sequences, tokens of each, and how many of them are new."""
SMALL, LARGE = 16, 128
MOST_RATIO = 1.05
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
        "cases": [_compare(*case, arguments.rounds) for case in CASES],
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    short = [one for one in record["cases"] if one["tokens"] < LARGE]
    return int(any(ratio > MOST_RATIO for one in short for ratio in one["ratios"].values()))


def _compare(heads: tuple[int, int, int], number: int, tokens: int, new: int, rounds: int) -> dict[str, object]:
    steps = {size: _step(heads, number, tokens, new, size) for size in {SMALL, -(-tokens // 32) * 32, LARGE}}
    seconds: dict[int, list[float]] = {size: [] for size in sorted(steps)}
    for turn in range(WARM_UP + rounds):
        for size in sorted(steps, reverse=turn % 2 == 1):
            began = time.perf_counter()
            steps[size]()
            seconds[size].append(time.perf_counter() - began)
    counted = {size: each[WARM_UP:] for size, each in seconds.items()}
    return {
        "heads": heads,
        "sequences": number,
        "tokens": tokens,
        "new": new,
        "microseconds": {size: round(1e6 * statistics.median(each)) for size, each in counted.items()},
        "ratios": {
            size: round(statistics.median(a / b for a, b in zip(counted[SMALL], each, strict=True)), 3)
            for size, each in counted.items()
            if size != SMALL
        },
    }


def _step(heads: tuple[int, int, int], number: int, tokens: int, new: int, block_tokens: int) -> Callable[[], None]:
    """One step of `number` sequences that have this many tokens, the last `new` of which it adds."""
    query_heads, key_heads, size = heads
    isa = _get_attn_isa(torch.float32, block_tokens, size)
    blocks = -(-tokens // block_tokens)
    caches = [torch.zeros(number * blocks, key_heads, 2 * block_tokens, size).chunk(2, dim=2) for _ in range(LAYERS)]
    query = torch.randn(number * new, query_heads, size)
    key, value = (torch.randn(number * new, key_heads, size) for _ in range(2))
    output = torch.empty_like(query)
    starts = torch.arange(0, number * new + 1, new, dtype=torch.int32)
    lengths = torch.full((number,), tokens, dtype=torch.int32)
    tables = torch.arange(number * blocks, dtype=torch.int32).reshape(number, blocks)
    places = torch.arange(tokens - new, tokens)
    slots = (tables[:, places // block_tokens].long() * block_tokens + places % block_tokens).flatten()

    def step() -> None:
        plan = ops.cpu_attn_get_scheduler_metadata(
            number, query_heads, key_heads, size, lengths, torch.float32, starts, True, -1, isa, enable_kv_split=True
        )
        for keys, values in caches:
            ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)
            ops.cpu_attention_with_kv_cache(
                query, keys, values, output, starts, lengths, 0.18, True, None, -1, tables, 0.0, plan, None
            )

    return step


if __name__ == "__main__":
    sys.exit(main())
