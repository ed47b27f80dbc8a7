"""Trains the agent's demo, and once more with answers drawn at random, and writes what each learned.

    python benchmarks/agent.py [--seeds 1] [--output benchmarks/records/agent.json]

A run of `tandem demo --task guess_number` has to reach 80 % within five minutes, all included. With shuffled answers
reading is of no use, and no policy wins more than 4 of 15 games on average; what is allowed is three standard errors
above. The exit code is 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST_ACCURACY = 0.8
LONGEST_SECONDS = 300.0
CEILING = 4 / 15
"""Of a policy that does not read."""
RUN_DEADLINE_SECONDS = 900.0
SIDES = {"read": [], "shuffled": ["environment.arguments.shuffled=true"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "agent.json")
    arguments = parser.parse_args()
    runs = [play(side, seed) for seed in range(arguments.seeds) for side in SIDES]
    missed = [fault for run in runs if (fault := fault_of(run))]
    record = {"command": f"python benchmarks/agent.py --seeds {arguments.seeds}", "cores": os.cpu_count(), "runs": runs}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {arguments.output}")
    for fault in missed:
        print(f"NOT MET: {fault}")
    return int(bool(missed))


def play(side: str, seed: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="tandem-agent-", dir="/tmp") as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "tandem.services.cli", "demo", "--task", "guess_number", "--seed", str(seed)]
        started = time.monotonic()
        changes = [f"run.folder={run}", *SIDES[side]]
        subprocess.run([*command, *changes], cwd=ROOT, timeout=RUN_DEADLINE_SECONDS, check=True)
        seconds = time.monotonic() - started
        summary = json.loads((run / "summary.json").read_text())
        evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    return {
        "side": side,
        "seed": seed,
        "accuracy_by_version": {str(one["version"]): round(one["accuracy"], 3) for one in evaluations},
        "last_accuracy": summary["final_accuracy"],
        "games": evaluations[-1]["num_scored"],
        "batches": summary["train_steps"],
        "seconds": round(seconds, 1),
    }


def fault_of(run: dict[str, object]) -> str:
    """The bound that a run missed; "" if none."""
    accuracy, games, seconds = (float(str(run[key])) for key in ("last_accuracy", "games", "seconds"))
    if run["side"] == "shuffled":
        highest = CEILING + 3 * math.sqrt(CEILING * (1 - CEILING) / games)
        return (
            "" if accuracy <= highest else f"with shuffled answers {accuracy:.1%} were won, not at most {highest:.1%}"
        )
    if accuracy < LEAST_ACCURACY:
        return f"{accuracy:.1%} were won, not {LEAST_ACCURACY:.0%}"
    return "" if seconds <= LONGEST_SECONDS else f"it took {seconds:.0f} s, not {LONGEST_SECONDS:.0f}"


if __name__ == "__main__":
    sys.exit(main())
