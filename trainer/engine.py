"""The DeepSpeed engines: process group, model, optimizer. Nothing is compiled here, neither by DeepSpeed nor by
torch.
"""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

# Set before DeepSpeed is imported. It finds the device by itself, but with a warning; and it imports an optimizer
# decorated with torch.compile, which without the second line loads torch's whole compiler (1 s) for nothing.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import deepspeed
import deepspeed.comm.comm as deepspeed_comm
from torch import distributed, nn

from tandem.protos.errors import ConfigError
from tandem.trainer.config import TrainerConfig
from tandem.trainer.engine_options import check_engine

_MAX_BUCKET_ELEMENTS = 200_000_000
_MAX_PERSISTENT_ELEMENTS = 100_000


class ClippingAdamW(torch.optim.AdamW):
    """AdamW that clips by global norm and skips a step whose norm is not finite.

    DeepSpeed's ZeRO and bf16 optimizers do both around a plain AdamW; at stage 0 in float32 it calls the optimizer
    bare.
    """

    overflow = False
    _global_grad_norm = 0.0
    max_norm = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # DeepSpeed passes no closure
        parameters = [
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        self.overflow = not bool(torch.isfinite(norm))
        self._global_grad_norm = float(norm)
        if self.overflow:
            return
        if self.max_norm:
            nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
        super().step(closure)


def engine_config(config: TrainerConfig, model: nn.Module) -> dict[str, Any]:
    """DeepSpeed's configuration. The caller owns the accumulation boundary: any number of backward calls, then one
    step.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    bare = config.zero_stage == 0 and config.dtype == "float32"
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0
        if bare
        else config.gradient_clip,  # ClippingAdamW does it where DeepSpeed's optimizers do not
        "steps_per_print": 10**9,
        # DeepSpeed's CPU Adam would be compiled (84 s), torch's fused one is as fast
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": torch.cuda.is_available(),
            "contiguous_gradients": True,
            "reduce_bucket_size": min(num_trained or num_parameters, _MAX_BUCKET_ELEMENTS),
        },
    }
    in_host_memory = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if config.offload_optimizer:
        values["zero_optimization"]["offload_optimizer"] = in_host_memory
    if config.offload_parameters:
        values["zero_optimization"]["offload_param"] = in_host_memory
    if config.zero_stage == 3:
        # Small tensors stay whole on every rank. DeepSpeed's bound is absolute; relative to the model it shards small
        # models, too.
        threshold = min(num_parameters // 1000, _MAX_PERSISTENT_ELEMENTS)
        values["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    if config.dtype == "bfloat16":
        values["bf16"] = {"enabled": True}
        values["communication_data_type"] = "fp32"
        # Without ZeRO, DeepSpeed accumulates in the model's dtype only; its master weights are float32 all the same.
        values["data_types"] = {"grad_accum_dtype": "bf16" if config.zero_stage == 0 else "fp32"}
    return values


def build_engine(config: TrainerConfig, model: nn.Module) -> Any:
    """The DeepSpeed engine around a model, with AdamW at learning rate 0 until one is set. Frozen parameters stay
    frozen.

    Raises:
        ConfigError: settings that do not go together, or a model without gradient checkpointing that is to have it.
    """
    check_engine(config)
    if config.gradient_checkpointing:
        _recompute_activations(model)
    arguments: dict[str, Any] = {
        "lr": 0.0,
        "betas": config.adam_betas,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer
    if config.zero_stage == 0 and config.dtype == "float32":
        optimizer = ClippingAdamW(trained, **arguments)
        optimizer.max_norm = config.gradient_clip
    else:
        optimizer = torch.optim.AdamW(trained, **arguments)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=engine_config(config, model))
    return engine


def build_frozen_engine(config: TrainerConfig, model: nn.Module, *, offload: bool) -> Any:
    """A ZeRO-3 engine of a model that is only evaluated: no gradients, no optimizer. `offload`: its weights live in
    host memory.
    """
    model.requires_grad_(False).eval()
    frozen = config.model_copy(update={"zero_stage": 3, "offload_parameters": offload, "offload_optimizer": False})
    engine, *_ = deepspeed.initialize(model=model, config=engine_config(frozen, model))
    return engine


def _recompute_activations(model: nn.Module) -> None:
    try:
        # Not reentrant: with adapters, no input of the first layer requires a gradient.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    except (AttributeError, ValueError) as error:
        raise ConfigError(
            f"trainer.gradient_checkpointing: {type(model).__name__} does not support it; switch it off"
        ) from error


def start_process_group(timeout_seconds: float) -> torch.device:
    """Joins the ranks that torchrun's variables describe (none set: a group of one) and returns this rank's device.

    NCCL on CUDA; gloo with one deterministic thread a rank (or OMP_NUM_THREADS of them) on CPUs.
    """
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"(deepspeed|torch\.distributed)\."
    )  # a line a collective
    deepspeed.utils.logger.setLevel(logging.WARNING)
    device = _device()
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_seconds)
    if not distributed.is_initialized():
        if _alone():
            os.environ["LOCAL_RANK"] = "0"  # DeepSpeed insists on it
            distributed.init_process_group(
                backend, store=distributed.HashStore(), rank=0, world_size=1, timeout=timeout
            )
        deepspeed.init_distributed(dist_backend=backend, timeout=timeout, auto_mpi_discovery=False, verbose=False)
    return device


def leave_process_group() -> None:
    """Closes the process group, so that the process may end quietly or join another one."""
    if distributed.is_initialized():
        deepspeed_comm.destroy_process_group()
        deepspeed_comm.cdb = None  # DeepSpeed would go on using the closed one
        if _alone():
            del os.environ["LOCAL_RANK"]


def _alone() -> bool:
    return "WORLD_SIZE" not in os.environ


def _device() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    # DeepSpeed's shared-memory collectives would be compiled (a minute, needs g++), and training never uses them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads such memory
    return torch.device("cpu")


def whole_parameters(parameters: list[nn.Parameter], zero_stage: int) -> AbstractContextManager[None]:
    """Inside the block, every rank has these parameters whole. All ranks enter."""
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=None, enabled=zero_stage == 3)
