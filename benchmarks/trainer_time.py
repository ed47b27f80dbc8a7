"""Measures the trainer's time outside forward, backward and optimizer steps, as a share of a batch, and writes JSON.

    python benchmarks/trainer_time.py [--workloads demo prompts] [--output benchmarks/records/trainer_time.json]

The workloads are those of benchmarks/against_trl.py, without the exports that it measures accuracies with. Each is
trained once with `tandem run`, and its metrics say how long a batch took in all, how long the trainer waited for it and
for samplers that had not acknowledged a version, how long the learner had it, and how long its optimizer steps waited
for the ledger and for the copy of the version before (`waits_before_steps`, which is outside). Then a process trains
the recorded batches again with the same learner, alone, and times forward with its loss, backward and step in it. A
batch is what is left of its time without the waiting for groups and samplers. The thread that claims the next batch
also prepares it, and what the trainer waits for that counts as waiting for groups. The first batches and the last S + 1
do not count, and figures are medians. The exit code is 1 if a share is above `LIMIT`.
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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.against_trl import WORKLOADS  # noqa: E402
from tandem.protos.codec import decode_group  # noqa: E402
from tandem.services.config import Recipe, dump_recipe  # noqa: E402
from tandem.services.config.recipe import load_resolved  # noqa: E402
from tandem.trainer.batch.record import read_record  # noqa: E402

LIMIT = 0.05
STEPS, WARM_UP = 60, 5
DEADLINE_SECONDS = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=("demo", "prompts"))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "trainer_time.json")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="tandem-trainer-time-") as scratch:
        for name in arguments.workloads:
            recipe = WORKLOADS[name].prepare(Path(scratch) / name, STEPS)
            trainer = recipe.trainer.model_copy(update={"export_every": 0})
            found[name] = _measured(recipe.model_copy(update={"trainer": trainer}))
            print(name, json.dumps(found[name]), flush=True)
    record = {
        "command": "python benchmarks/trainer_time.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "workloads": found,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    missed = [f"{name}: {one['outside']:.1%}" for name, one in found.items() if one["outside"] > LIMIT]
    print("\n".join([f"written to {arguments.output}", *(f"NOT MET: {one} of a batch, at most 5 %" for one in missed)]))
    return 1 if missed else 0


def _measured(recipe: Recipe) -> dict[str, float]:
    lines = _trained(recipe)
    resolved = load_resolved(recipe.folder / "config.json")
    versions = range(1, STEPS - resolved.run.staleness_budget)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # a process has one learner
        inside = pool.submit(_learner_share, resolved, versions).result(DEADLINE_SECONDS)
    batch = [line["seconds_total"] - line["seconds_claim"] - line["seconds_acknowledge"] for line in lines]
    waits = [line["seconds_before_step"] for line in lines]
    learned = [line["seconds_train"] + line["seconds_forward_proximal"] for line in lines]
    learner = [one - wait for one, wait in zip(learned, waits, strict=True)]
    held = statistics.median(one / whole for one, whole in zip(learner, batch, strict=True))
    return {
        "seconds_a_batch": round(statistics.median(batch), 4),
        "waits_before_steps": round(statistics.median(waits), 4),
        "learner": round(held, 4),
        "forward_backward_step_of_learner": round(inside, 4),
        "outside": round(1 - held * inside, 4),
    }


def _trained(recipe: Recipe) -> list[dict[str, Any]]:
    """The metrics of the batches that count."""
    file = recipe.folder.with_name("recipe.json")
    file.write_text(dump_recipe(recipe))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": ""}
    command = [sys.executable, "-m", "tandem.services.cli", "run", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
    return lines[WARM_UP : STEPS - recipe.run.staleness_budget - 1]


def _learner_share(recipe: Recipe, versions: range) -> float:
    """Share of the learner's time in forward, loss, backward and step; recorded batches, alone."""
    from tandem.services.trainer.service import make_learner
    from tandem.trainer.backend.deepspeed.engine import DeepSpeedEngine
    from tandem.trainer.objective import BatchObjective

    spent = [0.0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **more)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    for owner, name in (
        *((DeepSpeedEngine, name) for name in ("__call__", "backward", "step")),
        (BatchObjective, "policy_loss"),
    ):
        setattr(owner, name, timed(getattr(owner, name)))
    learner, _ = make_learner(recipe)
    shares = []
    for version in versions:
        batch, payloads = read_record(recipe.folder, version)
        groups = {group_id: decode_group(payload) for group_id, payload in payloads.items()}
        prepared = learner.prepare(batch, groups)
        spent[0], began = 0.0, time.perf_counter()
        learner.train(prepared)
        shares.append(spent[0] / (time.perf_counter() - began))
    return statistics.median(shares[WARM_UP:])


if __name__ == "__main__":
    sys.exit(main())
