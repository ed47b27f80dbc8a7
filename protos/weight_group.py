"""Both ends of a weight transfer: rendezvous of a bare process group, flat buckets, digests. Imports torch.

A bucket is sent as one broadcast of its bytes and their 32-byte digest. Over gloo the ranks form a chain: each passes a
bucket on in parts while it receives, so the sender's link carries every bucket once, however many receive it. The ranks
find one another in a store that they are given, which must be closed to others.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from tandem.protos.bucket_digest import COLUMNS, DIGEST_BYTES, BucketDigest, Xxh3Digest, sum_rows
from tandem.protos.errors import DataError, EnvironmentLackError, UnavailableError, WeightTransferError
from tandem.protos.store_source import StoreSource
from tandem.protos.types import BucketSpec, DigestAlgorithm, TensorSpec, WeightGroupAddress

_LEAST_HUGE_BYTES = 4 << 20
_PART_BYTES = 1 << 20
"""Size of what a rank of a chain passes on at once. A part of this size is in a core's cache when its digest is
computed. Larger ones make a transfer to one receiver slower where memory is slow (benchmarks/weight_transfer.py).
"""
_ANY_PORT = 9
_SECRET_BYTES = 32
_SECRET = "secret"
"""Key in the store of a group, with which its members recognise one another."""
_INTERRUPT_TAG = 1 << 20  # no bucket has so many parts


def begin_digest(data: torch.Tensor, algorithm: DigestAlgorithm) -> BucketDigest:
    """The digest of a flat uint8 tensor whose length is a multiple of 8 and whose bytes are still to come. `xxh3`
    needs host memory.
    """
    return Xxh3Digest(data.numpy()) if algorithm == "xxh3" else SumsDigest(data)


class SumsDigest:
    """A digest that a GPU computes in parallel, in integer arithmetic with the same result on every device.

    It is the BLAKE2b hash of the sums of all rows and of all columns, modulo 2^64, in a table of 64-bit words. So every
    change of one to three words changes it, and a larger one unless it leaves the sum of every row and every column.
    """

    def __init__(self, data: torch.Tensor) -> None:
        assert data.dtype == torch.uint8 and data.dim() == 1 and data.numel() % 8 == 0
        words = data.view(torch.int64)
        num_rows = words.numel() // COLUMNS
        self._table_RC = words[: num_rows * COLUMNS].view(num_rows, COLUMNS)
        self._rest = words[num_rows * COLUMNS :]
        self._row_sums_R = torch.empty(num_rows, dtype=torch.int64, device=data.device)
        self._column_sums_C = torch.zeros(COLUMNS, dtype=torch.int64, device=data.device)
        self._next_row = 0

    def advance(self, num_bytes: int) -> None:
        end = min(num_bytes // (8 * COLUMNS), len(self._table_RC))
        rows_RC, row_sums_R = self._table_RC[self._next_row : end], self._row_sums_R[self._next_row : end]
        self._next_row = max(self._next_row, end)
        if rows_RC.device.type == "cpu":
            sum_rows(rows_RC.numpy(), row_sums_R.numpy(), self._column_sums_C.numpy())
        else:
            row_sums_R.copy_(rows_RC.sum(1))
            self._column_sums_C += rows_RC.sum(0)

    def finish(self) -> bytes:
        num_words = self._table_RC.numel() + self._rest.numel()
        self.advance(8 * num_words)
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for words in (self._row_sums_R, self._column_sums_C, self._rest):
            digest.update(words.cpu().numpy().tobytes())
        digest.update((8 * num_words).to_bytes(8, "little"))
        return digest.digest()


def empty_bucket(spec: BucketSpec, device: torch.device) -> torch.Tensor:
    """Allocates a buffer for a bucket and its digest: uint8 (num_bytes + 32,). In host memory a large one gets huge
    pages, because to enter one page after the other takes longer than to receive the bucket.
    """
    size = spec.num_bytes + DIGEST_BYTES
    if device.type != "cpu" or size < _LEAST_HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def fill_bucket(
    spec: BucketSpec, tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor, algorithm: DigestAlgorithm
) -> str:
    """Copies the tensors of a bucket into its buffer and appends the digest. Returns the digest in hex.

    In host memory the digest reads each tensor right after it was copied, while it is in the processor's cache.
    """
    data = buffer[: spec.num_bytes]
    digest = begin_digest(data, algorithm)
    end = 0
    for tensor in spec.tensors:
        data[end : tensor.offset] = 0  # alignment gaps must be equal in all runs
        end = tensor.offset + tensor.num_bytes
        value = tensors[tensor.name].detach()
        if tuple(value.shape) != tensor.shape or value.dtype != getattr(torch, tensor.dtype):
            raise DataError(
                f"parameter {tensor.name} is {value.dtype} {tuple(value.shape)}, the "
                f"manifest says {tensor.dtype} {tensor.shape}"
            )
        _view(tensor, data).copy_(value)
        if data.device.type == "cpu":
            digest.advance(end)
    data[end:] = 0
    found = digest.finish()
    buffer[spec.num_bytes :] = torch.frombuffer(bytearray(found), dtype=torch.uint8).to(buffer.device)
    return found.hex()


def check_bucket(spec: BucketSpec, buffer: torch.Tensor, digest: BucketDigest, *, place: str) -> str:
    """Finishes the digest of a received bucket and returns it in hex. Raises WeightTransferError if it is not the one
    that was sent with the bytes, or the one in the manifest.
    """
    sent = bytes(buffer[spec.num_bytes :].cpu().numpy())
    found = digest.finish()
    if found != sent or (spec.digest and found.hex() != spec.digest):
        expected = spec.digest or sent.hex()
        raise WeightTransferError(
            f"{place}: digest {found.hex()[:16]}… instead of {expected[:16]}…; nothing was applied"
        )
    return found.hex()


def _view(spec: TensorSpec, data: torch.Tensor) -> torch.Tensor:
    """A tensor inside a bucket's flat uint8 data, without a copy."""
    return data[spec.offset : spec.offset + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)


def merge_adapter(base: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """base + scaling·B·A, rounded once, to the base's dtype. Trainer and samplers share it, so their bits are equal."""
    dtype = torch.promote_types(base.dtype, torch.float32)
    merged = lora_b.to(dtype) @ lora_a.to(dtype)
    merged *= scaling
    merged += base
    return merged.to(base.dtype)


def bucket_tensors(spec: BucketSpec, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and views of the tensors in a bucket."""
    for tensor in spec.tensors:
        yield tensor.name, _view(tensor, buffer)


def export_cuda_bucket(buffer: torch.Tensor) -> dict[str, int | str]:
    """A JSON-serialisable handle of a flat uint8 CUDA tensor, to be kept until every importer has released it."""
    torch.cuda.current_stream(buffer.device).synchronize()
    fields = dict(zip(_IPC_FIELDS, reduce_tensor(buffer)[1], strict=True))
    handles = {name: base64.b64encode(fields[name]).decode() for name in _IPC_HANDLES}
    numbers = {name: int(fields[name]) for name in _IPC_NUMBERS}
    return {"gpu": _gpu_name(buffer.device), "num_bytes": buffer.numel(), **numbers, **handles}


def import_cuda_bucket(handle: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Maps the exporter's memory into this process on the same GPU. Raises WeightTransferError."""
    if handle["gpu"] != _gpu_name(device):
        raise WeightTransferError(
            f"CUDA IPC memory lies on GPU {handle['gpu']}, this engine is on {_gpu_name(device)}; use nccl"
        )
    fields: dict[str, Any] = {name: int(handle[name]) for name in _IPC_NUMBERS}
    fields |= {name: base64.b64decode(handle[name], validate=True) for name in _IPC_HANDLES}
    fields |= {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([int(handle["num_bytes"])]),
        "tensor_stride": (1,),
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": device.index,
        "requires_grad": False,
        "event_sync_required": bool(fields["event_sync_required"]),
    }
    try:
        mapped: torch.Tensor = rebuild_cuda_tensor(**fields)
    except RuntimeError as error:
        raise WeightTransferError(f"CUDA IPC memory cannot be mapped: {_first_line(error)}") from error
    return mapped


def _gpu_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)  # unlike the index, the same in all processes


_IPC_FIELDS = tuple(inspect.signature(rebuild_cuda_tensor).parameters)
"""In the order in which `reduce_tensor` gives them."""
_IPC_HANDLES = ("storage_handle", "ref_counter_handle", "event_handle")
_IPC_NUMBERS = (
    *("tensor_offset", "storage_size_bytes", "storage_offset_bytes"),
    *("ref_counter_offset", "event_sync_required"),
)


class WeightGroup:
    """One bare process group, outside torch's global state. Rank 0 sends, every other rank receives. All ranks open the
    same store. Raises WeightTransferError if a rank did not connect before the deadline, and EnvironmentLackError if
    this torch build lacks the backend.
    """

    def __init__(
        self, address: WeightGroupAddress, rank: int, device: torch.device, timeout_seconds: float, store: StoreSource
    ) -> None:
        self.address = address
        self.device = device
        self._rank = rank
        timeout = timedelta(seconds=timeout_seconds)
        try:
            # Held, because torch does not keep a store written in Python alive.
            self._store = cast("dist.Store", store.open())
            scoped = dist.PrefixStore(address.group_name, self._store)
            scoped.set_timeout(timeout)
            if rank == 0:
                scoped.set(_SECRET, secrets.token_hex(_SECRET_BYTES))
            self._group = _process_group(address, scoped, rank, device, timeout)
            if address.backend == "gloo":
                self._check_members(rank, scoped.get(_SECRET), timeout)
        except (RuntimeError, UnavailableError) as error:  # those of torch are RuntimeErrors; the store may be away
            raise WeightTransferError(
                f"weight group {address.group_name} of {address.world_size} ranks around {address.host} did not come "
                f"together within {timeout_seconds:g} s: {_first_line(error)}"
            ) from error

    def broadcast(
        self, buffer: torch.Tensor, timeout_seconds: float, each_part: Callable[[int], None] | None = None
    ) -> None:
        """Sends (rank 0) or receives (other ranks) one buffer in place. Over gloo, `each_part` is called with the end
        of each part, in bytes, when it has arrived, while others are on their way.

        Raises WeightTransferError, after which the group cannot be used.
        """
        assert buffer.device.type == self.device.type
        try:
            if self.address.backend == "gloo":
                self._pass_on(buffer, time.monotonic() + timeout_seconds, each_part)
                return
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            options.timeout = timedelta(seconds=timeout_seconds)
            _wait_on_gpu(self._group.broadcast([buffer], options), timeout_seconds)
        except RuntimeError as error:
            group = self.address.group_name
            raise WeightTransferError(f"broadcast in weight group {group} failed: {_first_line(error)}") from error

    def broadcast_size(self, size: int, timeout_seconds: float) -> int:
        """Sends (rank 0) or receives (other ranks) the size of the next buffer. Raises as `broadcast`."""
        number = torch.tensor([size])
        self.broadcast(number.view(torch.uint8), timeout_seconds)
        return int(number)

    def _pass_on(self, buffer: torch.Tensor, deadline: float, each_part: Callable[[int], None] | None) -> None:
        """Receives from the rank before and sends to the rank after. Gloo's own broadcast is a tree, in which rank 0
        sends to several.
        """

        def wait(work: dist.Work) -> None:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

        is_last = self._rank == self.address.world_size - 1
        parts = buffer.split(_PART_BYTES)
        coming = [self._group.recv([part], self._rank - 1, tag) for tag, part in enumerate(parts) if self._rank > 0]
        going = []
        for tag, part in enumerate(parts):
            if coming:
                wait(coming[tag])
            if not is_last:
                going.append(self._group.send([part], self._rank + 1, tag))
            if each_part is not None:  # the ranks after this one do not wait for it
                each_part(min((tag + 1) * _PART_BYTES, len(buffer)))
        for work in going:
            wait(work)

    def _check_members(self, rank: int, secret: bytes, timeout: timedelta) -> None:
        """Raises WeightTransferError unless every connection leads to a process that could read the store.

        Gloo accepts whoever connects first and names an expected connection. NCCL compares a number from the store.
        """
        peers = [peer for peer in range(self.address.world_size) if peer != rank]
        proofs = [_proof(secret, rank, peer) for peer in peers]
        sending = [self._group.send([proof], peer, 0) for peer, proof in zip(peers, proofs, strict=True)]
        for peer in peers:
            received = torch.zeros_like(_proof(secret, peer, rank))
            self._group.recv([received], peer, 0).wait(timeout)
            if not torch.equal(received, _proof(secret, peer, rank)):
                self.close()
                group = self.address.group_name
                raise WeightTransferError(f"a stranger connected to weight group {group} in place of rank {peer}")
        for work in sending:
            work.wait(timeout)

    def interrupt(self) -> None:
        """From another thread: ends a broadcast over gloo under way, which then raises WeightTransferError."""
        group = self._group
        if group is None or self.address.backend != "gloo":
            return
        # `abort` ends nobody's wait. A receive that times out closes all connections of this rank; one from a peer that
        # has closed its own fails without that.
        for peer in range(self.address.world_size):
            if peer != self._rank:
                with suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    group.recv([nothing], peer, _INTERRUPT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Ends the group. Peers still in a broadcast get an error at once instead of at their deadline."""
        if self._group is not None:
            self._group.abort()
        self._group = None


def _proof(secret: bytes, sender: int, receiver: int) -> torch.Tensor:
    proof = hmac.digest(secret, f"{sender} to {receiver}".encode(), "sha256")
    return torch.frombuffer(bytearray(proof), dtype=torch.uint8)


def _process_group(
    address: WeightGroupAddress, store: dist.Store, rank: int, device: torch.device, timeout: timedelta
) -> Any:
    if address.backend == "gloo":
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._threads = 2
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_local_address(address.host))]
        return dist.ProcessGroupGloo(store, rank, address.world_size, options)
    if address.backend == "nccl":
        if not hasattr(dist, "ProcessGroupNCCL") or device.type != "cuda":
            raise EnvironmentLackError("weights.backend nccl needs GPUs and a CUDA torch; use gloo or disk on CPUs")
        with _environment(
            TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
            TORCH_NCCL_BLOCKING_WAIT="0",
            TORCH_NCCL_ENABLE_MONITORING="0",  # a thread that would ask the store, in Python, until the process ends
        ):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with torch.cuda.device(device):
                group = dist.ProcessGroupNCCL(store, rank, address.world_size, options)
                group.eager_connect_single_device(device)  # otherwise the first broadcast connects, without a deadline
        return group
    raise EnvironmentLackError(f"weights.backend {address.backend} has no process group; gloo and nccl have")


def _wait_on_gpu(work: dist.Work, timeout_seconds: float) -> None:
    # NCCL's watchdog ends the process at a timeout. A sampler must outlive its sender, so the wait is done here.
    deadline = time.monotonic() + timeout_seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no end after {timeout_seconds:g} s")
        time.sleep(0.001)
    work.wait()
    torch.cuda.current_stream().synchronize()


def _local_address(host: str) -> str:
    """This machine's address on the route to the sender. Gloo would resolve the host name; in containers that fails."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, _ANY_PORT))  # UDP: nothing is sent
        except OSError as error:
            raise WeightTransferError(f"the sender's host {host} cannot be reached from here: {error}") from error
        return str(probe.getsockname()[0])


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split(". This is typically")[0]  # gloo appends misleading advice
