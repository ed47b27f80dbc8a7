"""Measures a reward job of a million items: its throughput, and the memory of service, Redis and client.

    python benchmarks/reward_job.py [--items 1000000] [--output benchmarks/records/reward_job.json]

The client is the command line: `tandem reward submit FILE --watch` reads a Parquet file and waits for the job to end,
`tandem reward results ID --out FILE` writes the results. One service with its embedded Redis scores a job of a tenth of
the items, then the whole. Every item must have exactly one result, the correct one, and ten times the items must not
take more memory of the service or of a client.

The exit code is 1 if a requirement is missed; the last lines name it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.service_process import TANDEM, environment, listening  # noqa: E402
from tandem.services.config.recipe import JobsConfig  # noqa: E402

BLOCK_ROWS = 1 << 16
LOOK_SECONDS = 0.05
STEP_SECONDS = 3600.0
MOST_GROWTH = 1.4
"""Highest accepted growth of the memory of service and clients for ten times the items."""
REDIS_ITSELF_MIB = 64.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--items", type=int, default=1_000_000, help="at least 10")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "reward_job.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-reward-job-") as folder:
        found = measure(Path(folder), (arguments.items // 10, arguments.items))
    record = {
        "command": "python benchmarks/reward_job.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "jobs": found,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    missed = [line for line, met in demands(found) if not met]
    print("\n".join([f"written to {arguments.output}", *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def measure(folder: Path, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Runs one job of each size in the same service and returns their figures."""
    jobs = []
    with _service(folder) as (address, pids):
        for number in sizes:
            answers = folder / f"answers-{number}.parquet"
            _write_answers(answers, number)
            jobs.append(_measured(folder, address, pids, answers, number))
            print(", ".join(f"{name} {value:,.6g}" for name, value in jobs[-1].items()), flush=True)
    return jobs


def demands(jobs: list[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """The requirements, and whether each is met."""
    for job in jobs:
        yield (
            f"{job['items']:,} items have a result each, in their order",
            job["rows"] == job["items"] and job["out_of_place"] == 0,
        )
        yield f"the results of {job['items']:,} items are right", job["wrong"] == 0
    first, last = jobs[0], jobs[-1]
    for who in ("service", "submitting", "fetching"):
        grown = last[f"{who}_peak_mib"] / first[f"{who}_peak_mib"]
        yield f"memory of {who}: {grown:.2f} times for ten times the items", grown <= MOST_GROWTH
    limit = JobsConfig().redis_bytes / (1 << 20) + REDIS_ITSELF_MIB
    yield f"Redis stays within the limits of jobs, {limit:,.0f} MiB", last["redis_peak_mib"] <= limit


def _measured(folder: Path, address: str, pids: dict[str, int], answers: Path, number: int) -> dict[str, Any]:
    scores = folder / f"scores-{number}.parquet"
    with Peaks(pids) as peaks:
        submit = ("submit", str(answers), "--scorer", "exact", "--watch")
        submit_seconds, said = _command(folder, address, peaks, "submitting", *submit)
        (job_id,) = set(re.findall(r"\b[0-9a-f]{32}\b", said))
        fetch_seconds, _ = _command(folder, address, peaks, "fetching", "results", job_id, "--out", str(scores))
    rows, out_of_place, wrong = _compared(scores)
    return {
        "items": number,
        "rows": rows,
        "out_of_place": out_of_place,
        "wrong": wrong,
        "submit_to_end_seconds": submit_seconds,
        "items_per_second": number / submit_seconds,
        "fetched_per_second": number / fetch_seconds,
        **{f"{name}_peak_mib": peaks.mebibytes[name] for name in ("service", "redis", "submitting", "fetching")},
        "log_mib": sum(file.stat().st_size for file in folder.rglob("*.aof")) / (1 << 20),
    }


# ---- items and results ----


def _write_answers(path: Path, number: int) -> None:
    """Items whose answer is their number; every third has another ground truth."""
    names = ("data_source", "solution", "ground_truth")
    with pq.ParquetWriter(path, pa.schema([(name, pa.string()) for name in names])) as writer:
        for first in range(0, number, BLOCK_ROWS):
            numbers = range(first, min(first + BLOCK_ROWS, number))
            solutions = [str(n) for n in numbers]
            truths = [text if n % 3 else "another" for n, text in zip(numbers, solutions, strict=True)]
            columns = (["bench"] * len(numbers), solutions, truths)
            writer.write_table(pa.table(dict(zip(names, columns, strict=True))))


def _compared(scores: Path) -> tuple[int, int, int]:
    """The number of rows in a file of scores, of rows out of order, and of wrong scores."""
    rows = out_of_place = wrong = 0
    with pq.ParquetFile(scores) as file:
        for batch in file.iter_batches(columns=["index", "value"]):
            numbers = np.arange(rows, rows + batch.num_rows)
            values = batch.column("value").to_numpy(zero_copy_only=False)  # NaN where there is none
            out_of_place += int((batch.column("index").to_numpy() != numbers).sum())
            wrong += int((values != (numbers % 3 != 0)).sum())
            rows += batch.num_rows
    return rows, out_of_place, wrong


# ---- processes ----


class Peaks:
    """Context manager that records the peak private memory of processes, sampled twenty times a second."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = dict(pids)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.mebibytes: dict[str, float] = {}

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        self._thread.join(10 * LOOK_SECONDS)

    def add(self, name: str, pid: int) -> None:
        """Includes another process."""
        self._pids = {**self._pids, name: pid}

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            for name, pid in self._pids.items():
                self.mebibytes[name] = max(self.mebibytes.get(name, 0.0), _private_mebibytes(pid))


def _private_mebibytes(pid: int) -> float:
    """Anonymous resident memory; 0 once the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.M)
    return int(found[1]) / 1024 if found else 0.0


def _command(folder: Path, address: str, peaks: Peaks, name: str, *arguments: str) -> tuple[float, str]:
    """Runs `tandem reward …` to its end; returns its duration in seconds and its output."""
    command = [*TANDEM, "reward", *arguments, "--address", address]
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        peaks.add(name, process.pid)
        try:
            said, _ = process.communicate(timeout=STEP_SECONDS)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
    return time.perf_counter() - began, said


@contextmanager
def _service(folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """The address of a standalone reward service, and the process ids of it and of its Redis."""
    with listening([*TANDEM, "reward", "serve", "--port", "0", "--folder", str(folder / "service")]) as (address, pid):
        (redis,) = [one for one in psutil.Process(pid).children() if "redis" in one.name()]
        yield address, {"service": pid, "redis": redis.pid}


if __name__ == "__main__":
    sys.exit(main())
