"""Measures training with shared prompts against padded rows and against a plain torch loop. Prints and writes JSON.

    python benchmarks/shared_prompts.py [--rounds 5] [--output benchmarks/records/shared_prompts.json]

One learner on one core or a GPU, with the demo's model (hidden size 128, 4 layers, float32), trains the same batch as
padded rows and with shared prompts, in turns. Workloads: `arithmetic` is like the demo's (32 groups of 8 answers of 3
to 5 tokens, prompts of 8 to 12); `prompts` has 8 groups with prompts of 256 tokens and 8 answers of 32; `lognormal` has
8 groups with prompts of 12 to 20 tokens and 8 answers with a median of 67 tokens, at most 480.

- saved/ideal: the time saved over the share of tokens saved, at least 0.8 for `prompts`.
- auto: the packing that `trainer.packing = "auto"` chooses for the batch.
- padded/plain: time of padded rows over a loop in plain torch with the same rows, at most 1.05.
- log-prob difference: the mean over the tokens, at most 1e-5 in float32, in bfloat16 0.02.
- peak memory (`prompts`): of a process that trains only this way, over one with padded rows, at most 1; on a GPU the
  memory allocated there.

Ratios are medians of each round's ratio. The exit code is 1 if `prompts` misses a bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.protos.row_headers import group_headers  # noqa: E402
from tandem.protos.types import (  # noqa: E402
    Packing,
    Prompt,
    SamplingParameters,
    ScoredTrajectory,
    Segment,
    TrainBatch,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from tandem.services.data.tiny_model import build_tiny_model  # noqa: E402
from tandem.trainer.batch.layout import BatchLayout  # noqa: E402
from tandem.trainer.batch.micro_batch import MicroBatch, rank_micro_batches  # noqa: E402
from tandem.trainer.batch.planning import computed_tokens, plan_batch  # noqa: E402
from tandem.trainer.config import TrainerConfig  # noqa: E402
from tandem.trainer.learner import Learner  # noqa: E402
from tandem.trainer.models.loading import load_model  # noqa: E402
from tandem.trainer.models.shared_attention import SHARED_PROMPTS  # noqa: E402
from tandem.trainer.models.token_model import token_logprobs  # noqa: E402

BUDGET = 8192
NUM_ANSWERS = 8
WANTED_SAVING, MOST_OVER_PLAIN = 0.8, 1.05
MOST_DIFFERENCE = {"float32": 1e-5, "bfloat16": 0.02}
Groups = dict[str, TrajectoryGroup]
Lengths = Callable[[np.random.Generator], int]
WORKLOADS: dict[str, tuple[int, Lengths, Lengths]] = {
    "arithmetic": (32, lambda random: int(random.integers(8, 13)), lambda random: int(random.integers(3, 6))),
    "prompts": (8, lambda random: 256, lambda random: 32),
    "lognormal": (
        8,
        lambda random: int(random.integers(12, 21)),
        lambda random: int(np.clip(random.lognormal(4.2, 0.8), 1, 480)),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "shared_prompts.json")
    parser.add_argument("--backend", default="deepspeed")
    parser.add_argument("--dtype", default="float32", choices=MOST_DIFFERENCE)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--peak", nargs=3, metavar=("MODEL", "WORKLOAD", "PACKING"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"backend": arguments.backend, "dtype": arguments.dtype}
    if arguments.peak:
        print(_peak_bytes(*arguments.peak, settings))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden": arguments.hidden, "layers": arguments.layers}
        model = build_tiny_model(Path(folder) / "model", **sizes, initializer_range=0.02)
        learner = _learner(model, settings)
        found = {name: _measure(learner, model, name, arguments.rounds, settings) for name in WORKLOADS}
        device = torch.cuda.get_device_name() if learner.device.type == "cuda" else "one core"
        learner.close()
    command = " ".join(["python benchmarks/shared_prompts.py", *sys.argv[1:]])
    record = {"command": command, "device": device, "torch": torch.__version__, "workloads": found}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    prompts = found["prompts"]
    return int(
        prompts["saved_over_ideal"] < WANTED_SAVING
        or prompts["padded_over_plain"] > MOST_OVER_PLAIN
        or prompts["peak_memory_over_padded"] > 1.0
        or max(one["logprob_difference"] for one in found.values()) > MOST_DIFFERENCE[arguments.dtype]
    )


def _learner(model: Path, settings: dict[str, str]) -> Learner:
    stage = 0 if settings["backend"] == "deepspeed" and settings["dtype"] == "float32" else 3
    config = TrainerConfig(**settings, zero_stage=stage, learning_rate=1e-4, tokens_per_micro_batch=BUDGET)
    return Learner(config, model_path=str(model), total_batches=100, seed=0, max_response_tokens=480)


def _groups(workload: str) -> Groups:
    num_groups, prompt_tokens, answer_tokens = WORKLOADS[workload]
    random = np.random.default_rng(0)
    sampling = SamplingParameters()
    groups: Groups = {}
    for index in range(num_groups):
        prompt = random.integers(3, 98, prompt_tokens(random)).astype(np.int32)
        rows = []
        for number in range(NUM_ANSWERS):
            answer = random.integers(3, 98, answer_tokens(random)).astype(np.int32)
            loss_mask = np.repeat([0, 1], [len(prompt), len(answer)]).astype(np.uint8)
            span = VersionSpan(len(prompt), 1, 0)
            segment = Segment(
                np.concatenate([prompt, answer]), (-4.6 * loss_mask).astype(np.float32), loss_mask, (span,)
            )
            trajectory = Trajectory(number, "policy", (segment,), "stop", "", sampling)
            rows.append(ScoredTrajectory(trajectory, float(number % 2)))
        group = TrajectoryGroup(Prompt(0, index, prompt, NUM_ANSWERS, sampling), tuple(rows))
        groups[group.group_id] = group
    return groups


def _plan(groups: Groups, version: int, *packings: Packing) -> TrainBatch:
    return plan_batch(
        [header for group in groups.values() for header in group_headers(group)],
        list(groups),
        policy_version=version,
        incarnation=1,
        world_size=1,
        tokens_per_micro_batch=BUDGET,
        optimizer_steps=1,
        packings=packings,
    )


def _measure(learner: Learner, model: Path, workload: str, rounds: int, settings: dict[str, str]) -> dict[str, Any]:
    groups = _groups(workload)
    padded, shared = _plan(groups, 1, "padded"), _plan(groups, 1, "shared")
    ((*micro_batches,),) = rank_micro_batches(padded, groups, rank=0, device=learner.device)
    plain = load_model(model, settings["dtype"]).to(learner.device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    runs: dict[str, Callable[[], object]] = {
        "padded": lambda: learner.train(learner.prepare(padded, groups)),
        "shared": lambda: learner.train(learner.prepare(shared, groups)),
        "plain": lambda: _plain_step(plain, optimizer, micro_batches),
    }
    seconds: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        seconds.append({})
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if learner.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[-1][name] = time.perf_counter() - began
    seconds = seconds[1:]  # the first round warms up
    tokens = {"padded": computed_tokens(padded), "shared": computed_tokens(shared)}
    ideal = 1.0 - tokens["shared"] / tokens["padded"]
    found = {
        "tokens": tokens,
        "auto": _plan(groups, 1, *learner.packings).packing,
        "seconds": {name: round(median(one[name] for one in seconds), 4) for name in runs},
        "shared_over_padded": round(median(one["shared"] / one["padded"] for one in seconds), 3),
        "saved_over_ideal": round(median((1.0 - one["shared"] / one["padded"]) / ideal for one in seconds), 3),
        "padded_over_plain": round(median(one["padded"] / one["plain"] for one in seconds), 3),
        "logprob_difference": _logprob_difference(learner, plain, groups, padded, shared),
    }
    if workload == "prompts":
        peaks = {packing: _peak_in_process(model, workload, packing, settings) for packing in ("padded", "shared")}
        found["peak_memory_mb"] = {packing: round(peak / 1e6, 1) for packing, peak in peaks.items()}
        found["peak_memory_over_padded"] = round(peaks["shared"] / peaks["padded"], 3)
    return found


def _plain_step(model: Any, optimizer: torch.optim.Optimizer, micro_batches: list[MicroBatch]) -> None:
    for batch in micro_batches:
        (-token_logprobs(model, batch).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def _logprob_difference(learner: Learner, model: Any, groups: Groups, *batches: TrainBatch) -> float:
    """The mean absolute difference of a token's log-prob between the two batches."""
    columns = []
    for batch in batches:
        ((*micro_batches,),) = rank_micro_batches(batch, groups, rank=0, device=learner.device)
        model.set_attn_implementation(SHARED_PROMPTS if batch.packing == "shared" else "sdpa")
        found = {(0, number): token_logprobs(model, one) for number, one in enumerate(micro_batches)}
        columns.append(BatchLayout.of(batch, rank=0).gather(found, device=learner.device))
    return float((columns[0] - columns[1]).abs().mean())


def _peak_in_process(model: Path, workload: str, packing: str, settings: dict[str, str]) -> int:
    command = [sys.executable, __file__, "--peak", str(model), workload, packing]
    command += [part for name, value in settings.items() for part in (f"--{name}", value)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.split()[-1])


def _peak_bytes(model: str, workload: str, packing: Packing, settings: dict[str, str]) -> int:
    learner = _learner(Path(model), settings)
    groups = _groups(workload)
    for version in (1, 2):
        learner.train(learner.prepare(_plan(groups, version, packing), groups))
    if learner.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
