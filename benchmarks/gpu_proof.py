"""Runs what the machine's GPUs can show and writes a record: python benchmarks/gpu_proof.py [--parts NAME…]

Every part runs in a process of its own with a deadline. It is skipped, with the reason, if the machine lacks what it
needs. No part needs the network. The exit code is 1 if a part failed. `--size tiny` runs small shapes, on a CPU too
where a part can, to test the parts themselves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.machine import Machine, probe_machine  # noqa: E402

RECORD = ROOT / "benchmarks" / "records" / "gpu.md"
MOST_RECORD_LINES = 200


@dataclass(frozen=True)
class Part:
    """One process: `python -m benchmarks.gpu.<module> RESULT SIZE *arguments`."""

    name: str
    title: str
    module: str
    deadline_seconds: float
    arguments: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    num_gpus: int = 1
    tiny_on_cpu: bool = False
    """Whether it can run on a CPU at `--size tiny`."""


@dataclass
class Result:
    part: Part
    verdict: str
    """ran, FAILED, or skipped."""
    reason: str = ""
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)


RING_PACKAGES = ("deepspeed", "grpc", "grpc_health", "redis", "pydantic", "typer", "peft", "pyarrow", "psutil")
PARTS = (
    Part("ring", "A run on one GPU", "ring", 240, ("transformers",), packages=RING_PACKAGES, tiny_on_cpu=True),
    Part(
        "ring-vllm",
        "A run on one GPU with vLLM",
        "ring",
        300,
        ("vllm",),
        packages=(*RING_PACKAGES, "vllm"),
        tiny_on_cpu=True,
    ),
    Part("tests", "Tests marked `gpu`", "marked_tests", 240, ("gpu",), packages=("pytest", "pytest_timeout")),
    Part(
        "learner-deepspeed",
        "The learner, DeepSpeed",
        "learner",
        400,
        ("deepspeed",),
        packages=("deepspeed",),
        tiny_on_cpu=True,
    ),
    Part("shared", "Attention over shared prompts", "shared_prompts", 180),
    Part("ipc", "Weights by CUDA IPC between two processes", "weights_ipc", 180),
    Part("nccl", "Weights by NCCL between two GPUs", "marked_tests", 240, ("nccl",), packages=("pytest",), num_gpus=2),
    Part("logprobs", "Log-probs by chunks of the head", "logprobs", 120, tiny_on_cpu=True),
    Part("learner-fsdp", "The learner, FSDP", "learner", 400, ("fsdp",), tiny_on_cpu=True),
    Part("attention", "Variable-length attention", "attention", 300),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], metavar="NAME", help="only these")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--output", type=Path, help="by default benchmarks/records/gpu.md, if any part ran")
    arguments = parser.parse_args()
    machine = probe_machine()
    results = []
    for part in PARTS:
        if arguments.parts and part.name not in arguments.parts:
            continue
        result = run_part(part, machine, arguments.size)
        results.append(result)
        print(f"{part.name}: {result.verdict} in {result.seconds:.0f} s {result.reason}", flush=True)
        record = "\n".join(record_lines(machine, results)) + "\n"
        if arguments.output or any(result.verdict != "skipped" for result in results):
            (arguments.output or RECORD).write_text(record, encoding="utf-8")  # now: a long part may lose the rest
    print(record)
    return int(any(result.verdict == "FAILED" for result in results))


def run_part(part: Part, machine: Machine, size: str) -> Result:
    """Runs the part's process, unless the machine lacks what it needs."""
    num_gpus = 0 if part.tiny_on_cpu and size == "tiny" else part.num_gpus
    if lacks := machine.lacks(num_gpus, part.packages):
        return Result(part, "skipped", lacks)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", f"benchmarks.gpu.{part.module}", str(file), size, *part.arguments]
        try:
            done = subprocess.run(
                command, cwd=ROOT, timeout=part.deadline_seconds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except subprocess.TimeoutExpired as ended:
            output = (ended.stdout or b"").decode(errors="replace")
            return _failed(part, f"no end within {part.deadline_seconds:.0f} s", began, output)
        output = done.stdout.decode(errors="replace")
        if done.returncode or not file.exists():
            return _failed(part, f"exit code {done.returncode}", began, output)
        print(output, flush=True)
        outcome = json.loads(file.read_text())
    if outcome["failures"]:
        reason = "; ".join(outcome["failures"])
        return Result(part, "FAILED", reason, time.monotonic() - began, outcome["lines"])
    return Result(part, "ran", "", time.monotonic() - began, outcome["lines"])


def _failed(part: Part, reason: str, began: float, output: str) -> Result:
    print(output, flush=True)
    last = [line.strip() for line in output.splitlines() if line.strip()][-1:]
    return Result(part, "FAILED", ": ".join([reason, *last]), time.monotonic() - began)


def record_lines(machine: Machine, results: Sequence[Result]) -> list[str]:
    """The record's lines."""
    lines = [
        "# What the GPUs of one machine showed",
        "",
        f"Written by `make gpu-proof` (benchmarks/gpu_proof.py) on {date.today().isoformat()}.",
        "",
        *machine.lines(),
        "",
        "| part | result | seconds |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {result.part.title} | {result.verdict} | {result.seconds:.0f} |" for result in results]
    for result in results:
        reason = [f"{result.verdict}: {result.reason}"] if result.reason else []
        if reason or result.lines:
            lines += ["", f"## {result.part.title}", "", *reason, *result.lines]
    lines = [short for line in lines for short in _wrapped(line)]
    collapsed = [line for line, before in zip(lines, ["", *lines], strict=False) if line or before]
    assert len(collapsed) <= MOST_RECORD_LINES, len(collapsed)
    return collapsed


def _wrapped(line: str) -> list[str]:
    """The line in parts of at most 120 columns; rows of tables stay whole."""
    if line.startswith("|"):
        return [line]
    return textwrap.wrap(line, 120, subsequent_indent="  " if line.startswith("- ") else "") or [""]


if __name__ == "__main__":
    sys.exit(main())
