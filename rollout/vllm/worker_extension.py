"""vLLM's worker extension: a weight receiver in each tensor-parallel worker, which loads staged weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tandem.rollout.base_weights import checkpoint_shapes, local_folder
from tandem.rollout.sampler import TransferProgress
from tandem.rollout.vllm.exact_top_k import keep_k_tokens
from tandem.rollout.vllm.replaced_modules import can_be_replaced, load_beside, replace
from tandem.rollout.vllm.seeded_requests import continue_random_numbers, draw_seeds_together
from tandem.rollout.vllm.shared_prompts import copy_prompts
from tandem.rollout.weight_receiver import StagedReceiver

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerBase


class WeightReceiver:
    """vLLM's worker extension. vLLM adds its methods to the worker of each tensor-parallel rank."""

    def tandem_start_join(self: WorkerBase, **arguments: Any) -> None:
        with _threads_on_the_samplers_cores():
            _receiver_of(self).start_join(**arguments)

    def tandem_start_receive(self: WorkerBase, **arguments: Any) -> None:
        with _threads_on_the_samplers_cores():
            _receiver_of(self).start_receive(**arguments)

    def tandem_progress(self: WorkerBase) -> TransferProgress:
        return _receiver_of(self).progress()

    def tandem_apply(self: WorkerBase) -> None:
        """Loads the staged version, if any, into the running model. EngineCore calls it between two steps."""
        staged = _receiver_of(self).take()
        if not staged:
            return
        model = self.model_runner.get_model()
        if can_be_replaced(model):
            replace(staged)
        else:
            load_into_running_model(model, staged, self.vllm_config)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def _threads_on_the_samplers_cores() -> Iterator[None]:
    """Threads started inside may use the sampler's cores: vLLM binds this one, and so its threads, to the engine's."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _receiver_of(worker: WorkerBase) -> StagedReceiver:
    receiver: StagedReceiver | None = getattr(worker, "_tandem_receiver", None)
    if receiver is None:
        tied = _is_tied(worker.vllm_config)
        folder = worker.vllm_config.model_config.model
        model = worker.model_runner.get_model()
        receiver = StagedReceiver(
            worker.device,
            worker.rank,
            checkpoint_shapes(Path(folder)),
            frozenset({"lm_head.weight"}) if tied else frozenset(),
            local_folder(folder),
            partial(load_beside, model, tied=tied) if can_be_replaced(model) else list,
        )
        continue_random_numbers(worker)  # here, for a sampler's first call reaches every worker before its requests do
        copy_prompts(worker)
        if worker.device.type == "cpu":
            keep_k_tokens()
            draw_seeds_together(worker)
        worker._tandem_receiver = receiver
    return receiver


def load_into_running_model(
    model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]], vllm_config: VllmConfig
) -> None:
    """Loads a full set of Hugging Face tensors in place: addresses used by kernels and CUDA graphs stay valid."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    # It warns of layers without own weights (rotary embeddings, a tied head). Required tensors were checked by name.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    with set_current_vllm_config(vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors))  # type: ignore[operator]
        finalize_layerwise_reload(model, vllm_config.model_config)
        if _is_tied(vllm_config):
            _repack_tied_head(model)


def _repack_tied_head(model: torch.nn.Module) -> None:
    # The reload skips a tied head, which shares the embedding's tensor. On CPUs it would keep its old packed weights.
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _is_tied(vllm_config: VllmConfig) -> bool:
    return bool(getattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", False))
