"""Compares a weight transfer to 1 … 8 receivers with gloo's bare broadcast of the same bytes.

    python benchmarks/weight_transfer.py [--rounds 5] [--output benchmarks/records/weight_transfer.json]

Every rank is a process with one thread. `ours` is what a publication does once the buckets are filled: the weight group
sends them, and each receiver's `StagedReceiver` stages them and checks their digests. `raw` broadcasts buffers of the
same sizes, which exist already, by torch.distributed's process group. Both alternate; ratios are medians over the
rounds of raw seconds / our seconds. Bytes that left rank 0 are those its sockets had acknowledged (Linux's TCP_INFO).
Fails if rank 0 sends more than `MOST_COPIES` to eight.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from dataclasses import asdict
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.protos.manifest import encode_manifest, plan_buckets  # noqa: E402
from tandem.protos.store_source import file_store  # noqa: E402
from tandem.protos.types import WeightGroupAddress, WeightManifest  # noqa: E402
from tandem.protos.weight_group import WeightGroup, empty_bucket, fill_bucket  # noqa: E402
from tandem.rollout.weight_receiver import StagedReceiver  # noqa: E402

MOST_COPIES = 1.1
NUM_TENSORS, ELEMENTS = 24, 1_010_000  # 97 MB of float32
SECONDS = 60.0
CPU = torch.device("cpu")
_BYTES_ACKED = struct.Struct("<120xQ")
"""`tcpi_bytes_acked` of Linux's tcp_info."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    receivers = {str(count): _measure(count, arguments.rounds) for count in (1, 2, 4, 8)}
    for count, figures in receivers.items():
        print(f"{count} receivers: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    record = {
        "command": f"python benchmarks/weight_transfer.py --rounds {arguments.rounds}",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "bytes": 4 * NUM_TENSORS * ELEMENTS,
        "most_copies": MOST_COPIES,
        "receivers": receivers,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    copies = receivers["8"]["copies_sent"]
    print(f"{copies:.2f} copies for 8 receivers, limit {MOST_COPIES}")
    return 0 if copies <= MOST_COPIES else 1


def _measure(num_receivers: int, rounds: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    results: Queue[dict[str, float]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run, args=(rank, num_receivers + 1, folder, rounds, results), daemon=True)
            for rank in range(num_receivers + 1)
        ]
        for rank in ranks:
            rank.start()
        found = results.get(timeout=300)
        for rank in ranks:
            rank.join(SECONDS)
    return found


def _run(rank: int, world_size: int, folder: str, rounds: int, results: Queue[dict[str, float]]) -> None:
    torch.set_num_threads(1)
    address = WeightGroupAddress("127.0.0.1", "transfer", world_size, "gloo")
    store = file_store(f"{folder}/ours", world_size)
    raw: Any = dist.ProcessGroupGloo(dist.FileStore(f"{folder}/raw", world_size), rank, world_size)
    buckets = plan_buckets([(f"p{number}", "float32", (ELEMENTS,)) for number in range(NUM_TENSORS)], 64 << 20)
    tensors = {f"p{number}": torch.randn(ELEMENTS) for number in range(NUM_TENSORS)}
    buffers = [empty_bucket(spec, CPU) for spec in buckets]
    for spec, buffer in zip(buckets, buffers, strict=True):
        fill_bucket(spec, tensors, buffer)
    group, receiver = None, StagedReceiver(CPU, 0, None, frozenset())
    if rank == 0:
        group = WeightGroup(address, 0, CPU, SECONDS, store)
    else:
        receiver.start_join(asdict(address), rank, store, SECONDS)
        _wait(receiver)
    manifest = encode_manifest(WeightManifest(1, 0, "gloo", buckets))
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0

    def broadcast_raw() -> None:
        for buffer in buffers:
            raw.broadcast([buffer], options).wait()

    def broadcast_ours() -> None:
        if group is not None:
            for buffer in buffers:
                group.broadcast(buffer, SECONDS)
            return
        receiver.start_receive(manifest, address.group_name, SECONDS)
        _wait(receiver)
        receiver.take()

    seconds: dict[str, list[float]] = {"raw": [], "ours": []}
    sent: dict[str, list[int]] = {"raw": [], "ours": []}
    for _ in range(rounds + 2):
        for name, transfer in (("raw", broadcast_raw), ("ours", broadcast_ours)):
            raw.barrier().wait()
            before, started = _bytes_sent(), time.perf_counter()
            transfer()
            raw.barrier().wait()
            seconds[name].append(time.perf_counter() - started)
            sent[name].append(_bytes_sent() - before)
    if rank == 0:
        size = sum(spec.num_bytes for spec in buckets)
        ratios = [one / other for one, other in zip(seconds["raw"][2:], seconds["ours"][2:], strict=True)]
        results.put(
            {
                "ratio": statistics.median(ratios),
                "seconds": statistics.median(seconds["ours"][2:]),
                "raw_seconds": statistics.median(seconds["raw"][2:]),
                "copies_sent": statistics.median(sent["ours"][2:]) / size,
                "raw_copies_sent": statistics.median(sent["raw"][2:]) / size,
            }
        )


def _wait(receiver: StagedReceiver) -> None:
    transfer = receiver._transfer
    assert transfer is not None
    transfer.join(SECONDS)
    assert receiver.progress()["done"] and receiver.progress()["error"] is None, receiver.progress()


def _bytes_sent() -> int:
    """Acknowledged bytes of all TCP connections of this process."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as opened:
                    if opened.family == socket.AF_INET and opened.type == socket.SOCK_STREAM:
                        total += _BYTES_ACKED.unpack_from(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))[
                            0
                        ]
        except OSError:  # the descriptor of the listing itself, or one that has closed
            continue
    return total


if __name__ == "__main__":
    sys.exit(main())
