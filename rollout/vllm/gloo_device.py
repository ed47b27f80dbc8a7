"""Gives all gloo groups of a process one device.

A device of gloo has a thread that wakes up a hundred times a second, even if nothing is sent. torch makes a device for
each group, and vLLM 13 groups for an engine with one worker. Their threads took 7 % of the engine's processor time in
the demo (benchmarks/step_cpu.py), and interrupted sampling and training.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d


@functools.cache
def _devices() -> list[object]:
    """The devices of this process: of the interfaces that the environment names, as torch reads it, or the default."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]


class GlooGroup(ProcessGroupGloo):
    """A group as torch makes it, on the devices of the process."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = _devices()
        options._threads = 2 * len(options._devices)
        super().__init__(store, rank, size, options)


def share_gloo_device() -> None:
    """Makes torch build its gloo groups in this process on the same devices."""
    distributed_c10d.ProcessGroupGloo = GlooGroup  # type: ignore[misc]
