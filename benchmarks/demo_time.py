"""Compares the seconds of the whole demo with those of TRL for the same training, and writes JSON.

    python benchmarks/demo_time.py [--rounds 3] [--output benchmarks/records/demo_time.json]

TRL trains 200 steps of the workload `demo` of against_trl.py without writing models; its seconds are those from the
start of its training to its last step. `tandem demo` runs as `make demo` starts it, with all that it does beside the
same 200 steps: it makes data and model, starts the services, evaluates, and writes exports and a report. Every other
round starts with the other one. The goal is a demo of 150 s on a machine where TRL takes 80 s: the exit code is 1 if
the median of the ratios is above 150 / 80, or if a demo fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.against_trl import demo_recipe, prepare_demo, run_trl  # noqa: E402
from benchmarks.trl_environment import trl_python  # noqa: E402

STEPS = 200
MOST_RATIO = 150 / 80
DEADLINE_SECONDS = 1200.0
SIDES = ("trl", "demo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "demo_time.json")
    arguments = parser.parse_args()
    python = trl_python()
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="tandem-demo-time-") as scratch:
        made = prepare_demo(Path(scratch))
        for number in range(arguments.rounds):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            took = {}
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                took[side] = trl_seconds(python, folder, made) if side == "trl" else demo_seconds(folder)
            rounds.append(took)
            print(f"round {number + 1}: TRL {took['trl']:.1f} s, demo {took['demo']:.1f} s", flush=True)
    ratio = statistics.median(one["demo"] / one["trl"] for one in rounds)
    record = {
        "command": f"python benchmarks/demo_time.py --rounds {arguments.rounds}",
        "cores": os.cpu_count(),
        "seconds": {side: [round(one[side], 1) for one in rounds] for side in SIDES},
        "demo_over_trl": round(ratio, 3),
        "most": MOST_RATIO,
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"the demo takes {ratio:.2f} of TRL's seconds; written to {arguments.output}")
    if ratio > MOST_RATIO:
        print(f"NOT MET: at most {MOST_RATIO}")
        return 1
    return 0


def trl_seconds(python: Path, folder: Path, made: Path) -> float:
    recipe = demo_recipe(folder / "trl", made, STEPS)
    trainer = recipe.trainer.model_copy(update={"export_every": 0})
    steps, _ = run_trl(python, recipe.model_copy(update={"trainer": trainer}))
    return steps[-1].time - steps[0].time


def demo_seconds(folder: Path) -> float:
    left_out = ("OMP_NUM_THREADS", "RAY_ADDRESS", "TANDEM_REDIS_URL")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    command = [sys.executable, "-m", "tandem.services.cli", "demo", f"run.folder={folder / 'demo'}"]
    log, started = folder / "demo.log", time.monotonic()
    with log.open("w") as out:
        code = subprocess.call(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=DEADLINE_SECONDS
        )
    if code:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
