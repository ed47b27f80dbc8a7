"""Compares the seconds of the whole demo with those of TRL for the same training, and writes JSON.

    python benchmarks/demo_time.py [--rounds 3] [--output benchmarks/records/demo_time.json]

In each round TRL trains 200 steps of the workload `demo` of against_trl.py, which counts from the start of its training
to its last step. Then `tandem demo` runs as `make demo` starts it, which counts from its start to its end: it also
makes data and model, starts the services, evaluates, and writes exports and a report. The exit code is 1 if the median
of the ratios is above 150 / 80, or if a demo fails.
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "demo_time.json")
    arguments = parser.parse_args()
    python, rounds = trl_python(), []
    with tempfile.TemporaryDirectory(prefix="tandem-demo-time-") as scratch:
        made = prepare_demo(Path(scratch))
        for number in range(arguments.rounds):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            steps, _ = run_trl(python, demo_recipe(folder / "trl", made, STEPS))
            rounds.append({"trl": steps[-1].time - steps[0].time, "demo": demo_seconds(folder / "demo")})
            print(f"round {number + 1}: " + ", ".join(f"{name} {took:.1f} s" for name, took in rounds[-1].items()))
    ratio = statistics.median(one["demo"] / one["trl"] for one in rounds)
    record = {
        "command": f"python benchmarks/demo_time.py --rounds {arguments.rounds}",
        "cores": os.cpu_count(),
        "seconds": {name: [round(one[name], 1) for one in rounds] for name in rounds[0]},
        "demo_over_trl": round(ratio, 3),
        "most": MOST_RATIO,
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"the demo takes {ratio:.2f} of TRL's seconds; written to {arguments.output}")
    if ratio > MOST_RATIO:
        print(f"NOT MET: at most {MOST_RATIO}")
        return 1
    return 0


def demo_seconds(folder: Path) -> float:
    command = [sys.executable, "-m", "tandem.services.cli", "demo", f"run.folder={folder}"]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
