"""The ranks' process group, and the torch settings that training relies on."""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from typing import cast

import torch
from torch import distributed

from tandem.protos.store_source import StoreSource
from tandem.trainer.backend.registry import RANK_STORE

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_stores: list[distributed.Store] = []  # torch does not keep a store written in Python alive


def join_process_group(timeout_seconds: float) -> torch.device:
    """Joins the other ranks that the environment names (`RANK_VARIABLES`; a group of one without them) and returns
    this rank's device.

    NCCL on CUDA; gloo on CPUs, with one deterministic thread per rank. If all ranks are on one machine, gloo listens on
    loopback.
    """
    # torch warns at every collective.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    device = _device()
    if not distributed.is_initialized():
        backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_seconds)
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            # Not so for NCCL: the weight group of this process may reach samplers on other machines.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        found = distributed.HashStore() if is_alone() else StoreSource.from_json(os.environ[RANK_STORE]).open()
        store = cast("distributed.Store", found)
        _stores[:] = [store]
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return device


def leave_process_group() -> None:
    """Closes the process group, so that the process can end or join another one."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
    _stores.clear()


def is_alone() -> bool:
    """Whether this process was started as the only rank."""
    return "WORLD_SIZE" not in os.environ


def _device() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)  # whatever OMP_NUM_THREADS is: sums depend on it
    torch.use_deterministic_algorithms(True)
    # Training never reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return torch.device("cpu")
