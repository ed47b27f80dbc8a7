"""Adds methods to vLLM's EngineCore that change the weights and the version stamp together, between two engine steps.

vLLM calls `register`, the entry point `tandem` of the group `vllm.general_plugins`, in every process it starts. Where
the engine is forked, rollout/vllm/launch.py calls `extend_engine_core` before the fork, so a checkout that is not
installed works too. One message changes weights and stamp: with two, the engine could make a step in between.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from tandem.protos.garbage_collection import collect_less_often
from tandem.rollout.sampler import TransferProgress, is_received
from tandem.rollout.vllm.block_allocation import allocate_whole_blocks
from tandem.rollout.vllm.collected_outputs import CollectedOutputs
from tandem.rollout.vllm.engine_folder import WORKER_EXTENSION, name_shared_memory
from tandem.rollout.vllm.gloo_device import share_gloo_device
from tandem.rollout.vllm.packed_embeddings import pack_embeddings_when_used
from tandem.rollout.vllm.shared_prompts import schedule_prompts_once
from tandem.rollout.vllm.small_weights import multiply_small_weights_with_torch

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.request import Request

    Step = Callable[[EngineCore], tuple[dict[int, EngineCoreOutputs], bool]]

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_EXTENDED = "_tandem_extended"


def register() -> None:
    """Entry point of the plugin. A process that vLLM started also ends with its parent from here on."""
    if multiprocessing.parent_process() is not None:
        _prepare_process()
    if "vllm.v1.engine.core" in sys.modules:  # importing it in a process without an engine only takes time
        extend_engine_core()


def extend_engine_core() -> None:
    """Adds the methods below to `EngineCore` in this process and its forks. May be called twice."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    if hasattr(EngineCore, _EXTENDED):
        return
    engine_core: Any = EngineCore
    engine_core.start_weight_transfer = _start_weight_transfer
    engine_core.weight_transfer_progress = _weight_transfer_progress
    engine_core.apply_staged_weights = _apply_staged_weights
    engine_core.send_collected_outputs = _send_collected_outputs
    engine_core.add_request = _salted(EngineCore.add_request)
    engine_core.add_rows = _add_rows
    engine_core.abort_requests = _forgetting_outputs(EngineCore.abort_requests)
    engine_core.step = _collecting_outputs(EngineCore.step)
    engine_core.__init__ = _collecting_once_started(EngineCore.__init__)
    run = EngineCoreProc.run_engine_core

    @functools.wraps(run)
    def run_engine_core(*args: object, **kwargs: object) -> None:
        _prepare_process()
        run(*args, **kwargs)

    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)  # type: ignore[method-assign]
    pack_embeddings_when_used()
    multiply_small_weights_with_torch()
    setattr(EngineCore, _EXTENDED, True)


def _prepare_process() -> None:
    """For a process of the engine, which ends with its parent and frees its memory by ending."""
    _die_with_parent()
    name_shared_memory()
    share_gloo_device()
    # vLLM would unfreeze and collect the objects of its start before the process ends. In a forked process that copies
    # the memory that they are in, which takes seconds.
    gc.unfreeze = lambda: None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # the parent ended before this process asked for the signal


def _add_rows(core: EngineCoreProc, requests: Sequence[tuple[object, Sequence[tuple[str, int | None]]]]) -> None:
    """Adds requests that differ in id and seed only: each with its (id, seed) pairs. One message for all of them costs
    less than one each, and their prompts are read in the same step. If one cannot be added, none is.
    """
    import msgspec
    from vllm.v1.engine import EngineCoreRequest

    added = []
    for encoded, rows in requests:
        shared = msgspec.convert(encoded, EngineCoreRequest)
        for request_id, seed in rows:
            row, params = copy(shared), copy(shared.sampling_params)
            assert params is not None
            params.seed = seed
            row.sampling_params = params
            row.request_id = row.external_req_id = request_id
            added.append(core.preprocess_add_request(row))
    for request, wave in added:
        core.add_request(request, wave)


def _start_weight_transfer(core: EngineCore, kind: str, arguments: dict[str, object]) -> None:
    core.collective_rpc(f"tandem_start_{kind}", kwargs=arguments)


def _weight_transfer_progress(core: EngineCore, stamp: str | None) -> tuple[Sequence[TransferProgress], float]:
    """The progress of every worker. With a stamp, applies what all have received, and returns the duration, too."""
    progress: Sequence[TransferProgress] = core.collective_rpc("tandem_progress")
    return progress, _apply_staged_weights(core, stamp) if stamp and is_received(progress) else 0.0


def _apply_staged_weights(core: EngineCore, stamp: str) -> float:
    """Loads the staged weights on every worker and changes the stamp, between two steps. Returns the duration."""
    if core.batch_queue:
        raise RuntimeError("steps are in flight: outputs sampled before the update would get the new stamp")
    started = time.perf_counter()
    _send_collected_outputs(core)  # they carry the stamp of the weights that sampled them
    try:
        core.collective_rpc("tandem_apply")
    except Exception:
        log.exception("the weights of %s are not in place as a whole; the engine ends", stamp)
        raise SystemExit(1) from None  # vLLM would report an Exception and go on
    core.set_weight_version(stamp)
    for request in core.scheduler.requests.values():  # type: ignore[attr-defined]
        if request.num_computed_tokens == 0:
            request.skip_reading_prefix_cache = True  # its salt names the previous version
    return time.perf_counter() - started


def _send_collected_outputs(core: EngineCore) -> dict[str, int]:
    """Sends the outputs that are kept, before the answer to this call. Returns the tokens sampled by each request."""
    from vllm.v1.engine import EngineCoreOutputs

    if collected := _collected_of(core).take_all():
        outputs = EngineCoreOutputs(outputs=collected, weight_version=core.get_weight_version())
        core.output_queue.put_nowait((0, outputs))  # type: ignore[attr-defined]  # 0: the only client
    requests = core.scheduler.requests  # type: ignore[attr-defined]
    return {request_id: request.num_output_tokens for request_id, request in requests.items()}


def _collected_of(core: EngineCore) -> CollectedOutputs:
    collected: CollectedOutputs | None = getattr(core, "_tandem_collected", None)
    if collected is None:
        collected = core._tandem_collected = CollectedOutputs()  # type: ignore[attr-defined]
    return collected


def _collecting_outputs(step: Step) -> Step:
    @functools.wraps(step)
    def collect(core: EngineCore) -> tuple[dict[int, EngineCoreOutputs], bool]:
        by_client, model_executed = step(core)
        requests = core.scheduler.requests  # type: ignore[attr-defined]
        for message in by_client.values():
            message.outputs = _collected_of(core).add(message.outputs, requests)
        # A message without outputs would still wake the client.
        ready = {client: message for client, message in by_client.items() if message.outputs or message.scheduler_stats}
        return ready, model_executed

    return collect


def _forgetting_outputs(abort: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(abort)
    def forget(core: EngineCore, request_ids: list[str]) -> None:
        _collected_of(core).forget(request_ids)
        abort(core, request_ids)

    return forget


def _collecting_once_started(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def start(core: EngineCore, *args: object, **kwargs: object) -> None:
        gc.disable()  # the objects imported here stay, and vLLM freezes them afterwards
        try:
            init(core, *args, **kwargs)
        finally:
            gc.enable()
        if core.vllm_config.parallel_config.worker_extension_cls == WORKER_EXTENSION:  # else nobody copies the prompts
            collect_less_often()
            schedule_prompts_once(core.scheduler)  # type: ignore[arg-type]
            allocate_whole_blocks(core.scheduler)  # type: ignore[arg-type]

    return start


def _salted(add_request: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(add_request)
    def add(core: EngineCore, request: Request, *args: object) -> None:
        # A request salted with the previous version must not read that version's blocks after an update.
        if request.cache_salt != core.get_weight_version():
            request.skip_reading_prefix_cache = True
        add_request(core, request, *args)

    return add
