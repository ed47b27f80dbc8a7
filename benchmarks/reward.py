"""Measures cost and robustness of the reward service. Each figure is a ratio within one run. Writes JSON.

    python benchmarks/reward.py [--parts calls security math code trouble memory] [--output FILE]

calls    Batches of 64 cheap items through `Score`, against an echo server for the same protobuf bytes and against calls
         of one item; and the latency of batches at half of the highest rate.
security Batches of 64 cheap items with TLS and a token, against the same service without.
math     10,000 answers, against math-verify in loops in as many processes as the service has workers.
code     1,000 programs with two tests each, and the time to take a sandbox from the warm pool.
trouble  Items of which one in ten hangs and one in ten kills its process: every other item gets its score, in bounded
         time.
memory   20,000 such items with a short time-out: the memory of the service and its workers after each 2,000, compared
         by medians of three measurements before half and before the end.

The exit code is 1 if a requirement is missed; the last lines name it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.reward_calls import measure_calls, measure_security  # noqa: E402
from benchmarks.service_process import reward_service  # noqa: E402
from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored  # noqa: E402
from tandem.services.clients import RewardClient  # noqa: E402

WORKERS = 2

FUNCTIONS = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "crash":
        os.kill(os.getpid(), 9)
    return float(solution_str == ground_truth)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "reward.json")
    arguments = parser.parse_args()
    record: dict[str, Any] = {}
    if arguments.output.exists():
        record = json.loads(arguments.output.read_text())
    record |= {"command": "python benchmarks/reward.py " + " ".join(sys.argv[1:]), "cores": os.cpu_count()}
    record.setdefault("parts", {})
    for part in arguments.parts:
        record["parts"][part] = found = PARTS[part]()
        print(f"{part}: " + ", ".join(f"{name} {_shown(value)}" for name, value in found.items()), flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    missed = [line for line, met in demands(record["parts"]) if not met]
    print("\n".join([f"written to {arguments.output}", *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def demands(parts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """The requirements for the measured parts, and whether each is met."""
    if found := parts.get("calls"):
        yield "batches of 64 reach 0.7 of the echo", found["share_of_echo"] >= 0.7
        yield "batches are 10 times as fast as single calls", found["times_single_calls"] >= 10.0
        yield "p99 within 5 times p50 at half load", found["p99_times_p50"] <= 5.0
    if found := parts.get("security"):
        yield "TLS and a token cost at most a tenth of the calls per second", found["share_of_plain"] >= 0.9
    if found := parts.get("math"):
        yield "math within 1.3 times of plain loops", found["times_plain_loops"] <= 1.3
        yield "every math item is scored", found["unscored"] == 0
        yield (
            "as many right answers as plain loops find",
            found["right_answers"] == found["right_answers_of_plain_loops"],
        )
    if found := parts.get("code"):
        yield "a sandbox in 30 ms in the median", found["sandbox_median_ms"] <= 30.0
        yield "every program has its right score", found["wrong_scores"] == 0
    if found := parts.get("trouble"):
        yield "every other item has its right score", found["wrong_scores"] == 0
        yield "within (hangs / workers) × time-out + 20 %", found["seconds"] <= found["bound_seconds"]
    if found := parts.get("memory"):
        yield "memory does not grow", found["growth_share"] <= 0.02
        yield "every one of 20,000 items has its right score or reason", found["wrong_scores"] == 0


# ---- math and code ----


def _math_items(number: int) -> list[ScoreItem]:
    rng = random.Random(1)
    items = []
    for _ in range(number):
        a, b, c = rng.randrange(1, 99), rng.randrange(2, 99), rng.randrange(1, 20)
        answer, truth = rng.choice(
            [
                (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{2 * a}}}{{{2 * b}}}"),
                (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}"),
                (rf"x^2+{a}x+{b}", rf"{b}+{a}x+x^2"),
                (rf"({a},{b})", rf"({a},{b + c})"),
                (f"{a / 4}", rf"\frac{{{a}}}{{4}}"),
            ]
        )
        items.append(ScoreItem("bench", f"After some steps we find $\\boxed{{{answer}}}$.", truth))
    return items


def _plain(pairs: list[tuple[str, str]]) -> float:
    """Scores the pairs with math-verify in this process; returns the sum."""
    from math_verify import parse, verify

    total = 0
    for solution, truth in pairs:
        gold = parse(f"${truth}$", parsing_timeout=None)
        total += verify(gold, parse(solution, parsing_timeout=None), timeout_seconds=None)
    return float(total)


def measure_math() -> dict[str, Any]:
    items = _math_items(10_000)
    pairs = [(item.solution, str(item.ground_truth)) for item in items]
    with ProcessPoolExecutor(WORKERS) as processes:
        list(processes.map(_plain, [pairs[:20]] * WORKERS))  # imports
        began = time.perf_counter()
        plain = sum(processes.map(_plain, [pairs[start::WORKERS] for start in range(WORKERS)]))
        plain_seconds = time.perf_counter() - began
    with reward_service(WORKERS, 'scorer = "math_verify"') as (address, _), RewardClient(address) as client:
        client.score(items[:64])
        began = time.perf_counter()
        scores = client.score(items, timeout_seconds=600.0)
        seconds = time.perf_counter() - began
    total = sum(score.value for score in scores if isinstance(score, Scored))
    return {
        "items_per_second": len(items) / seconds,
        "times_plain_loops": seconds / plain_seconds,
        "right_answers": total,
        "right_answers_of_plain_loops": plain,
        "unscored": sum(isinstance(score, Unscored) for score in scores),
    }


def measure_code() -> dict[str, Any]:
    from tandem.reward.sandbox.isolation import find_isolation
    from tandem.reward.sandbox.trial import sandboxes

    items = []
    for number in range(1000):
        right = number % 4 != 0
        program = f"a, b = map(int, input().split())\nprint(a {'+' if right else '-'} b)"
        tests = {"inputs": ["1 2", f"{number} 5"], "outputs": ["3", str(number + 5)]}
        items.append(ScoreItem("bench", f"```python\n{program}\n```", tests))
    with (
        reward_service(WORKERS, 'scorer = "code"\ntimeout_seconds = 30.0') as (address, _),
        RewardClient(address) as client,
    ):
        client.score(items[:4])
        began = time.perf_counter()
        scores = client.score(items, timeout_seconds=600.0)
        seconds = time.perf_counter() - began
    wrong = sum(score != Scored(float(n % 4 != 0), getattr(score, "breakdown", {})) for n, score in enumerate(scores))
    with closing(sandboxes((), False)) as pool:
        pool.take().close()
        waits = []
        for _ in range(200):
            time.sleep(0.05)  # about the time of a short program, in which the pool refills
            began = time.perf_counter()
            pool.take().close()
            waits.append(time.perf_counter() - began)
    return {
        "programs_per_second": len(items) / seconds,
        "wrong_scores": wrong,
        "isolation": find_isolation().name,
        "sandbox_median_ms": 1e3 * statistics.median(waits),
        "sandbox_p99_ms": 1e3 * sorted(waits)[int(0.99 * len(waits))],
    }


# ---- trouble ----


def _troubled(number: int) -> list[ScoreItem]:
    """Items of which one in ten hangs and one in ten kills its process."""
    kinds = ["hang", "crash", *("right", "wrong") * 4]
    return [ScoreItem("bench", kinds[n % 10], "right") for n in range(number)]


def _wrong(items: list[ScoreItem], scores: list[Score]) -> int:
    """The number of items with another score or reason than they should have."""
    values, reasons = {"right": 1.0, "wrong": 0.0}, {"hang": "timeout", "crash": "crashed"}
    return sum(
        score.value != values.get(item.solution)
        if isinstance(score, Scored)
        else score.reason != reasons.get(item.solution)
        for item, score in zip(items, scores, strict=True)
    )


@contextmanager
def _user_function(timeout: float) -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory(prefix="tandem-reward-") as folder:
        file = Path(folder) / "functions.py"
        file.write_text(FUNCTIONS)
        with reward_service(WORKERS, f'scorer = "{file}:compute_score"\ntimeout_seconds = {timeout}') as found:
            yield found


def measure_trouble() -> dict[str, Any]:
    timeout, items = 1.0, _troubled(400)
    hangs = sum(item.solution == "hang" for item in items)
    with _user_function(timeout) as (address, _), RewardClient(address) as client:
        client.score([ScoreItem("bench", "right", "right")] * 8)
        began = time.perf_counter()
        scores = client.score(items, timeout_seconds=300.0)
        seconds = time.perf_counter() - began
    return {
        "items": len(items),
        "hangs": hangs,
        "wrong_scores": _wrong(items, scores),
        "seconds": seconds,
        "bound_seconds": 1.2 * timeout * hangs / WORKERS,
    }


def measure_memory() -> dict[str, Any]:
    """Memory of the service and its workers in MiB. The time-out is short because 200 items of each 2,000 reach it."""
    items = _troubled(2000)
    with _user_function(0.2) as (address, pid), RewardClient(address) as client:
        sizes, wrong = [], 0
        for _ in range(10):
            wrong += _wrong(items, client.score(items, timeout_seconds=300.0))
            sizes.append(_mebibytes(pid))
    half, whole = (statistics.median(sizes[start : start + 3]) for start in (2, 7))  # a new worker is smaller
    return {
        "wrong_scores": wrong,
        "mib": sizes,
        "mib_after_10000": half,
        "mib_after_20000": whole,
        "growth_share": (whole - half) / half,
    }


def _mebibytes(pid: int) -> float:
    """Private memory of the process and its children except Redis, which rewrites its log at any time."""
    service = psutil.Process(pid)
    family = [one for one in (service, *service.children(recursive=True)) if "redis" not in one.name()]
    return sum(one.memory_full_info().uss for one in family) / (1 << 20)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
    return str(value)


PARTS = {
    "calls": measure_calls,
    "security": measure_security,
    "math": measure_math,
    "code": measure_code,
    "trouble": measure_trouble,
    "memory": measure_memory,
}

if __name__ == "__main__":
    sys.exit(main())
