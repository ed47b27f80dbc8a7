"""Measures what TLS, and Prometheus' requests, cost a run: trained groups per second, and writes JSON.

    python benchmarks/secure_run.py [--batches 300] [--repeats 5] [--output benchmarks/records/secure_run.json]

The same small recipe runs in turns as it is (`plain`), with `run.certificates` (`tls`), and with `run.metrics_port` and
a request to every service each second (`metrics`), which is five times as often as deploy/prometheus/prometheus.yml
asks; the requests come from the same processors. The services of a run always need tokens, so their cost is in all of
them. A turn's ratio to the plain run beside it counts; the median over the turns is reported, with the smallest and the
largest. The exit code is 1 if the median of `tls` is below 0.98.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.services.commands.certs import write_certificates  # noqa: E402
from tandem.services.metrics.names import METRICS  # noqa: E402
from tandem.services.metrics.page import page_of  # noqa: E402
from tandem.services.metrics.ports import OFFSETS  # noqa: E402
from tandem.services.process import Repeated  # noqa: E402
from tests.support.whole_run import WholeRun  # noqa: E402

VARIANTS = ("plain", "tls", "metrics")
PORT = 21960
WARM_UP_BATCHES = 10
LEAST_RATIO = 0.98
GROUPS = 8
_PAGES = 500


class Scraper(Repeated):
    """Asks every service for its metrics each second, once the run has started."""

    def __init__(self, run: WholeRun) -> None:
        super().__init__("scraper", 1.0, self._scrape)
        self._watched = run
        self._token = ""
        self._client = httpx.Client(timeout=5.0)
        self.pages = 0

    def _scrape(self) -> None:
        if not self._token:
            if not self._watched.metrics():
                return
            self._token = self._watched.tandem("token", str(self._watched.folder), "--role", "read").stdout.strip()
        for offset in OFFSETS.values():
            try:
                url = f"http://127.0.0.1:{PORT + offset}/metrics"
                self.pages += (
                    self._client.get(url, headers={"Authorization": f"Bearer {self._token}"}).status_code == 200
                )
            except httpx.TransportError:
                return  # the run has ended


def milliseconds_per_page() -> float:
    """CPU time in which a trainer makes its page, the largest of a run, without the connection."""
    figures = {
        metric.figure.replace("*", metric.labels[0].values[0] if metric.labels else ""): 1.0
        for metric in METRICS
        if "tools" not in metric.source
    }
    page = page_of("run", "trainer", {"trainer": lambda: figures, "batch": lambda: figures, "service": lambda: figures})
    page()
    began = time.process_time()
    for _ in range(_PAGES):
        page()
    return 1000 * (time.process_time() - began) / _PAGES


def groups_per_second(variant: str, batches: int) -> float:
    """Makes one run and returns its rate after the warm-up."""
    with tempfile.TemporaryDirectory(prefix="tandem-secure-", dir="/tmp") as scratch:
        folder, more = Path(scratch), {}
        if variant == "tls":
            write_certificates(folder / "certificates", [], 30)
            more = {"certificates": str(folder / "certificates")}
        elif variant == "metrics":
            more = {"metrics_port": PORT}
        run = WholeRun(
            folder,
            run={"total_batches": batches, "groups_per_batch": GROUPS, "staleness_budget": 2, **more},
            rollout={"engine": "transformers", "max_response_tokens": 64},
            trainer={"checkpoint_every": batches},
        )
        scraper = Scraper(run) if variant == "metrics" else None
        with scraper or nullcontext():
            done = run.tandem("run", str(run.recipe), deadline=900.0)
        assert done.returncode == 0, done.stdout[-2000:] + run.logs()
        assert scraper is None or scraper.pages >= len(OFFSETS), "the run was too short to be scraped"
        lines = run.metrics()[WARM_UP_BATCHES:]
        return GROUPS * len(lines) / sum(float(line["seconds_total"]) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "secure_run.json")
    arguments = parser.parse_args()
    turns: list[dict[str, float]] = []
    for number in range(arguments.repeats):
        order = VARIANTS if number % 2 == 0 else VARIANTS[::-1]
        turns.append({variant: groups_per_second(variant, arguments.batches) for variant in order})
        print(" ".join(f"{name} {rate:.2f} groups/s" for name, rate in turns[-1].items()), flush=True)
    ratios = {name: [turn[name] / turn["plain"] for turn in turns] for name in VARIANTS[1:]}
    record = {
        "command": "python benchmarks/secure_run.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "cpu_milliseconds_per_page": milliseconds_per_page(),
        "groups_per_second": turns,
        "ratio_to_plain": {
            name: {"median": statistics.median(found), "smallest": min(found), "largest": max(found)}
            for name, found in ratios.items()
        },
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    for name, found in ratios.items():
        print(f"{name}: {statistics.median(found):.3f} of plain, from {min(found):.3f} to {max(found):.3f}")
    print(f"written to {arguments.output}")
    if missed := statistics.median(ratios["tls"]) < LEAST_RATIO:
        print(f"NOT MET: tls is below {LEAST_RATIO}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
