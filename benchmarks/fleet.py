"""The cost of a group in Redis by the number of samplers and by the groups that the run has trained before.

    python benchmarks/fleet.py [--rounds 11] [--output benchmarks/records/fleet.json]

4, 256 and 1,024 samplers and 32 scorers claim, complete and die against the real scripts of a real redis-server, each
with a connection of its own; one process drives them, so groups a second are those of its calls one after the other. A
history is made by setting the bits and counters that trained groups leave, and `Buffer.verify` compares it. Runs take
turns in each round, and a ratio is the median of the rounds' ratios of Redis' CPU time for a group, from admission to
commit, without heartbeats. After that the durations of all scripts are read from Redis' slow log, also of those that a
fault or an operator calls: a restarted sampler with 2,000 leases, 2,000 leases that expire at once, a rollback of ten
batches, a check and the end of a run with 32,768 groups in progress. Fails if a bound is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from statistics import median

import numpy as np
import redis

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.buffer import headers_of  # noqa: E402
from tandem.services.buffer.buffer import Buffer  # noqa: E402
from tandem.services.buffer.connection import RUNS, script_text  # noqa: E402
from tandem.services.buffer.redis_server import start_redis  # noqa: E402

GROUPS_PER_BATCH = 256
STALENESS_BUDGET = 127  # 32,768 credits
ROWS_PER_EPOCH = 7473  # as in GSM8K
BATCHES_PER_MEASUREMENT = 4
BATCHES_PER_COMMIT = 10
NUM_SCORERS = 32
FLEETS = (4, 256, 1024)
HISTORIES = (10**3, 10**6)
LIMITS = {"1024 samplers over 4": 1.2, "10^6 groups of history over 10^3": 1.1}
LIMIT_MS = 20.0
SLOWER_THAN_US = 20
PROMPT, PAYLOAD = b"x" * 1024, b"x" * 4096
HEADERS = headers_of("0-0")


@dataclass
class Sampler:
    """A sampler or scorer with a connection of its own."""

    name: str
    buffer: Buffer


@dataclass
class Ring:
    """One run: its services, and the batches that it has trained."""

    url: str
    run_id: str
    num_samplers: int
    history: int
    version: int = 0
    num_groups: int = 0
    batches: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trainer = Buffer(self.url, self.run_id)
        self.trainer.create(
            groups_per_batch=GROUPS_PER_BATCH,
            staleness_budget=STALENESS_BUDGET,
            target_groups=10**9,
            failure_budget={"infrastructure": 3, "data": 3},
            resume=False,
        )
        self.incarnation = self.trainer.begin_incarnation()
        self._write_history()
        names = [f"rollout-{number}" for number in range(self.num_samplers)]
        self.samplers = [Sampler(name, Buffer(self.url, self.run_id)) for name in names]
        self.scorers = [Sampler(f"reward-{number}", Buffer(self.url, self.run_id)) for number in range(NUM_SCORERS)]
        for sampler in self.samplers:
            sampler.buffer.register_sampler(sampler.name, "127.0.0.1:1", 1)
            sampler.buffer.heartbeat(sampler.name, {})
        self.trainer.publish(self.incarnation, self.version, self.trainer.samplers())
        self.turn: Iterator[Sampler] = itertools.cycle(self.samplers)
        self.scorer: Iterator[Sampler] = itertools.cycle(self.scorers)

    def _write_history(self) -> None:
        """What `history` admitted, trained and committed groups leave in Redis."""
        redis, key = self.trainer.connection.redis, self.trainer.connection.key
        self.version = -(-self.history // GROUPS_PER_BATCH)
        for epoch, first in enumerate(range(0, self.history, ROWS_PER_EPOCH)):
            rows = min(ROWS_PER_EPOCH, self.history - first)
            bits = np.packbits(np.ones(rows, dtype=np.uint8)).tobytes()
            redis.sadd(key("epochs"), epoch)
            for name in ("admitted", "committed"):
                redis.sadd(key(f"maps:{epoch}"), name)
                redis.set(key(f"bits:{epoch}:{name}"), bits)
        redis.hset(key("counters"), mapping=dict.fromkeys(("admitted", "committed", "retired"), self.history))
        versions = ("published_version", "recorded_version", "committed_version")
        redis.hset(key("meta"), mapping=dict.fromkeys(versions, self.version))
        self.num_groups = self.history
        assert self.trainer.verify() == []

    def admit(self, count: int) -> None:
        """Admits groups, 64 a call."""
        last = self.num_groups + count
        while self.num_groups < last:
            numbers = range(self.num_groups, min(last, self.num_groups + 64))
            groups = [(f"{number // ROWS_PER_EPOCH}-{number % ROWS_PER_EPOCH}", PROMPT) for number in numbers]
            assert self.trainer.admit(groups, numbers[-1] + 1) == len(groups)
            self.num_groups += len(groups)

    def score_batch(self) -> None:
        """Admits, samples and scores a batch. Each claim of a sampler is for one group, as at the end of another."""
        self.admit(GROUPS_PER_BATCH)
        held = []
        for sampler in itertools.islice(self.turn, GROUPS_PER_BATCH):
            claims = sampler.buffer.claim("prompts", sampler.name, 1, 60.0, 0.0)
            held += [(sampler, claim) for claim in claims]
        assert all([sampler.buffer.complete(claim, PAYLOAD) for sampler, claim in held])
        for scorer in itertools.islice(self.scorer, GROUPS_PER_BATCH // 8):
            claims = scorer.buffer.claim("generated", scorer.name, 8, 60.0, 0.0)
            assert scorer.buffer.complete_all([(claim, PAYLOAD, HEADERS) for claim in claims]) == []

    def train_batch(self) -> None:
        """Trains a scored batch and publishes it to all samplers; commits every tenth."""
        trainer, self.version = self.trainer, self.version + 1
        group_ids = [claim.group_id for claim in trainer.claim_scored(self.incarnation, GROUPS_PER_BATCH, 0.0)]
        assert len(trainer.read(group_ids)) == GROUPS_PER_BATCH
        trainer.record(self.incarnation, self.version, group_ids)
        self.batches[self.version] = group_ids
        trainer.publish(self.incarnation, self.version, trainer.samplers())
        if self.version % BATCHES_PER_COMMIT == 0:
            trainer.commit(self.incarnation, self.version)

    def run_batches(self) -> None:
        for _ in range(BATCHES_PER_MEASUREMENT):
            self.score_batch()
            self.train_batch()

    def disturb(self) -> None:
        """What happens seldom: restarts, expired leases, a rollback, a check and an end with 32,768 groups."""
        trainer, sampler = self.trainer, self.samplers[0]
        self.admit(2000)
        for lease_seconds in (60.0, 1.0):
            for _ in range(125):
                assert len(sampler.buffer.claim("prompts", sampler.name, 16, lease_seconds, 0.0)) == 16
            if lease_seconds == 60.0:
                sampler.buffer.register_sampler(sampler.name, "127.0.0.1:1", 1)
                assert trainer.admit_sampler(self.incarnation, sampler.name, self.version)
        time.sleep(1.1)
        while trainer.counts()["leases_expired"] < 2000:
            pass
        for _ in range(BATCHES_PER_COMMIT):
            self.score_batch()
            self.train_batch()
        trainer.commit(self.incarnation, self.version - BATCHES_PER_COMMIT)
        self.incarnation = trainer.begin_incarnation()
        later = range(self.version - BATCHES_PER_COMMIT + 1, self.version + 1)
        trainer.rollback(self.incarnation, later[0] - 1, {version: self.batches[version] for version in later})
        trainer.publish(self.incarnation, self.version, trainer.samplers())
        trainer.commit(self.incarnation, self.version)
        self.admit(GROUPS_PER_BATCH * (STALENESS_BUDGET + 1) - trainer.counts()["outstanding"])
        assert trainer.verify() == []
        assert trainer.drop_outstanding(self.incarnation, "run_ended") == GROUPS_PER_BATCH * (STALENESS_BUDGET + 1)


def cpu_seconds(client: redis.Redis) -> float:
    """CPU time of the server so far."""
    used = client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def idle_share(ring: Ring, client: redis.Redis) -> float:
    """The part of a processor that Redis takes while all wait: a heartbeat and an empty claim of each a second."""
    used = cpu_seconds(client)
    for stage, services in (("prompts", ring.samplers), ("generated", ring.scorers)):
        for service in services:
            service.buffer.heartbeat(service.name, {"tokens": 1.0}, "waits")
            assert service.buffer.claim(stage, service.name, 1, 60.0, 0.0) == []  # type: ignore[arg-type]
    return cpu_seconds(client) - used


def script_seconds(client: redis.Redis, call: Callable[[], None]) -> dict[str, list[float]]:
    """The durations in Redis of the scripts that the call runs, by verb, without those below SLOWER_THAN_US."""
    folder = ROOT / "services" / "buffer" / "scripts"
    verbs = {}
    for file in folder.glob("*.lua"):
        if file.stem not in ("common", *RUNS.prelude):
            verbs[sha1(script_text(RUNS, file.stem).encode()).hexdigest().encode()] = file.stem
    client.config_set("slowlog-max-len", 10**6)
    client.config_set("slowlog-log-slower-than", SLOWER_THAN_US)  # 0 would log, and slow down, each command of a script
    client.slowlog_reset()
    call()
    client.config_set("slowlog-log-slower-than", -1)
    found: dict[str, list[float]] = defaultdict(list)
    for entry in client.slowlog_get(10**6):
        name, sha, *_ = [*entry["command"].split(b" ", 2), b""]
        if name == b"EVALSHA":
            found[verbs[sha]].append(entry["duration"] / 1e6)
    client.slowlog_reset()
    return found


def measure(rings: dict[str, Ring], client: redis.Redis, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(Redis' CPU milliseconds a group, groups a second) of each run, in each round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rings}
    num_groups = BATCHES_PER_MEASUREMENT * GROUPS_PER_BATCH
    for number in range(rounds + 1):
        for name, ring in rings.items():
            used, began = cpu_seconds(client), time.perf_counter()
            ring.run_batches()
            cost = 1000 * (cpu_seconds(client) - used) / num_groups
            if number > 0:  # the first warms up
                found[name].append((cost, num_groups / (time.perf_counter() - began)))
    return found


def quantiles(durations: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Calls, median, 99th percentile and maximum in ms of each verb."""
    table = {}
    for verb, values in sorted(durations.items()):
        in_ms = 1000 * np.array(values)
        p50, p99 = (round(float(np.quantile(in_ms, share)), 3) for share in (0.5, 0.99))
        table[verb] = {"calls": len(values), "p50": p50, "p99": p99, "max": round(float(in_ms.max()), 3)}
    return table


def compare(url: str, client: redis.Redis, rounds: int) -> dict[str, object]:
    """Runs everything and returns the record."""
    rings = {f"{number} samplers": Ring(url, f"fleet-{number}", number, HISTORIES[0]) for number in FLEETS}
    rings[f"history {HISTORIES[1]}"] = Ring(url, "history", FLEETS[0], HISTORIES[1])
    found = measure(rings, client, rounds)
    costs = {name: [cost for cost, _ in values] for name, values in found.items()}
    first, largest, old = costs[f"{FLEETS[0]} samplers"], costs[f"{FLEETS[-1]} samplers"], costs["history 1000000"]
    ratios = [
        median(one / other for one, other in zip(other_costs, first, strict=True)) for other_costs in (largest, old)
    ]
    waiting = {name: round(idle_share(ring, client), 4) for name, ring in rings.items()}
    usual: dict[str, list[float]] = script_seconds(client, rings[f"{FLEETS[-1]} samplers"].run_batches)
    seldom = script_seconds(client, rings[f"history {HISTORIES[1]}"].disturb)
    scripts = {"1024 samplers": quantiles(usual), "disturbed, 10^6 groups of history": quantiles(seldom)}
    slowest = max((figures["max"], verb) for table in scripts.values() for verb, figures in table.items())
    return {
        "cores": os.cpu_count(),
        "redis": client.info("server")["redis_version"],
        "rounds": rounds,
        "redis_cpu_ms_a_group": {name: round(median(values), 4) for name, values in costs.items()},
        "groups_a_second": {name: round(median(rate for _, rate in values)) for name, values in found.items()},
        "redis_cpu_seconds_a_second_while_all_wait": waiting,
        "ratios": {name: round(ratio, 3) for name, ratio in zip(LIMITS, ratios, strict=True)},
        "slowest_script": {"verb": slowest[1], "ms": slowest[0]},
        "script_ms": scripts,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # one connection for each sampler; Redis inherits it
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        server = start_redis(Path(folder))
        try:
            client = redis.Redis.from_url(server.url, protocol=2)
            client.config_set("appendfsync", "no")  # the disk's time is not Redis' work
            client.config_set("auto-aof-rewrite-percentage", 0)
            record = compare(server.url, client, arguments.rounds)
            client.close()
        finally:
            server.stop()
    record = {"command": f"python benchmarks/fleet.py --rounds {arguments.rounds}"} | record
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")
    ratios, slowest = record["ratios"], record["slowest_script"]
    assert isinstance(ratios, dict) and isinstance(slowest, dict)
    missed = [name for name, bound in LIMITS.items() if ratios[name] > bound]
    missed += ["slowest script"] if slowest["ms"] > LIMIT_MS else []
    for name in missed:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
