"""Measures the processor time of each service for a step of training, in two versions at once, and writes JSON.

    python benchmarks/step_cpu.py [--workload demo] [--checkout FOLDER] [--override KEY=VALUE ...] [--rounds 3]
        [--output benchmarks/records/step_cpu.json]

The workloads are those of benchmarks/against_trl.py. The first version is this checkout. The second one has the
overrides, and with --checkout the code and the interpreter of another folder, such as one of `git worktree add`, which
has its own `.venv` (`make setup`; `PYTHON=` chooses the interpreter). Both train at the same time with the same model
and data, so what else the machine does slows both. In each round both train 80 batches; those in which either of them
starts or ends do not count. A ratio is the second version's processor time over the first one's in a round, and the
record has medians over the rounds. Seconds a step say little here, since both share the cores.
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
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.against_trl import WORKLOADS  # noqa: E402
from benchmarks.process_usage import kind_of  # noqa: E402
from benchmarks.sampler_before import commit_of  # noqa: E402
from tandem.services.config import dump_recipe  # noqa: E402

BATCHES, FIRST, LAST = 80, 8, 72
DEADLINE_SECONDS = 1800.0
SIDES = ("first", "second")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="demo")
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--override", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "step_cpu.json")
    arguments = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="tandem-step-cpu-") as scratch:
        recipe = Path(scratch) / "recipe.json"
        recipe.write_text(dump_recipe(WORKLOADS[arguments.workload].prepare(Path(scratch) / "made", BATCHES)))
        for number in range(arguments.rounds):
            with ExitStack() as stack:
                first = stack.enter_context(Run(Path(scratch) / f"{number}-first", recipe, ROOT, []))
                second = stack.enter_context(
                    Run(Path(scratch) / f"{number}-second", recipe, arguments.checkout.resolve(), arguments.override)
                )
                rounds.append(dict(zip(SIDES, _measured(first, second), strict=True)))
            print(f"round {number + 1}, milliseconds a step: {json.dumps(rounds[-1])}", flush=True)
    ratios = [sum(one["second"].values()) / sum(one["first"].values()) for one in rounds]
    other = "" if arguments.checkout == ROOT else " --checkout FOLDER"
    if arguments.workload != "demo":
        other = f" --workload {arguments.workload}{other}"
    record = {
        "command": f"python benchmarks/step_cpu.py{other} --rounds {arguments.rounds}",
        "first": {"python": _python_of(ROOT)},
        "second": {
            "commit": commit_of(arguments.checkout),
            "python": _python_of(arguments.checkout),
            "overrides": arguments.override,
        },
        "cores": os.cpu_count(),
        "milliseconds_a_step": {side: _medians([one[side] for one in rounds]) for side in SIDES},
        "second_over_first": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return 0


class Run:
    """A training run of one version, from its start until `with` ends it."""

    def __init__(self, folder: Path, recipe: Path, checkout: Path, overrides: Sequence[str]) -> None:
        self.folder, self._recipe, self._checkout = folder, recipe, checkout
        self._overrides = [f"run.folder={folder}", "trainer.export_every=0", *overrides]

    def __enter__(self) -> Run:
        left_out = ("OMP_NUM_THREADS", "RAY_ADDRESS")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment |= {"PYTHONPATH": str(self._checkout), "TANDEM_REDIS_URL": ""}
        python = self._checkout / ".venv" / "bin" / "python"
        command = [python, "-m", "tandem.services.cli", "run", self._recipe, *self._overrides]
        with self.folder.with_suffix(".log").open("w") as log:
            self._process = subprocess.Popen(
                command, env=environment, cwd=self._checkout, stdout=log, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def steps(self) -> int:
        if self._process.poll():
            raise SystemExit(self.folder.with_suffix(".log").read_text()[-2000:])
        metrics = self.folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def cpu_seconds(self) -> dict[tuple[int, str], float]:
        """Of each process, by its pid and kind."""
        root, found = psutil.Process(self._process.pid), {}
        for process in [root, *root.children(recursive=True)]:
            try:
                times, kind = process.cpu_times(), kind_of(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            found[process.pid, kind] = times.user + times.system
        return found


def _python_of(checkout: Path) -> str:
    """The interpreter's version and build."""
    command = [checkout / ".venv" / "bin" / "python", "-c", "import sys; print(sys.version)"]
    return " ".join(subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split())


def _measured(*runs: Run) -> list[dict[str, float]]:
    """Milliseconds of processor time a step, by kind of process, while all runs train."""
    _wait(lambda: all(run.steps() >= FIRST for run in runs))
    before = [(run.steps(), run.cpu_seconds()) for run in runs]
    _wait(lambda: any(run.steps() >= LAST for run in runs))
    found = []
    for run, (steps, cpu) in zip(runs, before, strict=True):
        used: Counter[str] = Counter()
        for key, seconds in run.cpu_seconds().items():
            used[key[1]] += 1000 * (seconds - cpu.get(key, 0.0)) / (run.steps() - steps)
        found.append({kind: round(spent, 1) for kind, spent in used.most_common()})
    return found


def _wait(condition: Any) -> None:
    ends = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > ends:
            raise SystemExit(f"no such step within {DEADLINE_SECONDS:g} s")
        time.sleep(0.1)


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {kind: round(statistics.median(one.get(kind, 0.0) for one in rounds), 1) for kind in rounds[0]}


if __name__ == "__main__":
    sys.exit(main())
