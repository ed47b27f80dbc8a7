"""What the reward service costs and withstands, each figure as a ratio within one run. Writes JSON.

    python benchmarks/reward.py [--parts calls math code trouble memory] [--output benchmarks/records/reward.json]

calls    batches of 64 cheap items through `Score` against a raw echo of the same protobuf bytes on the same kind of
server, against
         one item a call, and the latency of batches that come at half the most the service can do
math     10,000 answers through the service against math-verify in plain loops, as many processes as the service has
workers code     1,000 programs with two tests each; what taking a sandbox from the warm pool costs trouble  items of
which one in ten hangs and one in ten kills its process: every other one gets its right score, and in what time memory
20,000 such items with a short time-out: the service's memory, its workers' included, after each 2,000; medians of three
         looks up to half and up to all of them

Exit code 1 if a demand of the project is not met; the last lines say which.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.protos import reward_pb2, reward_pb2_grpc  # noqa: E402
from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored  # noqa: E402
from tandem.services.clients import RewardClient  # noqa: E402
from tandem.services.rpc.client import connect_async  # noqa: E402

PARTS = ("calls", "math", "code", "trouble", "memory")
WORKERS = 2
BATCH, IN_FLIGHT = 64, 8
ROUNDS, CALLS = 25, 500
WINDOWS, WINDOW_CALLS = 45, 800

FUNCTIONS = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "crash":
        os.kill(os.getpid(), 9)
    return float(solution_str == ground_truth)
"""

ECHO = """
import asyncio, sys
import grpc
from tandem.protos import reward_pb2

async def echo(request, context):
    return request

async def main():
    server = grpc.aio.server()
    kind = reward_pb2.ScoreRequest
    handler = grpc.unary_unary_rpc_method_handler(echo, kind.FromString, kind.SerializeToString)
    service = grpc.method_handlers_generic_handler("tandem.v1.RewardService", {"Score": handler})
    server.add_generic_rpc_handlers([service])
    print("reward: listens on 127.0.0.1:%d" % server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "reward.json")
    arguments = parser.parse_args()
    record: dict[str, Any] = {}
    if arguments.output.exists():
        record = json.loads(arguments.output.read_text())
    record |= {"command": "python benchmarks/reward.py " + " ".join(sys.argv[1:]), "cores": os.cpu_count()}
    record.setdefault("parts", {})
    for part in arguments.parts:
        record["parts"][part] = found = globals()[f"measure_{part}"]()
        print(f"{part}: " + ", ".join(f"{name} {_shown(value)}" for name, value in found.items()), flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    missed = [line for line, met in demands(record["parts"]) if not met]
    print("\n".join([f"written to {arguments.output}", *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def demands(parts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Every demand on the parts that were measured, and whether it is met."""
    if found := parts.get("calls"):
        yield "batches of 64 reach 0.7 of the echo", found["share_of_echo"] >= 0.7
        yield "batches are 10 times as fast as single calls", found["times_single_calls"] >= 10.0
        yield "p99 within 5 times p50 at half load", found["p99_times_p50"] <= 5.0
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


# ---- calls ----


def measure_calls() -> dict[str, Any]:
    """Medians over rounds, in which echo and service take turns, of rates in items a second and of their ratios.

    Latencies likewise, over windows: a machine that stands still for a moment spoils a window, and not the median of
    all.
    """
    rng = random.Random(0)
    texts = [" ".join(f"word{rng.randrange(1000)}" for _ in range(60)) + f"\n{n}" for n in range(BATCH)]
    items = [
        reward_pb2.ScoreRequest.Item(data_source="bench", solution=text, ground_truth=json.dumps(str(n)))
        for n, text in enumerate(texts)
    ]
    batch, single = reward_pb2.ScoreRequest(items=items), reward_pb2.ScoreRequest(items=items[:1])
    with _service('scorer = "exact"\narguments = { last_line = true }') as (address, _), _echo() as echo_address:
        rounds = asyncio.run(_rates(address, echo_address, batch, single))
        rate = statistics.median(one["score"] for one in rounds)
        windows = [sorted(one) for one in asyncio.run(_half_load(address, batch, rate / BATCH / 2))]
    return {
        "batch_bytes": batch.ByteSize(),
        "items_per_second": rate,
        "share_of_echo": statistics.median(one["score"] / one["echo"] for one in rounds),
        "times_single_calls": statistics.median(one["score"] / one["single"] for one in rounds),
        "p50_ms": 1e3 * statistics.median(one[len(one) // 2] for one in windows),
        "p99_ms": 1e3 * statistics.median(one[int(0.99 * len(one))] for one in windows),
        "p99_times_p50": statistics.median(one[int(0.99 * len(one))] / one[len(one) // 2] for one in windows),
    }


async def _rates(
    address: str, echo_address: str, batch: reward_pb2.ScoreRequest, single: reward_pb2.ScoreRequest
) -> dict[str, float]:
    async with connect_async(address) as channel, connect_async(echo_address) as echo_channel:
        kind = reward_pb2.ScoreRequest
        score = reward_pb2_grpc.RewardServiceStub(channel).Score
        echo = echo_channel.unary_unary("/tandem.v1.RewardService/Score", kind.SerializeToString, kind.FromString)
        reply = await score(batch, timeout=10.0)
        assert all(item.scored.value == 1.0 for item in reply.items), "every answer is right"
        calls: dict[str, tuple[Callable[..., Awaitable[Any]], Any, int]] = {
            "echo": (echo, batch, CALLS),
            "score": (score, batch, CALLS),
            "single": (score, single, CALLS),
        }
        rounds: list[dict[str, float]] = []
        for _ in range(ROUNDS + 1):
            rounds.append({})
            for name, (call, request, number) in calls.items():
                rounds[-1][name] = len(request.items) * number / await _seconds(call, request, number)
        return rounds[1:]  # the first one warms up


async def _seconds(call: Callable[..., Awaitable[Any]], request: Any, number: int) -> float:
    left = iter(range(number))

    async def caller() -> None:
        for _ in left:
            await call(request, timeout=30.0)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
    return time.perf_counter() - began


async def _half_load(address: str, batch: reward_pb2.ScoreRequest, rate: float) -> list[list[float]]:
    """Latencies in seconds of calls that begin `rate` times a second, however long they take; window by window, the
    first left out.
    """
    windows: list[list[float]] = [[] for _ in range(WINDOWS + 1)]
    async with connect_async(address) as channel:
        score = reward_pb2_grpc.RewardServiceStub(channel).Score

        async def one(number: int) -> None:
            began = time.perf_counter()
            await score(batch, timeout=30.0)
            windows[number // WINDOW_CALLS].append(time.perf_counter() - began)

        under_way: set[asyncio.Task[None]] = set()
        gc.freeze()  # what this process has imported is none of the service's latency
        began = time.perf_counter()
        for number in range(len(windows) * WINDOW_CALLS):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            task = asyncio.create_task(one(number))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)
    return windows[1:]


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
    """What a loop of its own would do, in this process; the sum of its scores."""
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
    with _service('scorer = "math_verify"') as (address, _), RewardClient(address) as client:
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
    from tandem.reward.sandbox.trial import sandboxes

    items = []
    for number in range(1000):
        right = number % 4 != 0
        program = f"a, b = map(int, input().split())\nprint(a {'+' if right else '-'} b)"
        tests = {"inputs": ["1 2", f"{number} 5"], "outputs": ["3", str(number + 5)]}
        items.append(ScoreItem("bench", f"```python\n{program}\n```", tests))
    with _service('scorer = "code"\ntimeout_seconds = 30.0') as (address, _), RewardClient(address) as client:
        client.score(items[:4])
        began = time.perf_counter()
        scores = client.score(items, timeout_seconds=600.0)
        seconds = time.perf_counter() - began
    wrong = sum(score != Scored(float(n % 4 != 0), getattr(score, "breakdown", {})) for n, score in enumerate(scores))
    with closing(sandboxes((), False)) as pool:
        pool.take().close()
        waits = []
        for _ in range(200):
            time.sleep(0.05)  # as long as a short program runs: the pool fills up meanwhile
            began = time.perf_counter()
            pool.take().close()
            waits.append(time.perf_counter() - began)
        isolation = pool.isolation
    return {
        "programs_per_second": len(items) / seconds,
        "wrong_scores": wrong,
        "isolation": isolation,
        "sandbox_median_ms": 1e3 * statistics.median(waits),
        "sandbox_p99_ms": 1e3 * sorted(waits)[int(0.99 * len(waits))],
    }


# ---- trouble ----


def _troubled(number: int) -> list[ScoreItem]:
    """One in ten hangs for ever, one in ten kills its process."""
    kinds = ["hang", "crash", *("right", "wrong") * 4]
    return [ScoreItem("bench", kinds[n % 10], "right") for n in range(number)]


def _wrong(items: list[ScoreItem], scores: list[Score]) -> int:
    """How many have neither the score nor the reason that is theirs."""
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
        with _service(f'scorer = "{file}:compute_score"\ntimeout_seconds = {timeout}') as found:
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
    """MiB of the service and its workers; the time-out is short, for 2,000 items wait for its end."""
    items = _troubled(2000)
    with _user_function(0.2) as (address, pid), RewardClient(address) as client:
        sizes, wrong = [], 0
        for _ in range(10):
            wrong += _wrong(items, client.score(items, timeout_seconds=300.0))
            sizes.append(_mebibytes(pid))
    half, whole = (
        statistics.median(sizes[2:5]),
        statistics.median(sizes[7:10]),
    )  # a worker that has just begun is smaller
    return {
        "wrong_scores": wrong,
        "mib": sizes,
        "mib_after_10000": half,
        "mib_after_20000": whole,
        "growth_share": (whole - half) / half,
    }


def _mebibytes(pid: int) -> float:
    """Private memory of the process and its children, Redis left out: its log is rewritten when it likes."""
    service = psutil.Process(pid)
    family = [one for one in (service, *service.children(recursive=True)) if "redis" not in one.name()]
    return sum(one.memory_full_info().uss for one in family) / (1 << 20)


# ---- processes ----


@contextmanager
def _service(recipe: str) -> Iterator[tuple[str, int]]:
    """A reward service with these lines in `[reward]`: its address and process id."""
    with tempfile.TemporaryDirectory(prefix="tandem-reward-") as folder:
        file = Path(folder) / "service.toml"
        file.write_text(f"[reward]\nnum_workers = {WORKERS}\n{recipe}\n")
        command = [sys.executable, "-m", "tandem.services.cli", "reward", "serve", str(file)]
        with _listening([*command, "--port", "0", "--folder", f"{folder}/redis"]) as found:
            yield found


@contextmanager
def _echo() -> Iterator[str]:
    with _listening([sys.executable, "-c", ECHO]) as (address, _):
        yield address


@contextmanager
def _listening(command: list[str]) -> Iterator[tuple[str, int]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        try:
            said: list[str] = []
            for line in process.stdout:
                said.append(line)
                if "listens on " in line:
                    break
            else:
                raise SystemExit(f"{' '.join(command)} did not start:\n{''.join(said)}")
            yield line.rpartition(" ")[2].strip(), process.pid
        finally:
            process.terminate()
            try:
                process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                process.kill()


def _shown(value: Any) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and value < 100
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    sys.exit(main())
