"""Measures how the ends of samplers change the lengths of answers, and what saving unfinished answers costs.

    python benchmarks/killed_samplers.py [--output benchmarks/records/killed_samplers.json]

The real service samples 2,000 prompts, one answer each, from a simulated engine whose answers last 0.4 s in the mean
and 5.7 s at most. Each sampler ends after 1.5 s, and in most scenarios the next one has other weights, which give other
answers whose lengths have the same distribution. Every scenario is compared with a calm run by the Kolmogorov–Smirnov
distance of the lengths. The bytes and the time of a save are those of one group of 8 unfinished answers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.protos.codec import encode_group  # noqa: E402
from tandem.protos.types import (  # noqa: E402
    Prompt,
    SamplingParameters,
    Segment,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from tandem.services.run.redis_child import RedisChild  # noqa: E402
from tests.support.timed_engine import (  # noqa: E402
    CALM,
    NUM_PROMPTS,
    EndingSamplers,
    Scenario,
    critical_distance,
    distance,
)

SCENARIOS = {
    "killed, same weights": Scenario(),
    "killed, same weights, unfinished answers dropped": Scenario(drops_unfinished=True),
    "left, other weights": Scenario(end="leave", changes_weights=True),
    "killed, other weights, saved every 0.2 s": Scenario(changes_weights=True, lease_seconds=0.6),
    "killed, other weights, saved every 1 s": Scenario(changes_weights=True, lease_seconds=3.0),
    "killed, other weights, sampled anew": Scenario(changes_weights=True, partial_rollout=False),
}
PROMPT_TOKENS, GROUP_ROWS, REPEATS = 200, 8, 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "killed_samplers.json")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tandem-kills-") as scratch,
        RedisChild(Path(scratch), report=print) as redis,
    ):
        calm = EndingSamplers(redis.url, CALM).lengths()
        scenarios = [_measure(redis.url, name, scenario, calm) for name, scenario in SCENARIOS.items()]
    record = {
        "command": "python benchmarks/killed_samplers.py",
        "cores": os.cpu_count(),
        "prompts": NUM_PROMPTS,
        "scenarios": scenarios,
        "saves": [_cost_of_a_save(num_tokens) for num_tokens in (100, 1000, 4000)],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    return 0


def _measure(redis_url: str, name: str, scenario: Scenario, calm: Any) -> dict[str, Any]:
    samplers = EndingSamplers(redis_url, scenario)
    lengths = samplers.lengths()
    return {
        "scenario": name,
        "distance": round(distance(lengths, calm), 4),
        "critical_distance_1_percent": round(critical_distance(lengths, calm), 4),
        "mean_length": round(float(lengths.mean()), 1),
        "mean_length_calm": round(float(calm.mean()), 1),
        "samplers_ended": samplers.num_ended,
    }


def _cost_of_a_save(num_tokens: int) -> dict[str, Any]:
    ids = np.zeros(PROMPT_TOKENS + num_tokens, np.int32)
    mask = (np.arange(len(ids)) >= PROMPT_TOKENS).astype(np.uint8)
    segment = Segment(ids, -mask.astype(np.float32), mask, (VersionSpan(PROMPT_TOKENS, 1, 1),))
    prompt = Prompt(0, 0, ids[:PROMPT_TOKENS], GROUP_ROWS, SamplingParameters())
    rows = [Trajectory(row, "policy", (segment,), "abort", "", prompt.sampling) for row in range(GROUP_ROWS)]
    group = TrajectoryGroup(prompt, tuple(rows))
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        payload = encode_group(group)
        seconds.append(time.perf_counter() - began)
    return {
        "tokens_of_each_answer": num_tokens,
        "bytes_per_token": round(len(payload) / (GROUP_ROWS * num_tokens), 1),
        "milliseconds": round(1000 * statistics.median(seconds), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
