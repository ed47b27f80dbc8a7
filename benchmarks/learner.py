"""Compares the learner at each ZeRO stage with a plain torch loop on the same padded rows. Prints and writes JSON.

    python benchmarks/learner.py [--rounds 10] [--dtypes float32 bfloat16] [--output benchmarks/records/learner.json]

The plain loop pads the rows and runs forward, cross-entropy of the answers' tokens, backward, clip and fused AdamW; in
bfloat16 under autocast. The learner trains the same rows as one batch. A batch has the demo's size: 32 prompts of 2 to
7 tokens with 8 answers of 1 to 6, and its model of 0.66 M parameters. Each side is a process with one thread. In a
round every side trains one batch after the other, and a ratio compares seconds of one round. The first rounds warm up
and do not count. `auto` is what `trainer.zero_stage = "auto"` takes. It has to sum gradients in float32, which stage 0
does not do in bfloat16. The exit code is 1 if it costs more than `LIMIT` times the plain loop in float32.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.protos.types import TrainBatch, TrajectoryGroup  # noqa: E402
from tandem.services.commands.demo_model import make_model  # noqa: E402
from tandem.trainer.config import TrainerConfig  # noqa: E402
from tests.support.training_groups import make_batch, make_group  # noqa: E402

LIMIT = 1.05
WARM_UP_ROUNDS = 3
GROUPS, ANSWERS, TOKENS_PER_MICRO_BATCH = 32, 8, 8192
DTYPES = ("float32", "bfloat16")
ONE_THREAD: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}
SIDES: dict[str, dict[str, Any]] = {
    f"{dtype} {name}": {"dtype": dtype, "zero_stage": stage}
    for dtype in DTYPES
    for name, stage in (("torch", None), ("stage 0", 0), ("stage 1", 1), ("stage 2", 2), ("stage 3", 3))
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--side", choices=SIDES, help="Be this side of the comparison.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "learner.json")
    arguments = parser.parse_args()
    if arguments.side:
        _serve_side(SIDES[arguments.side], arguments.model)
        return 0
    with tempfile.TemporaryDirectory(prefix="tandem-learner-") as scratch:
        make_model(Path(scratch) / "model", 0)
        sides = [side for side in SIDES if _dtype(side) in arguments.dtypes]
        seconds = measure(Path(scratch) / "model", sides, arguments.rounds)
    ratios = {
        side: statistics.median(a / b for a, b in zip(each, seconds[f"{_dtype(side)} torch"], strict=True))
        for side, each in seconds.items()
    }
    auto = {dtype: TrainerConfig(dtype=dtype).resolved_zero_stage for dtype in arguments.dtypes}
    record = {
        "command": "python benchmarks/learner.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "rounds": arguments.rounds,
        "limit": LIMIT,
        "auto": auto,
        "seconds": {side: round(statistics.median(each), 4) for side, each in seconds.items()},
        "ratio_to_torch": {side: round(ratio, 3) for side, ratio in ratios.items()},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    return int("float32" in auto and ratios[f"float32 stage {auto['float32']}"] > LIMIT)


def _dtype(side: str) -> str:
    return side.partition(" ")[0]


def measure(
    model: Path, sides: Sequence[str], rounds: int, variables: Mapping[str, str] = ONE_THREAD
) -> dict[str, list[float]]:
    """Seconds of every counted batch by side. `variables` are added to the environment of the processes."""
    command = [sys.executable, __file__, "--model", str(model), "--side"]
    environment = {**os.environ, **variables}
    processes = {
        side: subprocess.Popen(
            [*command, side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for side in sides
    }
    try:
        found: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(WARM_UP_ROUNDS + rounds):
            for side, process in processes.items():
                found[side].append(_ask(process))
        return {side: each[WARM_UP_ROUNDS:] for side, each in found.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _ask(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("seconds "):
            return float(line.split()[1])
    raise SystemExit(f"{process.args} ended with {process.wait()}")


def _serve_side(settings: dict[str, Any], model: Path) -> None:
    """Trains one batch for each line of the standard input and prints its seconds."""
    train = _plain(settings, model) if settings["zero_stage"] is None else _learner(settings, model)
    batches = [_batch(version) for version in range(1, 6)]
    for number, _ in enumerate(sys.stdin):
        batch = batches[number % len(batches)]
        began = time.perf_counter()
        train(*batch)
        print(f"seconds {time.perf_counter() - began}", flush=True)


def _batch(version: int) -> tuple[TrainBatch, dict[str, TrajectoryGroup]]:
    groups = [make_group(index, num_samples=ANSWERS, seed=version, max_sampled=6) for index in range(GROUPS)]
    return make_batch(groups, policy_version=1, tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH)


def _learner(settings: dict[str, Any], model: Path) -> Callable[[TrainBatch, dict[str, TrajectoryGroup]], object]:
    from tandem.trainer.learner import Learner

    config = TrainerConfig(learning_rate=3e-4, tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH, **settings)
    learner = Learner(config, model_path=str(model), total_batches=1000, seed=0, max_response_tokens=8)
    return lambda batch, groups: learner.train(learner.prepare(batch, groups))


def _plain(settings: dict[str, Any], model: Path) -> Callable[[TrainBatch, dict[str, TrajectoryGroup]], object]:
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, fused=True)
    dtype = getattr(torch, settings["dtype"])

    def train(batch: TrainBatch, groups: dict[str, TrajectoryGroup]) -> None:
        cells: dict[int, list[Any]] = {}
        for row in batch.plan:
            cells.setdefault(row.micro_batch, []).append(groups[row.group_id].scored_rows[row.trajectory_id])
        total = sum(row.trajectory.segments[0].num_loss_tokens for rows in cells.values() for row in rows)
        for rows in cells.values():
            segments = [row.trajectory.segments[0] for row in rows]
            ids_BT = torch.zeros((len(rows), max(len(one.ids) for one in segments)), dtype=torch.int64)
            mask_BT = torch.zeros(ids_BT.shape)
            for number, one in enumerate(segments):
                ids_BT[number, : len(one.ids)] = torch.from_numpy(one.ids)
                mask_BT[number, : len(one.ids)] = torch.from_numpy(one.loss_mask) * float(rows[number].reward)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                logits = policy(input_ids=ids_BT, use_cache=False).logits
            logprobs = -functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten(), reduction="none"
            )
            (-(logprobs * mask_BT[:, 1:].flatten()).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return train


if __name__ == "__main__":
    sys.exit(main())
