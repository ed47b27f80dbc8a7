"""Measures what syncing every write of Redis costs a run: steps per minute in one run of the demo, and writes JSON.

    python benchmarks/appendfsync.py [--blocks 36] [--block 5] [--output benchmarks/records/appendfsync.json]

`tandem demo` runs once. In blocks of `--block` batches the embedded Redis has `appendfsync always`, which is what a run
has, and `appendfsync no`, in the order always, no, no, always. The first batch of a block is not counted. Each round of
two blocks gives one ratio of steps per minute, and the median of the ratios counts. The exit code is 1 if it is below
0.9. The cost is that of the disk below the scratch folder (`TMPDIR`), whose time for a synced write is in the record.
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
from itertools import islice
from pathlib import Path
from typing import Any

import redis

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.services.run.folder import running  # noqa: E402

ROUND_ORDER = (("always", "no"), ("no", "always"))
WARM_UP_BATCHES = 10
LEAST_RATIO = 0.9
DEADLINE_SECONDS = 900.0
_POLL_SECONDS = 0.005
_PROBES = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=36)
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "appendfsync.json")
    arguments = parser.parse_args()
    if arguments.blocks < 2 or arguments.blocks % 2 or arguments.block < 2:
        parser.error("--blocks is even, and --block at least 2")
    settings = [ROUND_ORDER[number % 2] for number in range(arguments.blocks // 2)]
    flat = [setting for pair in settings for setting in pair]
    with tempfile.TemporaryDirectory(prefix="tandem-appendfsync-") as scratch:
        synced = _milliseconds_of_a_synced_write(Path(scratch))
        lines = _run(Path(scratch) / "run", flat, arguments.block)
    rates = [_steps_per_minute(lines, number, arguments.block) for number in range(len(flat))]
    rounds = [dict(zip(pair, rates[2 * number : 2 * number + 2], strict=True)) for number, pair in enumerate(settings)]
    ratios = [one["always"] / one["no"] for one in rounds]
    record = {
        "command": "python benchmarks/appendfsync.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "milliseconds_of_a_synced_write": synced,
        "steps_per_minute": {
            name: round(statistics.median(one[name] for one in rounds), 1) for name in ("always", "no")
        },
        "ratio": {"median": statistics.median(ratios), "smallest": min(ratios), "largest": max(ratios)},
        "rounds": len(ratios),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    median = statistics.median(ratios)
    if median < LEAST_RATIO:
        print(f"NOT MET: appendfsync always makes {median:.3f} of the steps per minute, not {LEAST_RATIO}")
    return int(median < LEAST_RATIO)


def _run(folder: Path, settings: list[str], block: int) -> list[dict[str, Any]]:
    """The lines of a demo of all blocks, whose Redis has the setting of each block while its batches are trained."""
    batches = WARM_UP_BATCHES + len(settings) * block
    command = [sys.executable, "-m", "tandem.services.cli", "demo", f"run.folder={json.dumps(str(folder))}"]
    command += [
        f"run.total_batches={batches}",
        f"trainer.evaluate_every={batches}",
        f"trainer.checkpoint_every={batches}",
    ]
    deadline = time.monotonic() + DEADLINE_SECONDS
    with open(folder.with_suffix(".out"), "w") as out:
        demo = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            for number, setting in enumerate(settings):
                _wait_for_lines(demo, folder, WARM_UP_BATCHES + number * block, deadline)
                _set(folder, setting)
            code = demo.wait(deadline - time.monotonic())
        finally:
            demo.kill()
            demo.wait()
    if code:
        raise SystemExit(f"{' '.join(command)} failed:\n{folder.with_suffix('.out').read_text()[-2000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _wait_for_lines(demo: subprocess.Popen[bytes], folder: Path, number: int, deadline: float) -> None:
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < number:
        if demo.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(
                f"the demo did not train {number} batches:\n{folder.with_suffix('.out').read_text()[-2000:]}"
            )
        time.sleep(_POLL_SECONDS)


def _set(folder: Path, setting: str) -> None:
    address = running(folder)
    assert address is not None, "the demo has ended before its last block"
    with redis.Redis.from_url(address.redis_url) as client:
        client.config_set("appendfsync", setting)


def _steps_per_minute(lines: list[dict[str, Any]], number: int, block: int) -> float:
    """Of a block without its first batch, in which the setting changed."""
    first = WARM_UP_BATCHES + number * block
    times = [float(line["time"]) for line in islice(lines, first, first + block)]
    return 60.0 * (block - 1) / (times[-1] - times[0])


def _milliseconds_of_a_synced_write(folder: Path) -> float:
    seconds = []
    with open(folder / "probe", "wb", buffering=0) as file:
        for _ in range(_PROBES):
            began = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return round(1000 * statistics.median(seconds), 3)


if __name__ == "__main__":
    sys.exit(main())
