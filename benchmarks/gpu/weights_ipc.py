"""CUDA IPC between two processes, through the real `WeightSender` and `StagedReceiver`: rates, digests, and a damaged
bucket that must be refused.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.part import Outcome, device, median_seconds, run_part, synchronize
from tandem.protos.manifest import ParameterSpec, encode_manifest
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.trainer.weight_sender import WeightSender

SECONDS = 60.0
BUCKET_BYTES = 64 << 20
SHAPES = {f"layer.{number}": (4096, 4096) for number in range(96)}  # 3.2 GB, as Qwen2.5-1.5B in bfloat16
VERSIONS = 4


class GpuWeights:
    """A source of random weights on the GPU. Both processes make the same ones."""

    rank = 0

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.draw(0)

    def draw(self, version: int) -> None:
        """New weights, which depend on the version alone."""
        generator = torch.Generator(device()).manual_seed(version)
        for name, shape in SHAPES.items():
            self.tensors[name] = torch.randn(shape, generator=generator, device=device(), dtype=torch.bfloat16)

    def parameter_specs(self) -> Sequence[ParameterSpec]:
        return [(name, "bfloat16", shape) for name, shape in SHAPES.items()]

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        yield {name: self.tensors[name] for name in names}


def main(outcome: Outcome, arguments: list[str]) -> None:
    """`SIZE`."""
    source = GpuWeights()
    sender = WeightSender(source, bucket_bytes=BUCKET_BYTES, device=device())
    context = torch.multiprocessing.get_context("spawn")
    manifests, answers = context.Queue(), context.Queue()
    child = context.Process(target=_receive, args=(manifests, answers), daemon=True)
    child.start()
    try:
        assert answers.get(timeout=SECONDS) == "ready"
        measured = [_transfer(outcome, source, sender, manifests, answers, version) for version in range(VERSIONS)]
        _send_damaged(outcome, sender, manifests, answers)
        manifests.put(b"")
        child.join(SECONDS)
        outcome.require(child.exitcode == 0, f"the receiver's process ended with {child.exitcode}")
    finally:
        if child.is_alive():
            child.kill()
            child.join(SECONDS)
    _report(outcome, measured[1:])


def _transfer(
    outcome: Outcome, source: GpuWeights, sender: WeightSender, manifests: Any, answers: Any, version: int
) -> dict[str, float]:
    source.draw(version)
    synchronize()
    began = time.perf_counter()
    sent = sender.broadcast(sender.manifest(1, version, "ipc"), SECONDS)
    exported = time.perf_counter() - began
    manifests.put(encode_manifest(sent))
    answer = answers.get(timeout=SECONDS)
    sender.release()
    digests = [bucket.digest for bucket in sent.buckets]
    outcome.require(answer["error"] is None, f"version {version}: {answer['error']}")
    outcome.require(answer["digests"] == digests, f"version {version}: digests differ")
    outcome.require(answer["equal"], f"version {version}: weights differ from those that were sent")
    return {"send": exported, "receive": answer["seconds"], "apply": answer["apply"]}


def _send_damaged(outcome: Outcome, sender: WeightSender, manifests: Any, answers: Any) -> None:
    sent = sender.broadcast(sender.manifest(1, VERSIONS, "ipc"), SECONDS)
    sender._exported[1][12345] ^= 1
    synchronize()
    manifests.put(encode_manifest(sent))
    answer = answers.get(timeout=SECONDS)
    sender.release()
    named = answer["error"] is not None and answer["error"][0] == "WeightTransferError"
    refused = named and "bucket 2 of" in answer["error"][1] and not answer["staged"]
    outcome.require(refused, f"a damaged bucket was not refused: {answer['error']}")
    if refused:
        outcome.lines.append(f"A bucket with one changed bit was refused: “{answer['error'][1]}”.")


def _receive(manifests: Any, answers: Any) -> None:
    """The sampler's process."""
    source = GpuWeights()
    weights = {name: torch.empty_like(tensor) for name, tensor in source.tensors.items()}
    receiver = StagedReceiver(device(), 0, SHAPES, frozenset())
    answers.put("ready")
    version = 0
    while manifest := manifests.get(timeout=SECONDS):
        receiver.start_receive(manifest, "", SECONDS)
        progress = receiver.progress()
        while not progress["done"]:
            time.sleep(0.001)
        synchronize()
        began = time.perf_counter()
        staged = receiver.take()
        num_staged = len(staged)
        for name, tensor in staged:
            weights[name].copy_(tensor)
        synchronize()
        applied = time.perf_counter() - began
        staged.clear()
        source.draw(version)
        equal = all(torch.equal(weights[name], tensor) for name, tensor in source.tensors.items())
        answers.put({**progress, "apply": applied, "equal": equal, "staged": num_staged})
        version += 1


def _report(outcome: Outcome, measured: list[dict[str, float]]) -> None:
    num_bytes = sum(2 * rows * columns for rows, columns in SHAPES.values())
    block = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device=device())
    target = torch.empty_like(block)
    copy_rate = block.numel() / median_seconds(lambda: target.copy_(block))
    labels = {
        "send": "fill the buckets, digest them, keep the copy in host memory, export",
        "receive": "map the buckets and check their digests",
        "apply": "copy into the model's parameters",
    }
    rows = []
    for name, label in labels.items():
        seconds = statistics.median(one[name] for one in measured)
        rows.append([label, f"{seconds:.3f}", f"{num_bytes / seconds / 1e9:.1f}"])
    outcome.lines.append(
        f"{num_bytes / 1e9:.2f} GB of bfloat16 weights in buckets of {BUCKET_BYTES >> 20} MiB, medians of "
        f"{len(measured)} versions after a warm-up; all digests and all weights are equal on both sides. A copy within "
        f"the GPU's memory moves {copy_rate / 1e9:.0f} GB/s."
    )
    outcome.table(("phase", "seconds", "GB/s"), rows)


if __name__ == "__main__":
    run_part(main)
