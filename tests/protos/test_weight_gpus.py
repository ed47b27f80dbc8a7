"""Transfers from `WeightSender` to `StagedReceiver` that need GPUs. Each test writes a record, from which `tandem
doctor` knows that it ran.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.protos.manifest import encode_manifest
from tandem.protos.weight_group import SumsDigest, export_cuda_bucket, import_cuda_bucket
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.services.buffer.store_source import redis_store
from tandem.services.commands.doctor import RECORDS, check_backends
from tandem.trainer.weight_sender import WeightSender
from tests.support.weight_pair import TIMEOUT, Tensors, equal, wait

START_SECONDS = 60.0
"""Until another process has imported torch and CUDA has started in it."""


def leave_record(backend: str, device: str, records: Path = RECORDS) -> None:
    """Records that a weight backend has transferred weights to this device. Commit the file it writes."""
    record = {
        "device": device,
        "date": date.today().isoformat(),
        "command": "pytest -m gpu tests/protos/test_weight_gpus.py",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    (records / f"weights-{backend}.json").write_text(json.dumps(record, indent=2) + "\n")


def test_doctor_reads_a_record(tmp_path: Path) -> None:
    leave_record("ipc", "NVIDIA X", tmp_path)
    said = {finding.name: finding.detail for finding in check_backends(tmp_path)}
    assert said["weights: ipc"] == f"run on NVIDIA X, {date.today().isoformat()}"
    assert "not run" in said["weights: nccl"]


@pytest.mark.gpu
def test_nccl_transfers_all_tensors_between_two_gpus(redis_url: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL refuses two ranks on one")
    source = Tensors()
    store = redis_store(redis_url, "weights", "nccl")
    sender = WeightSender(source, bucket_bytes=400, device=torch.device("cuda", 0), store=store)
    receiver = StagedReceiver(torch.device("cuda", 1), 0, source.shapes(), frozenset())
    address = sender.prepare("127.0.0.1", 2, "nccl")
    receiver.start_join(asdict(address), 1, store, START_SECONDS)
    sender.connect(START_SECONDS)
    assert wait(receiver, START_SECONDS + TIMEOUT)["error"] is None
    for version in range(2):
        manifest = sender.manifest(1, version, "nccl")
        receiver.start_receive(encode_manifest(manifest), address.group_name, TIMEOUT)
        sent = sender.broadcast(manifest, TIMEOUT)
        progress = wait(receiver)
        assert progress["error"] is None and progress["digests"] == [bucket.digest for bucket in sent.buckets]
        assert equal([(name, tensor.cpu()) for name, tensor in receiver.take()], source)
        source.tensors["embed"] += 1
    sender.close()
    leave_record("nccl", f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}")


@pytest.mark.gpu
def test_a_digest_is_the_same_on_gpu_and_cpu() -> None:
    data = torch.randint(0, 256, (8 * 1_000_003,), dtype=torch.uint8)
    assert SumsDigest(data.cuda()).finish() == SumsDigest(data).finish()


def _import_and_sum(handle: dict[str, Any], answers: Any) -> None:
    answers.put(int(import_cuda_bucket(handle, torch.device("cuda", 0)).sum(dtype=torch.int64)))


@pytest.mark.gpu
def test_ipc_maps_a_bucket_into_another_process() -> None:
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda:0")
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=_import_and_sum, args=(export_cuda_bucket(data), answers))
    child.start()
    assert answers.get(timeout=START_SECONDS) == int(data.sum(dtype=torch.int64))
    child.join(20)


def _receive(manifests: Any, answers: Any) -> None:
    """The sampler's side. It needs its own process, because CUDA cannot map memory into the process that owns it."""
    device, source = torch.device("cuda", 0), Tensors()
    torch.zeros(1, device=device)  # starts CUDA before any deadline begins
    receiver = StagedReceiver(device, 0, source.shapes(), frozenset())
    while manifest := manifests.get(timeout=START_SECONDS):
        receiver.start_receive(manifest, "", TIMEOUT)
        progress = wait(receiver)
        staged = receiver.take()
        on_gpu = all(tensor.device.type == "cuda" for _, tensor in staged)
        answers.put((progress, on_gpu and equal([(name, tensor.cpu()) for name, tensor in staged], source)))
        del staged  # returns the memory to the trainer
        source.tensors["embed"] += 1


@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_ipc_transfers_all_tensors_to_another_process() -> None:
    source = Tensors()
    sender = WeightSender(source, bucket_bytes=400, device=torch.device("cuda", 0))
    context = torch.multiprocessing.get_context("spawn")
    manifests, answers = context.Queue(), context.Queue()
    child = context.Process(target=_receive, args=(manifests, answers), daemon=True)
    child.start()
    try:
        for version in range(2):
            sent = sender.broadcast(sender.manifest(1, version, "ipc"), TIMEOUT)
            assert sender.fetched_by_samplers("ipc") and len(json.loads(sent.location)) == len(sent.buckets) > 2
            manifests.put(encode_manifest(sent))
            progress, is_equal = answers.get(timeout=START_SECONDS + TIMEOUT)
            assert progress["error"] is None and progress["digests"] == [bucket.digest for bucket in sent.buckets]
            assert is_equal
            sender.release()
            source.tensors["embed"] += 1
        # Memory overwritten during the transfer does not match the manifest's digests.
        sent = sender.broadcast(sender.manifest(1, 2, "ipc"), TIMEOUT)
        sender._exported[1][0] ^= 1
        torch.cuda.synchronize()
        manifests.put(encode_manifest(sent))
        progress, is_equal = answers.get(timeout=TIMEOUT)
        assert progress["error"][0] == "WeightTransferError" and "bucket 2 of" in progress["error"][1]
        assert not is_equal, "nothing is staged"
        sender.release()
        manifests.put(b"")
        child.join(20)
        assert child.exitcode == 0
    finally:
        if child.is_alive():
            child.kill()
            child.join(20)
    leave_record("ipc", torch.cuda.get_device_name(0))
