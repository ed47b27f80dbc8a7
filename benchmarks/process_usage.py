"""Runs a command and samples the CPU time and memory of its process and of all processes below it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    time: float
    """Seconds since 1970."""
    cpu_seconds: float
    """CPU time of all processes until now, of those that have ended up to their last sample."""
    memory_bytes: Mapping[str, int]
    """Proportional set size (PSS) by kind of process: memory that processes share is counted once in their sum."""


def run_measured(
    command: Sequence[str], environment: Mapping[str, str], log: Path, deadline_seconds: float
) -> list[Sample]:
    """Runs the command with its output in `log`. Raises SystemExit if it fails or passes the deadline."""
    samples: list[Sample] = []
    cpu_seconds: dict[int, float] = {}
    ends = time.monotonic() + deadline_seconds
    with log.open("w") as output:
        process = subprocess.Popen(command, env=dict(environment), stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() < ends:
                samples.append(_sample(process.pid, cpu_seconds))
                _wait(process, min(INTERVAL_SECONDS, max(0.0, ends - time.monotonic())))
        finally:
            if process.poll() is None:
                process.terminate()
                _wait(process, 60.0)
                process.kill()
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}:\n{log.read_text()[-3000:]}")
    return samples


def peak_memory(samples: Sequence[Sample]) -> int:
    """The largest sum over the processes at one time, in bytes."""
    return max(sum(sample.memory_bytes.values()) for sample in samples)


def peaks(samples: Sequence[Sample]) -> dict[str, int]:
    """The largest memory of each kind of process, in bytes."""
    kinds = sorted({kind for sample in samples for kind in sample.memory_bytes})
    return {kind: max(sample.memory_bytes.get(kind, 0) for sample in samples) for kind in kinds}


def cpu_at(samples: Sequence[Sample], moment: float) -> float:
    """CPU seconds used until this time, interpolated between samples."""
    before = [sample for sample in samples if sample.time <= moment]
    after = [sample for sample in samples if sample.time > moment]
    if not before or not after:
        return (before[-1] if before else after[0]).cpu_seconds
    first, second = before[-1], after[0]
    share = (moment - first.time) / (second.time - first.time)
    return first.cpu_seconds + share * (second.cpu_seconds - first.cpu_seconds)


def kind_of(command: Sequence[str]) -> str:
    """What a process is called: the service of `tandem serve`, or its program."""
    if "serve" in command and command.index("serve") + 1 < len(command):
        return command[command.index("serve") + 1]
    return Path(command[0].split()[0]).name if command and command[0] else "other"


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _sample(root: int, cpu_seconds: dict[int, float]) -> Sample:
    memory: dict[str, int] = {}
    for process in _tree(root):
        try:
            times = process.cpu_times()
            cpu_seconds[process.pid] = times.user + times.system
            kind = kind_of(process.cmdline())
            memory[kind] = memory.get(kind, 0) + process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # it has just ended
    return Sample(time.time(), sum(cpu_seconds.values()), memory)


def _tree(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
