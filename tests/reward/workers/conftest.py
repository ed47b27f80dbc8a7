"""Pools of worker processes, and a scorer whose every answer misbehaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.config import LimitsConfig, RewardConfig
from tandem.reward.registry import ScorerSpec, make_spec
from tandem.reward.workers.launcher_process import Launchers
from tandem.reward.workers.pool import ScorerPool

Make = Callable[..., ScorerPool]

TROUBLE = r"""
import hashlib, os, pathlib, re, signal, subprocess, sys, threading, time

kept = []

def compute_score(data_source, solution_str, ground_truth, extra_info):
    what, _, place = solution_str.partition(": ")
    match what:
        case "wait":
            pathlib.Path(place).touch()
            time.sleep(600)
        case "stop the launcher":
            os.kill(os.getppid(), signal.SIGSTOP)
        case "kill the launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        case "hang":
            time.sleep(600)
        case "spin":  # holds the interpreter's lock for ever
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "burn":  # four threads, most of it without the interpreter's lock: more processor time than wall time
            burn = lambda: [hashlib.sha256(bytes(1 << 20)) for _ in range(10**6)]
            [threading.Thread(target=burn).start() for _ in range(3)]
            burn()
        case "exit":
            print("no way on", file=sys.stderr, flush=True)
            os._exit(3)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "print":
            print("spoken by the scorer")
        case "chat":
            for _ in range(5000):
                print("a line that is quite long, " * 4)
        case "pid":
            return os.getpid()
        case "child":
            return subprocess.Popen(["sleep", "600"]).pid
        case "daemon":  # leaves its session and its parent
            command = "import os, subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
            started = subprocess.run([sys.executable, "-c", command], capture_output=True, start_new_session=True)
            return int(started.stdout)
        case "children":
            for _ in range(20):
                subprocess.Popen(["sleep", "600"])
            time.sleep(600)
        case "bomb":
            while True:
                os.fork()
        case "memory":
            return len(b"1" * (1 << 40))
        case "leak":
            kept.append(bytearray(16 << 20))
        case "files":
            return len([open("/dev/null") for _ in range(10_000)])
        case "babble":
            while True:
                print("word " * 1000)
        case "large":
            return {"score": 1.0, "x" * (2 << 20): 1.0}
    return float(solution_str == ground_truth)


def together(data_sources, solution_strs, ground_truths, extra_infos):
    if "raise" in solution_strs:
        raise KeyError("raise")
    for text in solution_strs:
        if text != "length":
            compute_score("", text, "", {})
    if "length" in solution_strs:
        return [1.0]
    return [{"score": float(s == g), "batch": len(solution_strs)} for s, g in zip(solution_strs, ground_truths)]
"""


ONE = Scored(1.0)


def items(*solutions: str) -> list[ScoreItem]:
    return [ScoreItem("test", solution, "1") for solution in solutions]


def reason(score: Score) -> str:
    assert isinstance(score, Unscored), score
    return score.reason


def value(score: Score) -> int:
    assert isinstance(score, Scored), score
    return int(score.value)


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("trouble") / "trouble.py"
    file.write_text(TROUBLE)
    return f"{file}:compute_score"


@pytest.fixture(scope="module")
def spec(trouble: str) -> ScorerSpec:
    return make_spec(trouble, {})


@pytest.fixture(scope="module")
def pool() -> Iterator[ScorerPool]:
    """One worker with default limits and much time, for tests that leave the pool usable."""
    made = ScorerPool(RewardConfig(timeout_seconds=60.0))
    yield made
    made.close()


@pytest.fixture
def launchers() -> Iterator[Launchers]:
    made = Launchers(RewardConfig())
    yield made
    made.close()


@pytest.fixture
def make_pool() -> Iterator[Make]:
    pools: list[ScorerPool] = []

    def make(num_workers: int = 1, timeout_seconds: float = 60.0, **limits: Any) -> ScorerPool:
        config = RewardConfig(num_workers=num_workers, timeout_seconds=timeout_seconds, limits=LimitsConfig(**limits))
        pools.append(ScorerPool(config))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
