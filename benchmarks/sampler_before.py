"""Compares the rollout service with that of another checkout, for single answers, and writes JSON.

    python benchmarks/sampler_before.py CHECKOUT [--rounds 12] [--output benchmarks/records/sampler_before.json]

CHECKOUT is a folder with another commit, such as one of `git worktree add`, and its own `.venv`. Both services sample
answers of 4, 64 and 240 tokens in turns, first the one and then the other, as benchmarks/sampler.py of their checkout
measures them. If the other commit's file has a consumer that polls, which slows down the engine, give it this
checkout's. Every ratio is one of two neighbouring measurements, and the record has the medians over the rounds. Run it
on an otherwise idle machine. The exit code is 1 if this checkout is more than 3 % slower at any length.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROUPS = {4: 400, 64: 64, 240: 24}
"""Groups of a measurement, by the length of their answers: each takes about ten seconds."""
LEAST = 1 / 1.03
_READY = "ready"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "sampler_before.json")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        _answer(arguments.checkout)
        return 0
    with ExitStack() as stack:
        before, now = (stack.enter_context(_service(folder)) for folder in (arguments.checkout.resolve(), ROOT))
        for service in (before, now):
            _measure(service, min(GROUPS))  # warms up
        rounds = {length: [] for length in GROUPS}
        for number in range(arguments.rounds):
            for length, done in rounds.items():
                order = (before, now) if number % 2 == 0 else (now, before)
                measured = {service: _measure(service, length) for service in order}
                done.append((measured[before], measured[now]))
                words = " and ".join(f"{rate:.0f} tokens/s at {cost:.0f} µs" for rate, cost in done[-1])
                print(f"round {number + 1}, {length} tokens, before and now: {words}", flush=True)
    results = {
        length: {
            "tokens_per_second": [round(statistics.median(one[side][0] for one in done)) for side in (0, 1)],
            "tokens_per_second_over_before": round(statistics.median(new[0] / old[0] for old, new in done), 3),
            "cpu_per_token_over_before": round(statistics.median(new[1] / old[1] for old, new in done), 3),
        }
        for length, done in rounds.items()
    }
    record = {
        "command": f"python benchmarks/sampler_before.py CHECKOUT --rounds {arguments.rounds}",
        "before": commit_of(arguments.checkout),
        "cores": os.cpu_count(),
        "by_answer_tokens": results,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    slower = [length for length, result in results.items() if result["tokens_per_second_over_before"] < LEAST]
    print(
        "\n".join([json.dumps(record, indent=1), *(f"NOT MET: answers of {one} tokens are slower" for one in slower)])
    )
    return 1 if slower else 0


@contextmanager
def _service(checkout: Path) -> Iterator[subprocess.Popen[str]]:
    command = [checkout / ".venv" / "bin" / "python", __file__, checkout, "--answer"]
    with subprocess.Popen(command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        _reply(process)
        yield process
        process.stdin.close()


def _measure(service: subprocess.Popen[str], length: int) -> tuple[float, float]:
    """(tokens per second, microseconds of processor time per token)"""
    service.stdin.write(f"{length}\n")
    service.stdin.flush()
    rate, cost = json.loads(_reply(service))
    return rate, cost


def _reply(service: subprocess.Popen[str]) -> str:
    for line in service.stdout:
        if line.startswith((_READY, "[")) and not line.startswith("[transformers]"):
            return line
    raise SystemExit(f"the service ended: {service.args}")


def _answer(checkout: Path) -> None:
    """The process of one checkout: measures the lengths that standard input names."""
    sys.path.insert(0, str(checkout))
    from benchmarks import sampler

    sampler.GROUPS.update(GROUPS)
    with tempfile.TemporaryDirectory(prefix="tandem-sampler-") as scratch:
        folder = Path(scratch)
        sampler.build_tiny_model(folder / "model", hidden=128, layers=4, ends=False)
        service = sampler._Way("service", folder)
        try:
            service.start()
            print(_READY, flush=True)
            for line in sys.stdin:
                print(json.dumps(service.measure(int(line))), flush=True)
        finally:
            service.end()


def commit_of(checkout: Path) -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True)
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
