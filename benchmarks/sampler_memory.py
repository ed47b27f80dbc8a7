"""Measures the memory of vLLM's engine on CPUs while it is updated, with one arena of glibc's allocator or several.

    python benchmarks/sampler_memory.py [--rounds 2] [--updates 5] [--output benchmarks/records/sampler_memory.json]

The model has the size of Qwen2.5-0.5B and random weights. After each update over gloo the engine samples 32 answers of
6 tokens. `peak_mib` is the largest proportional set size (PSS) of the engine's process from the second update on, in
samples 0.1 s apart, and `sampling_seconds` the median time of the answers. In a round both ways run, one after the
other. Figures are medians over the rounds, `ratio` those of one arena over several. The exit code is 1 if one arena
takes more memory. Prints and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.real_size import QWEN_0_5B, build_model  # noqa: E402
from tandem.protos.types import SamplingParameters  # noqa: E402
from tandem.rollout.config import RolloutConfig  # noqa: E402
from tandem.rollout.engine import SamplerArguments  # noqa: E402
from tandem.services.buffer.store_source import redis_store  # noqa: E402
from tandem.services.run.placement import CPU_ENVIRONMENT, ONE_ARENA  # noqa: E402
from tandem.services.run.redis_child import RedisChild  # noqa: E402

DTYPES = ("bfloat16", "float32")
GROUPS, ANSWERS, ANSWER_TOKENS = 8, 4, 6
DEADLINE_SECONDS = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=5, help="At least 2.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "sampler_memory.json")
    parser.add_argument("--side", choices=DTYPES, help="Measure an engine with this dtype.")
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    if arguments.side:
        print("found " + json.dumps(_engine(arguments.model, arguments.side, arguments.updates)))
        return 0
    with tempfile.TemporaryDirectory(prefix="tandem-sampler-memory-") as scratch:
        model = Path(scratch) / "model"
        build_model(model, QWEN_0_5B)
        found = {dtype: _compare(model, dtype, arguments.rounds, arguments.updates) for dtype in DTYPES}
    record = {
        "command": f"python benchmarks/sampler_memory.py --rounds {arguments.rounds} --updates {arguments.updates}",
        "cores": os.cpu_count(),
        "by_dtype": found,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return int(any(one["peak_mib"]["ratio"] > 1.0 for one in found.values()))


def _compare(model: Path, dtype: str, rounds: int, updates: int) -> dict[str, dict[str, float]]:
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    plain = {key: value for key, value in os.environ.items() if key not in ONE_ARENA} | {**CPU_ENVIRONMENT, **threads}
    command = [sys.executable, __file__, "--updates", str(updates), "--side", dtype, "--model", str(model)]
    found: dict[str, list[dict[str, float]]] = {"several": [], "one": []}
    for _ in range(rounds):
        for way, environment in (("several", plain), ("one", {**plain, **ONE_ARENA})):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
            )
            if done.returncode:
                raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
            found[way].append(json.loads(done.stdout.rpartition("found ")[2]))
    return {
        name: {way: statistics.median(one[name] for one in each) for way, each in found.items()}
        | {"ratio": round(statistics.median(b[name] / a[name] for a, b in zip(*found.values(), strict=True)), 2)}
        for name in ("peak_mib", "sampling_seconds")
    }


def _engine(model: Path, dtype: str, updates: int) -> dict[str, float]:
    import torch

    from tests.support.engine_process import EngineProcess
    from tests.support.weight_ring import Policy, Ring

    config = RolloutConfig(max_groups_in_flight=GROUPS, samples_per_prompt=ANSWERS)
    sampling = SamplingParameters(max_tokens=ANSWER_TOKENS)
    with tempfile.TemporaryDirectory() as folder, RedisChild(Path(folder), report=print) as redis:
        store = redis_store(redis.url, "memory", "weights")
        arguments = SamplerArguments(config, str(model), dtype, max_model_tokens=144, seed=0, group_store=store)
        policy: Any = Policy(model)
        policy.model.to(getattr(torch, dtype))
        with closing(EngineProcess(arguments)) as engine:
            ring = Ring(engine, policy, bucket_bytes=64 << 20)
            ring.join()
            seconds: list[float] = []
            watch = _Watch(engine.engine_pid)
            for number in range(updates):
                if number == 1:
                    watch.start()
                ring.update()
                ring.models.clear()
                began = time.perf_counter()
                ring.sample(range(5, 21), GROUPS * ANSWERS, sampling).result(120.0)
                seconds.append(time.perf_counter() - began)
            return {"peak_mib": watch.stop() >> 20, "sampling_seconds": round(statistics.median(seconds[1:]), 2)}


class _Watch:
    """The largest PSS of a process, in bytes, between `start` and `stop`."""

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/smaps_rollup")
        self._ends = threading.Event()
        self._peak = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        self._ends.set()
        self._thread.join()
        return self._peak

    def _run(self) -> None:
        while not self._ends.wait(0.1):
            line = next(line for line in self._file.read_text().splitlines() if line.startswith("Pss:"))
            self._peak = max(self._peak, int(line.split()[1]) << 10)


if __name__ == "__main__":
    sys.exit(main())
