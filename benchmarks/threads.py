"""Measures what a second thread brings to training steps of models of different hidden sizes. Prints and writes JSON.

    python benchmarks/threads.py [--rounds 5] [--output benchmarks/records/threads.json]

A step is forward, backward and AdamW of plain torch on 1,200 tokens in float32, with four layers and the environment of
a trainer on CPUs. One and two threads take steps in turns. `speed_up` is the time of one thread over that of two,
`processor_time` that of two over that of one; both are medians over the rounds. Processor time counts, because sampler
and trainer share the cores. The exit code is 1 if `trainer.num_threads = "auto"` takes two threads although they are
less than 1.4 times as fast, or one although two are.
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

from tandem.services.run.placement import CPU_ENVIRONMENT, NARROW  # noqa: E402

os.environ |= {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": "2"}  # read when torch is imported

import torch  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

HIDDEN_SIZES = (64, 128, NARROW, 512)
LAYERS, ROWS, ROW_TOKENS, STEPS = 4, 60, 20, 3
LEAST_SPEED_UP = 1.4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "threads.json")
    arguments = parser.parse_args()
    results = {hidden_size: _compare(hidden_size, arguments.rounds) for hidden_size in HIDDEN_SIZES}
    command = f"python benchmarks/threads.py --rounds {arguments.rounds}"
    record = {"command": command, "cores": os.cpu_count(), "narrow": NARROW, "by_hidden_size": results}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    missed = [
        f"hidden size {hidden_size}: two threads are {result['speed_up']} times as fast as one"
        for hidden_size, result in results.items()
        if (result["speed_up"] >= LEAST_SPEED_UP) != (hidden_size >= NARROW)
    ]
    print("\n".join([json.dumps(record, indent=1), *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def _compare(hidden_size: int, rounds: int) -> dict[str, float]:
    heads = max(4, hidden_size // 64)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=LAYERS,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            vocab_size=100,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids_BT = torch.randint(0, 100, (ROWS, ROW_TOKENS))
    speed_ups, processor_times = [], []
    for _ in range(rounds):
        one, two = (_seconds_of_step(threads, model, optimizer, ids_BT) for threads in (1, 2))
        speed_ups.append(one[0] / two[0])
        processor_times.append(two[1] / one[1])
    return {
        "speed_up": round(statistics.median(speed_ups), 2),
        "processor_time": round(statistics.median(processor_times), 2),
    }


def _seconds_of_step(
    threads: int, model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, ids_BT: torch.Tensor
) -> tuple[float, float]:
    """(seconds, seconds of processor time) of a step, after one that is not counted."""
    torch.set_num_threads(threads)
    for number in range(STEPS + 1):
        if number == 1:
            began, cpu_began = time.perf_counter(), time.process_time()
        model(ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / STEPS, (time.process_time() - cpu_began) / STEPS


if __name__ == "__main__":
    sys.exit(main())
