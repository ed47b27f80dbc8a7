"""Compares a weight transfer to 1 … 8 receivers with gloo's bare broadcast of the same bytes.

    python benchmarks/weight_transfer.py [--rounds 5] [--output benchmarks/records/weight_transfer.json]

Every rank is a process with one thread. `ours` is what a publication does once it has its snapshot, which contains the
digests: `WeightSender` sends the buckets, and each receiver's `StagedReceiver` stages them and checks the digests.
`unchecked` sends the same buckets along the same chain into memory that exists already, without digests. `raw` does
that by torch.distributed's own broadcast. All three alternate; figures are medians over the rounds, ratios of raw
seconds / our seconds, `share_of_checks` of what `ours` takes longer than `unchecked`. Bytes that left rank 0 are those
its sockets had acknowledged (Linux's TCP_INFO). Fails if a `ratio` or an `unchecked_ratio` is below `LEAST_RATIO`, or
if rank 0 sends more than `MOST_COPIES` to eight. `digest_seconds` is what a digest of all buckets takes alone, and
`snapshot_seconds` what a snapshot takes with each digest, and without one.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.protos import weight_group  # noqa: E402
from tandem.protos.bucket_digest import DIGEST_BYTES  # noqa: E402
from tandem.protos.manifest import DIGEST_FORMATS, ParameterSpec, encode_manifest  # noqa: E402
from tandem.protos.store_source import file_store  # noqa: E402
from tandem.protos.types import WeightGroupAddress  # noqa: E402
from tandem.protos.weight_group import WeightGroup, begin_digest  # noqa: E402
from tandem.rollout.weight_receiver import StagedReceiver  # noqa: E402
from tandem.trainer.weight_sender import WeightSender  # noqa: E402

LEAST_RATIO = 0.9
MOST_COPIES = 1.1
NUM_TENSORS, ELEMENTS = 24, 1_010_000  # 97 MB of float32
SECONDS = 60.0
WARM_UP = 2
"""Rounds that are not counted; in the first one, receivers get their memory."""
CPU = torch.device("cpu")
_BYTES_ACKED = struct.Struct("<120xQ")
"""`tcpi_bytes_acked` of Linux's tcp_info."""


class Weights:
    """The sender's source of weights."""

    rank = 0

    def __init__(self) -> None:
        self._tensors = {f"p{number}": torch.randn(ELEMENTS) for number in range(NUM_TENSORS)}

    def parameter_specs(self) -> list[ParameterSpec]:
        return [(name, "float32", (ELEMENTS,)) for name in self._tensors]

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        yield {name: self._tensors[name] for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    receivers = {str(count): _measure(count, arguments.rounds) for count in (1, 2, 4, 8)}
    digest_seconds, snapshot_seconds = _seconds_of_digests(arguments.rounds)
    for what, found in (("digests alone", digest_seconds), ("snapshot with digests", snapshot_seconds)):
        print(f"{what}: " + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in found.items()))
    for count, figures in receivers.items():
        print(f"{count} receivers: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    record = {
        "command": f"python benchmarks/weight_transfer.py --rounds {arguments.rounds}",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "bytes": 4 * NUM_TENSORS * ELEMENTS,
        "least_ratio": LEAST_RATIO,
        "most_copies": MOST_COPIES,
        "digest_seconds": digest_seconds,
        "snapshot_seconds": snapshot_seconds,
        "receivers": receivers,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    missed = [
        f"{name} of {number} receivers is {figures[name]:.2f}, at least {LEAST_RATIO}"
        for number, figures in receivers.items()
        for name in ("ratio", "unchecked_ratio")
        if figures[name] < LEAST_RATIO
    ]
    copies = receivers["8"]["copies_sent"]
    if copies > MOST_COPIES:
        missed.append(f"{copies:.2f} copies are sent to 8 receivers, at most {MOST_COPIES}")
    for line in missed:
        print(f"NOT MET: {line}")
    return 1 if missed else 0


class NoDigest:
    """What a snapshot without digests computes."""

    def advance(self, num_bytes: int) -> None:
        pass

    def finish(self) -> bytes:
        return bytes(DIGEST_BYTES)


def _seconds_of_digests(rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Medians: of each digest alone, and of a snapshot with each digest and without."""
    torch.set_num_threads(1)
    sender = WeightSender(Weights(), bucket_bytes=64 << 20)
    manifest = sender.manifest(1, 0, "gloo")
    data = [buffer[: spec.num_bytes] for spec, buffer in sender.snapshot(manifest).buckets]
    alone: dict[str, list[float]] = {name: [] for name in DIGEST_FORMATS}
    snapshots: dict[str, list[float]] = {name: [] for name in (*DIGEST_FORMATS, "none")}
    for _ in range(rounds):
        for name, found in alone.items():
            with _timed(found):
                for bucket in data:
                    begin_digest(bucket, name).finish()
        for name, found in snapshots.items():
            with ExitStack() as stack:
                if name == "none":
                    stack.enter_context(patch.object(weight_group, "begin_digest", lambda *_: NoDigest()))
                with _timed(found):
                    sender.snapshot(replace(manifest, digest_algorithm=name))
    return _medians(alone), _medians(snapshots)


@contextmanager
def _timed(found: list[float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    found.append(time.perf_counter() - started)


def _medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in seconds.items()}


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
    sender = WeightSender(Weights(), bucket_bytes=64 << 20, store=store)
    manifest = sender.manifest(1, 0, "gloo")
    snapshot = sender.snapshot(manifest)
    buffers = [buffer for _, buffer in snapshot.buckets]
    receiver = StagedReceiver(CPU, 0, None, frozenset())
    if rank == 0:
        group = sender._group = WeightGroup(address, 0, CPU, SECONDS, store)
    else:
        receiver.start_join(asdict(address), rank, store, SECONDS)
        _wait(receiver)
        group = receiver._group
    assert group is not None
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0

    def broadcast_raw() -> None:
        for buffer in buffers:
            raw.broadcast([buffer], options).wait()

    def broadcast_unchecked() -> None:
        for buffer in buffers:
            group.broadcast(buffer, SECONDS)

    def broadcast_ours() -> None:
        if rank == 0:
            sender.broadcast(manifest, SECONDS, snapshot)
            return
        receiver.start_receive(encode_manifest(manifest), address.group_name, SECONDS)
        _wait(receiver)
        receiver.take()

    transfers = {"raw": broadcast_raw, "unchecked": broadcast_unchecked, "ours": broadcast_ours}
    seconds: dict[str, list[float]] = {name: [] for name in transfers}
    sent: dict[str, list[int]] = {name: [] for name in transfers}
    for _ in range(WARM_UP + rounds):
        for name, transfer in transfers.items():
            raw.barrier().wait()
            before, started = _bytes_sent(), time.perf_counter()
            transfer()
            raw.barrier().wait()
            seconds[name].append(time.perf_counter() - started)
            sent[name].append(_bytes_sent() - before)
    if rank == 0:
        size = sum(spec.num_bytes for spec in manifest.buckets)
        results.put(_figures({name: each[WARM_UP:] for name, each in seconds.items()}, sent, size))


def _figures(seconds: dict[str, list[float]], sent: dict[str, list[int]], size: int) -> dict[str, float]:
    rounds = list(zip(seconds["raw"], seconds["unchecked"], seconds["ours"], strict=True))
    return {
        "ratio": statistics.median(raw / ours for raw, _, ours in rounds),
        "unchecked_ratio": statistics.median(raw / unchecked for raw, unchecked, _ in rounds),
        "share_of_checks": statistics.median(1 - unchecked / ours for _, unchecked, ours in rounds),
        "seconds": statistics.median(seconds["ours"]),
        "raw_seconds": statistics.median(seconds["raw"]),
        "copies_sent": statistics.median(sent["ours"][WARM_UP:]) / size,
        "raw_copies_sent": statistics.median(sent["raw"][WARM_UP:]) / size,
    }


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
