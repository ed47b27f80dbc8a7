"""The ranks' process group, and the torch settings that training relies on."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta

import torch
from torch import distributed


def join_process_group(timeout_seconds: float) -> torch.device:
    """Joins the ranks given by torchrun's variables (a group of one without them) and returns this rank's device.

    NCCL on CUDA; gloo on CPUs, with one deterministic thread per rank (or OMP_NUM_THREADS of them).
    """
    # torch warns at every collective.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    device = _device()
    if not distributed.is_initialized():
        backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_seconds)
        if is_alone():
            distributed.init_process_group(
                backend, store=distributed.HashStore(), rank=0, world_size=1, timeout=timeout
            )
        else:
            distributed.init_process_group(backend, timeout=timeout)
    return device


def leave_process_group() -> None:
    """Closes the process group, so that the process can end or join another one."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def is_alone() -> bool:
    """Whether this process was started without torchrun's variables."""
    return "WORLD_SIZE" not in os.environ


def _device() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.use_deterministic_algorithms(True)
    # Training never reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return torch.device("cpu")
