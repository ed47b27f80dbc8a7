"""The bfloat16 learner on one GPU: model FLOP utilisation, phases, peak memory; and float32 against the CPU.

Floating-point operations are the model's: 2 a weight of a matrix and token in the forward pass (the output head only at
loss tokens) and 2·T²·width for the causal attention of a row of T tokens in each layer; twice as many in the backward
pass. What gradient checkpointing and chunked log-probs recompute is not counted.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.part import (
    PEAK_FLOPS,
    QWEN_1_5B,
    TINY,
    Outcome,
    device,
    matrix_rate,
    random_groups,
    relative_error,
    run_part,
    synchronize,
    write_model,
)
from tandem.protos.row_headers import group_headers
from tandem.protos.types import Packing, TrainBatch, TrajectoryGroup
from tandem.trainer.batch.planning import plan_batch
from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner

PROMPT_TOKENS = 256
MOST_UPDATE_ERROR = 1e-2
"""Of the weights' update in float32: AdamW divides by the gradient's size, so where it is nearly 0 rounding decides."""
MOST_NORM_ERROR = 1e-4
CHECKED_VERSIONS = 3
MOST_LEFT_BYTES = 1 << 30
"""Memory that a closed learner may leave allocated on the GPU."""
ROOT = Path(__file__).resolve().parents[2]


def main(outcome: Outcome, arguments: list[str]) -> None:
    """`SIZE BACKEND`, or `weights BACKEND FILE`: the run of which GPU and CPU are compared."""
    if arguments[0] == "weights":
        _train_small(arguments[1], Path(arguments[2]))
        return
    size, backend = arguments
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        if torch.cuda.is_available():
            _compare_with_cpu(outcome, backend, Path(folder))
        _measure_all(outcome, size, backend, Path(folder))


def _measure_all(outcome: Outcome, size: str, backend: str, folder: Path) -> None:
    shape = QWEN_1_5B if size == "full" else TINY
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    model = write_model(folder / "model", dtype=dtype, **shape)
    answers = [1024 if size == "full" else 32] * (64 if size == "full" else 8)
    product = matrix_rate()
    rows, peaks = [], []
    budgets = [(False, 8192), (True, 32768)] if size == "full" else [(False, 1024), (True, 1024)]
    for checkpointing, budget in budgets:
        config = TrainerConfig(
            backend=backend,
            zero_stage=3,
            dtype=dtype,
            gradient_checkpointing=checkpointing,
            tokens_per_micro_batch=budget,
        )
        found = _measure(config, model, shape, answers)
        rates = [found["flops"] / found[name] for name in ("forward_backward", "batch")]
        outcome.require(found["grad_norm"] > 0, f"{backend}: the gradient norm is {found['grad_norm']}")
        outcome.require(found["left"] < MOST_LEFT_BYTES, f"{backend}: {found['left']} bytes remain after close()")
        peaks.append(found["peak"])
        rows.append(
            [
                "on" if checkpointing else "off",
                budget,
                found["packing"],
                f"{found['forward_backward']:.2f}",
                f"{found['step']:.2f}",
                f"{found['tokens'] / found['batch']:,.0f}",
                *(_utilisation(rate, product) for rate in rates),
                f"{found['peak'] / 2**30:.1f}",
            ]
        )
    if torch.cuda.is_available():
        outcome.require(peaks[1] < peaks[0], "gradient checkpointing does not lower the peak memory")
    outcome.lines.append(
        f"{backend}, {dtype}, {found['parameters'] / 1e9:.2f} B parameters, batches of {len(answers)} rows of "
        f"{PROMPT_TOKENS} + {answers[0]} tokens, medians of 3 batches after a warm-up. Utilisation (MFU) is of the "
        f"datasheet's rate, in brackets of the {product / 1e12:.0f} TFLOP/s that a matrix product of 8192³ reached."
    )
    outcome.table(
        (
            *("checkpointing", "tokens/pass", "packing", "both passes s", "step s", "tokens/s"),
            *("MFU of these", "of the batch", "peak GiB"),
        ),
        rows,
    )


def _utilisation(rate: float, product: float) -> str:
    peaks = [peak for name, peak in PEAK_FLOPS.items() if device().type == "cuda" and name in _device_name()]
    of_datasheet = f"{rate / peaks[0]:.1%}" if peaks else f"{rate / 1e12:.2f} TFLOP/s"
    return f"{of_datasheet} ({rate / product:.1%})"


def _device_name() -> str:
    return torch.cuda.get_device_name(0)


def _measure(config: TrainerConfig, model: Path, shape: dict[str, Any], answers: list[int]) -> dict[str, Any]:
    """Medians over three batches, after one that is not counted."""
    learner = _learner(config, model, max(answers))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times: list[tuple[float, float]] = []
    norm = 0.0
    for version in range(1, 5):
        groups = random_groups(
            answers, num_samples=8, prompt_length=PROMPT_TOKENS, vocabulary=shape["vocab_size"], seed=version
        )
        batch, by_id = _batch(groups, version, config.tokens_per_micro_batch, learner.packings[0])
        ends: list[float] = []

        def before_step(ends: list[float] = ends) -> None:
            synchronize()
            ends.append(time.perf_counter())

        synchronize()
        began = time.perf_counter()
        norm = float(learner.train(learner.prepare(batch, by_id), before_step).metrics["grad_norm"])
        synchronize()
        times.append((ends[0] - began, time.perf_counter() - ends[0]))
    _print_profile(learner, shape, config)
    specs = learner.parameter_specs()
    found: dict[str, Any] = {
        "packing": learner.packings[0],
        "parameters": sum(_numel(one) for _, _, one in specs),
        "grad_norm": norm,
        "forward_backward": sorted(one for one, _ in times[1:])[1],
        "step": sorted(one for _, one in times[1:])[1],
        "batch": sorted(sum(one) for one in times[1:])[1],
        "tokens": sum(answers) + PROMPT_TOKENS * len(answers),
        "flops": 3 * _forward_flops(shape, [PROMPT_TOKENS + one for one in answers], sum(answers)),
        "peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }
    learner.close()
    del learner
    gc.collect()
    torch.cuda.empty_cache()
    return found | {"left": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0}


def _print_profile(learner: Learner, shape: dict[str, Any], config: TrainerConfig) -> None:
    """Prints the kernels that take most time in a batch of one micro-batch."""
    if not torch.cuda.is_available():
        return
    rows = max(1, config.tokens_per_micro_batch // (PROMPT_TOKENS + 1024))
    groups = random_groups(
        [1024] * rows, num_samples=rows, prompt_length=PROMPT_TOKENS, vocabulary=shape["vocab_size"], seed=9
    )
    batch, by_id = _batch(groups, 9, config.tokens_per_micro_batch, learner.packings[0])
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        learner.train(learner.prepare(batch, by_id))
        synchronize()
    print(f"{config.backend}, checkpointing {config.gradient_checkpointing}, one micro-batch of {rows} rows:")
    kernels = [one for one in profile.key_averages() if one.device_type == torch.autograd.DeviceType.CUDA]
    for one in sorted(kernels, key=lambda one: -one.self_device_time_total)[:12]:
        print(f"{one.self_device_time_total / 1000:9.1f} ms {one.count:6d} × {one.key[:90]}", flush=True)


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for one in shape:
        product *= one
    return product


def _forward_flops(shape: dict[str, Any], row_lengths: list[int], num_loss_tokens: int) -> float:
    hidden, heads = shape["hidden"], shape["num_attention_heads"]
    shared = hidden // heads * shape["num_key_value_heads"]
    weights = shape["layers"] * (2 * hidden * hidden + 2 * hidden * shared + 3 * hidden * shape["intermediate_size"])
    attention = sum(2 * length**2 * hidden * shape["layers"] for length in row_lengths)
    return 2.0 * weights * sum(row_lengths) + attention + 2.0 * hidden * shape["vocab_size"] * num_loss_tokens


def _batch(
    groups: list[TrajectoryGroup], version: int, budget: int, packing: Packing
) -> tuple[TrainBatch, dict[str, TrajectoryGroup]]:
    by_id = {group.group_id: group for group in groups}
    batch = plan_batch(
        [header for group in groups for header in group_headers(group)],
        list(by_id),
        policy_version=version,
        incarnation=1,
        world_size=1,
        tokens_per_micro_batch=budget,
        optimizer_steps=1,
        packings=[packing],
    )
    return batch, by_id


def _learner(config: TrainerConfig, model: Path, max_response_tokens: int) -> Learner:
    return Learner(config, model_path=str(model), total_batches=10, seed=0, max_response_tokens=max_response_tokens)


def _compare_with_cpu(outcome: Outcome, backend: str, folder: Path) -> None:
    """Trains a small model in float32 on the GPU and, in a process that sees none, on the CPU."""
    found = []
    for place, hidden in (("gpu", {}), ("cpu", {"CUDA_VISIBLE_DEVICES": ""})):
        file = folder / f"{place}.pt"
        command = [sys.executable, "-m", "benchmarks.gpu.learner", os.devnull, "weights", backend, str(file)]
        environment = {**os.environ, **hidden}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=200)
        found.append((torch.load(file, weights_only=True), json.loads(file.with_suffix(".json").read_text())))
    (gpu, gpu_norms), (cpu, cpu_norms) = found
    start = torch.load(folder / "cpu.start.pt", weights_only=True)
    joined = [torch.cat([(weights[name] - start[name]).flatten() for name in start]) for weights in (gpu, cpu)]
    update_error = relative_error(*joined)
    norm_error = max(abs(one - other) / other for one, other in zip(gpu_norms, cpu_norms, strict=True))
    outcome.lines.append(
        f"{backend}, float32, {CHECKED_VERSIONS} batches of a small model: the gradient norms differ by at most "
        f"{norm_error:.1e} between GPU and CPU (limit {MOST_NORM_ERROR:.0e}), the weights' updates by "
        f"{update_error:.1e} of their norm (limit {MOST_UPDATE_ERROR:.0e})."
    )
    outcome.require(norm_error <= MOST_NORM_ERROR, f"{backend}: gradient norms differ by {norm_error:.1e}")
    outcome.require(update_error <= MOST_UPDATE_ERROR, f"{backend}: updates differ by {update_error:.1e}")


def _train_small(backend: str, file: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = file.parent / "small"
    if not model.exists():
        write_model(model, dtype="float32", **TINY)
    learner = _learner(TrainerConfig(backend=backend, learning_rate=1e-4, num_threads=8), model, 64)
    if not torch.cuda.is_available():
        torch.save(_weights(learner), file.with_suffix(".start.pt"))
    norms = []
    for version in range(1, CHECKED_VERSIONS + 1):
        answers = [16 + 4 * number for number in range(16)]
        groups = random_groups(answers, num_samples=8, prompt_length=24, vocabulary=1024, seed=version)
        norms.append(
            learner.train(learner.prepare(*_batch(groups, version, 512, learner.packings[0]))).metrics["grad_norm"]
        )
    torch.save(_weights(learner), file)
    file.with_suffix(".json").write_text(json.dumps(norms))


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    names = [name for name, _, _ in learner.parameter_specs()]
    with learner.gather(names) as weights:
        return {name: weights[name].detach().cpu().clone() for name in names}


if __name__ == "__main__":
    run_part(main)
