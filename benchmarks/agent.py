"""Trains the agent's demo, and once more with answers drawn at random, and writes what each learned.

    python benchmarks/agent.py [--seeds 1] [--output benchmarks/records/agent.json]
    python benchmarks/agent.py --kills 20 [--batches 200] [--output benchmarks/records/agent_kills.json]

A run of `tandem demo --task guess_number` has to reach 80 % within five minutes, all included. With shuffled answers
reading is of no use, and no policy wins more than 4 of 15 games on average; what is allowed is three standard errors
above. With `--kills`, samplers, the processes of their environments and the trainer are killed in turn by kill -9,
evenly over the run; then its time is not bounded, and no group may be lost. The exit code is 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
LEAST_ACCURACY = 0.8
LONGEST_SECONDS = 300.0
CEILING = 4 / 15
"""Of a policy that does not read."""
RUN_DEADLINE_SECONDS = 900.0
SIDES = {"read": [], "shuffled": ["environment.arguments.shuffled=true"]}
VICTIMS = {
    "rollout": ["serve", "rollout"],
    "environment": ["-m", "tandem.rollout.environments.inside"],
    "trainer": ["serve", "trainer"],
}
"""What is killed in turn, by what its command line contains."""
KILLED_RUN_SECONDS = 2700.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--batches", type=int, default=200, help="of a run with kills")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.kills:
        options = f"--kills {arguments.kills} --batches {arguments.batches}"
        runs = [play("read", 0, Kills(arguments.kills, arguments.batches))]
    else:
        options = f"--seeds {arguments.seeds}"
        runs = [play(side, seed) for seed in range(arguments.seeds) for side in SIDES]
    missed = [fault for run in runs if (fault := fault_of(run))]
    record = {"command": f"python benchmarks/agent.py {options}", "cores": os.cpu_count(), "runs": runs}
    name = "agent_kills.json" if arguments.kills else "agent.json"
    output = arguments.output or ROOT / "benchmarks" / "records" / name
    output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {output}")
    for fault in missed:
        print(f"NOT MET: {fault}")
    return int(bool(missed))


@dataclass
class Kills:
    """Kills processes of a run, evenly over three quarters of its batches, each once it works again."""

    wanted: int
    batches: int
    made: list[str] = field(default_factory=list)

    def during(self, demo: subprocess.Popen[bytes], run: Path) -> None:
        """Returns when the demo has ended."""
        while demo.poll() is None:
            time.sleep(0.2)
            due = 1 + len(self.made) * 0.75 * self.batches / self.wanted
            if len(self.made) < self.wanted and trained_batches(run) >= due:
                self._kill(demo)

    def _kill(self, demo: subprocess.Popen[bytes]) -> None:
        name = [*VICTIMS][len(self.made) % len(VICTIMS)]
        for process in psutil.Process(demo.pid).children(recursive=True):
            try:
                command = process.cmdline()
                if all(word in command for word in VICTIMS[name]):
                    process.kill()
                    self.made.append(name)
                    return
            except psutil.NoSuchProcess:
                continue


def trained_batches(run: Path) -> int:
    """The step of the newest complete line of metrics; 0 before the first."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    complete = [line for line in lines[-2:] if line.endswith("\n")]
    return int(json.loads(complete[-1])["step"]) if complete else 0


def play(side: str, seed: int, kills: Kills | None = None) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="tandem-agent-", dir="/tmp") as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "tandem.services.cli", "demo", "--task", "guess_number", "--seed", str(seed)]
        started = time.monotonic()
        changes = [f"run.folder={run}", *SIDES[side]]
        if kills is not None:
            changes += [f"run.total_batches={kills.batches}"]
        with subprocess.Popen([*command, *changes], cwd=ROOT) as demo:
            killing = threading.Thread(target=kills.during, args=(demo, run)) if kills is not None else None
            if killing is not None:
                killing.start()
            try:
                code = demo.wait(RUN_DEADLINE_SECONDS if kills is None else KILLED_RUN_SECONDS)
            finally:
                demo.terminate()
        if code:
            raise SystemExit(f"the demo ended with exit code {code}")
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
        **({} if kills is None else killed_figures(kills, summary)),
    }


def killed_figures(kills: Kills, summary: dict[str, dict[str, int]]) -> dict[str, object]:
    """What was killed, and what came of the groups."""
    groups = summary["groups"]
    made = {name: kills.made.count(name) for name in VICTIMS}
    return {"kills_wanted": kills.wanted, "kills": made, "groups": groups, "episodes_dropped": groups["dropped"]}


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
    if "kills" in run:
        made = sum(json.loads(json.dumps(run["kills"])).values())
        lost = f"{run['episodes_dropped']} groups were dropped" if run["episodes_dropped"] else ""
        return lost or ("" if made == run["kills_wanted"] else f"{made} kills came of {run['kills_wanted']}")
    return "" if seconds <= LONGEST_SECONDS else f"it took {seconds:.0f} s, not {LONGEST_SECONDS:.0f}"


if __name__ == "__main__":
    sys.exit(main())
