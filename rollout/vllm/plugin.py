"""Adds methods to vLLM's EngineCore that change the weights and the version stamp together, between two engine steps.

vLLM calls `register`, the entry point `tandem` of the group `vllm.general_plugins`, in every process it starts. Where
the engine is forked, rollout/vllm/launch.py calls `extend_engine_core` before the fork, so a checkout that is not
installed works too.

Why a plugin: a worker call that applies weights and a second call that sets the version would be two messages. Between
them the engine could make a step, whose tokens would carry the wrong stamp. Here one message does both.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.rollout.sampler import TransferProgress
from tandem.rollout.vllm.engine_folder import name_shared_memory

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

_PR_SET_PDEATHSIG = 1
_EXTENDED = "_tandem_extended"


def register() -> None:
    """Entry point. In a process that vLLM started, also ties its life to its parent's, even when that is killed by -9,
    and names its shared memory.
    """
    if multiprocessing.parent_process() is not None:
        _die_with_parent()
        name_shared_memory()
    if "vllm.v1.engine.core" in sys.modules:  # importing it where no engine lives would only cost time
        extend_engine_core()


def extend_engine_core() -> None:
    """Gives this process's `EngineCore` class, and every process forked from here, the methods below. May be called
    twice.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    if hasattr(EngineCore, _EXTENDED):
        return
    engine_core: Any = EngineCore
    engine_core.start_weight_transfer = _start_weight_transfer
    engine_core.weight_transfer_progress = _weight_transfer_progress
    engine_core.apply_staged_weights = _apply_staged_weights
    engine_core.add_request = _salted(EngineCore.add_request)
    engine_core.__init__ = _collecting_once_started(EngineCore.__init__)
    run = EngineCoreProc.run_engine_core

    @functools.wraps(run)
    def run_engine_core(*args: Any, **kwargs: Any) -> None:
        _die_with_parent()
        name_shared_memory()
        try:
            run(*args, **kwargs)
        finally:
            # the interpreter's last look through all objects would take longer than all the rest of the end
            gc.freeze()

    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)  # type: ignore[method-assign]
    setattr(EngineCore, _EXTENDED, True)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # it died before we asked to be told


def _start_weight_transfer(core: EngineCore, kind: str, arguments: dict[str, object]) -> None:
    """Starts a transfer on every worker; it goes on in threads beside the engine's steps."""
    core.collective_rpc(f"tandem_start_{kind}", kwargs=arguments)


def _weight_transfer_progress(core: EngineCore) -> Sequence[TransferProgress]:
    """How far the transfer is on each worker."""
    return core.collective_rpc("tandem_progress")


def _apply_staged_weights(core: EngineCore, stamp: str) -> float:
    """Loads what every worker has staged and changes the stamp, between two steps. Returns the seconds the engine stood
    still.
    """
    if core.batch_queue:
        raise RuntimeError("steps are in flight: outputs sampled before the update would get the new stamp")
    started = time.perf_counter()
    core.collective_rpc("tandem_apply")
    core.set_weight_version(stamp)
    for request in core.scheduler.requests.values():  # type: ignore[attr-defined]
        if request.num_computed_tokens == 0:
            request.skip_reading_prefix_cache = True  # its salt names the version before
    return time.perf_counter() - started


def _collecting_once_started(init: Any) -> Any:
    @functools.wraps(init)
    def start(core: EngineCore, *args: Any, **kwargs: Any) -> None:
        gc.disable()  # what is imported here stays, and vLLM freezes it at the end of this
        try:
            init(core, *args, **kwargs)
        finally:
            gc.enable()

    return start


def _salted(add_request: Any) -> Any:
    @functools.wraps(add_request)
    def add(core: EngineCore, request: Request, *args: Any) -> None:
        # A request salted with one version and queued while the next was applied must not read blocks of the first.
        if request.cache_salt != core.get_weight_version():
            request.skip_reading_prefix_cache = True
        add_request(core, request, *args)

    return add
