"""Measures the buffer's cost per group, from admission to publication, with an embedded Redis.

    python -m benchmarks.buffer

For payloads of 4 KB and 64 KB, prints the milliseconds of every verb per group, for a client that handles single groups
and one that claims P at once; then the groups per second that concurrent samplers complete (they share one fsync).
Everything is measured twice: with every write fsynced as in runs, and without, which leaves out the disk's time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import redis

from tandem.protos.row_headers import encode_headers
from tandem.protos.types import RowHeader, VersionSpan
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.redis_server import start_redis

GROUPS_PER_BATCH = 16
NUM_BATCHES = 20
ROWS_PER_GROUP = 8


class Stopwatch:
    """Seconds spent in each verb."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def verb(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begun


def headers_of(group_id: str) -> str:
    """The headers of a group of eight short answers."""
    spans = (VersionSpan(0, 1, 0),)
    rows = [RowHeader(group_id, i, 0, "policy", 120, 60, 1.0, spans, "stop", 1.0) for i in range(ROWS_PER_GROUP)]
    return encode_headers(rows)


def new_run(url: str, staleness_budget: int = 0) -> Buffer:
    """A new run with one sampler LIVE at version 0."""
    buffer = Buffer(url, f"benchmark-{uuid.uuid4().hex[:8]}")
    buffer.create(
        groups_per_batch=GROUPS_PER_BATCH,
        staleness_budget=staleness_budget,
        target_groups=GROUPS_PER_BATCH * NUM_BATCHES,
        failure_budget={"infrastructure": 1, "data": 1},
        resume=False,
    )
    buffer.register_sampler("rollout-0", "127.0.0.1:1", 1)
    buffer.publish(buffer.begin_incarnation(), 0, ["rollout-0"])
    return buffer


def cycle(url: str, payload_bytes: int, at_once: int) -> dict[str, float]:
    """Milliseconds per group for each verb, if one call claims `at_once` groups."""
    buffer, incarnation = new_run(url), 1
    payload, watch = b"x" * payload_bytes, Stopwatch()
    for version in range(1, NUM_BATCHES + 1):
        for first in range(0, GROUPS_PER_BATCH, at_once):
            groups = [(f"{version}-{first + i}", b"x" * 1024) for i in range(at_once)]
            with watch.verb("admit"):
                assert buffer.admit(groups, 0) == at_once
            with watch.verb("claim prompts"):
                claims = buffer.claim("prompts", "rollout-0", at_once, 60, 0)
            with watch.verb("complete prompts"):
                assert all([buffer.complete(claim, payload) for claim in claims])
            with watch.verb("claim generated"):
                claims = buffer.claim("generated", "reward", at_once, 60, 0)
            headers = [headers_of(claim.group_id) for claim in claims]
            with watch.verb("complete generated"):
                assert all([buffer.complete(claim, payload, text) for claim, text in zip(claims, headers, strict=True)])
        with watch.verb("claim scored"):
            group_ids = [claim.group_id for claim in buffer.claim_scored(incarnation, GROUPS_PER_BATCH, 0)]
        with watch.verb("read"):
            assert len(buffer.read(group_ids)) == GROUPS_PER_BATCH
        with watch.verb("record"):
            buffer.record(incarnation, version, group_ids)
        with watch.verb("publish"):
            buffer.publish(incarnation, version, ["rollout-0"])
        with watch.verb("commit"):
            buffer.commit(incarnation, version)
    assert buffer.verify() == []
    buffer.close()
    per_group = 1000 / (GROUPS_PER_BATCH * NUM_BATCHES)
    return {name: seconds * per_group for name, seconds in watch.seconds.items()}


def side_by_side(url: str, payload_bytes: int, num_workers: int) -> float:
    """Groups per second that concurrent threads claim and complete at stage `prompts`."""
    total = GROUPS_PER_BATCH * NUM_BATCHES
    buffer = new_run(url, staleness_budget=NUM_BATCHES - 1)
    assert buffer.admit([(f"0-{i}", b"x" * 1024) for i in range(total)], total) == total
    payload = b"x" * payload_bytes

    def work() -> None:
        while claims := buffer.claim("prompts", "rollout-0", 1, 60, 0):
            assert buffer.complete(claims[0], payload)

    with ThreadPoolExecutor(num_workers) as pool:
        begun = time.perf_counter()
        for worker in [pool.submit(work) for _ in range(num_workers)]:
            worker.result(timeout=120)
        seconds = time.perf_counter() - begun
    buffer.close()
    return total / seconds


def report(url: str) -> None:
    """Prints the tables for one server."""
    columns = [(size, at_once) for size in (4 << 10, 64 << 10) for at_once in (1, GROUPS_PER_BATCH)]
    results = [cycle(url, size, at_once) for size, at_once in columns]
    print(f"{'ms per group':20}" + "".join(f"{size >> 10:>6} KB ×{at_once:<3}" for size, at_once in columns))
    for name in results[0]:
        print(f"{name:20}" + "".join(f"{result[name]:13.3f}" for result in results))
    totals = [sum(result.values()) for result in results]
    print(f"{'whole cycle':20}" + "".join(f"{total:13.3f}" for total in totals))
    print(f"{'groups a second':20}" + "".join(f"{1000 / total:13.0f}" for total in totals))
    for num_workers in (1, 8):
        rates = [f"{side_by_side(url, size, num_workers):.0f} at {size >> 10} KB" for size in (4 << 10, 64 << 10)]
        print(f"claim + complete, {num_workers} side by side: {', '.join(rates)} groups a second")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        server = start_redis(Path(folder))
        try:
            client = redis.Redis.from_url(server.url, protocol=2)
            for fsync in ("always", "no"):
                client.config_set("appendfsync", fsync)
                print(f"\nappendfsync {fsync}")
                report(server.url)
            client.close()
        finally:
            server.stop()


if __name__ == "__main__":
    main()
