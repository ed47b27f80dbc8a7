"""The DeepSpeed backend (see `Backend`): ZeRO stages 0 to 3. Nothing is compiled, neither by DeepSpeed nor by torch."""

from __future__ import annotations

import copyreg
import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from tandem.protos.hidden_modules import hidden_module

# Set before DeepSpeed is imported. The first line avoids a warning from its device detection. The second prevents
# loading torch's compiler (1 s) for an optimizer that DeepSpeed decorates with torch.compile.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# DeepSpeed's autotuner, which nothing here uses, imports MLflow where it is installed. That takes a second.
with hidden_module("mlflow"):
    import deepspeed

import deepspeed.comm.comm as deepspeed_comm
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, distributed, nn

from tandem.protos.errors import DataError
from tandem.trainer.backend import process_group
from tandem.trainer.backend.adamw import adamw_arguments, clipping_adamw
from tandem.trainer.backend.base import TrainingEngine, enable_gradient_checkpointing
from tandem.trainer.config import TrainerConfig

_MAX_BUCKET_ELEMENTS = 200_000_000
_MAX_PERSISTENT_ELEMENTS = 100_000
_SAVED_CLASSES = [ZeroStageEnum, LossScaler, fragment_address]
"""Classes that hold a few numbers in the files of DeepSpeed's optimizers."""
# Python before 3.11.4 names `getattr` in the pickle of an enumeration, which is not to be called from a file.
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))
_REFUSED_NAME = re.compile(r"GLOBAL (\S+)")


class DeepSpeedEngine(TrainingEngine):
    """`deepspeed` is DeepSpeed's own engine."""

    def __init__(self, config: TrainerConfig, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__(model)
        self._zero_stage = config.resolved_zero_stage
        self.holds_whole_weights = self._zero_stage < 3
        self._has_frozen = self.num_trained < self.num_elements
        self.deepspeed: Any
        settings = _engine_config(config, self.num_elements, self.num_trained)
        self.deepspeed, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        if _runs_bare_optimizer(config) and distributed.get_world_size() == 1:
            self.deepspeed.enable_backward_allreduce = False  # it would copy all gradients and add nothing

    def __call__(self, **inputs: Any) -> Any:
        return self.deepspeed(**inputs)

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks, but gradients of ranks must be summed.
        self.deepspeed.backward(loss * distributed.get_world_size(), scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float | None:
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        self.deepspeed.step()
        return float(self.deepspeed.get_global_grad_norm()) if self.deepspeed.was_step_applied() else None

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        named = dict(self.module.named_parameters())
        chosen = {name: named[name] for name in names}
        with deepspeed.zero.GatheredParameters(
            list(chosen.values()), modifier_rank=None, enabled=self._zero_stage == 3
        ):
            yield {name: parameter.detach() for name, parameter in chosen.items()}

    def save(self, folder: Path) -> None:
        self.deepspeed.save_checkpoint(
            str(folder.parent), tag=folder.name, save_latest=False, exclude_frozen_parameters=self._has_frozen
        )

    def load(self, folder: Path) -> None:
        self.deepspeed.checkpoint_engine.load = _load_file  # its own runs whatever code a file names
        try:
            path, _ = self.deepspeed.load_checkpoint(
                str(folder.parent), tag=folder.name, load_module_strict=not self._has_frozen
            )
        except UnpicklingError as error:
            named = _REFUSED_NAME.search(str(error))
            what = f" ({named[1]})" if named else ""
            raise DataError(
                f"checkpoint {folder.parent} holds more than tensors and settings{what}, so Tandem did not write it "
                "or it is damaged: remove it to resume from the one before it"
            ) from None
        if path is None:
            raise DataError(
                f"checkpoint {folder.parent} lacks DeepSpeed's files: remove it to resume from the one before it"
            )

    def close(self) -> None:
        self.deepspeed.destroy()
        # Stage 3 adds the model to this list and never removes it, which would keep all of its memory.
        stack = parameter_offload.FWD_MODULE_STACK
        stack[:] = [module for module in stack if module is not self.module]


def _load_file(path: str, map_location: Any = None) -> Any:
    """Reads one of DeepSpeed's files, which are pickles. Raises UnpicklingError for one that names other code than
    tensors, plain values and `_SAVED_CLASSES`.
    """
    with torch.serialization.safe_globals(_SAVED_CLASSES):
        return torch.load(path, map_location=map_location, weights_only=True)


def _engine_config(config: TrainerConfig, num_parameters: int, num_trained: int) -> dict[str, Any]:
    """DeepSpeed's configuration. The caller decides when gradients are complete: any number of backward calls, then one
    step.
    """
    stage = config.resolved_zero_stage
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": torch.cuda.is_available() and stage >= 2,  # DeepSpeed refuses it below
        "contiguous_gradients": True,
        "reduce_bucket_size": min(num_trained or num_parameters, _MAX_BUCKET_ELEMENTS),
    }
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if _runs_bare_optimizer(config) else config.gradient_clip,
        "steps_per_print": 10**9,
        # Avoids compiling DeepSpeed's CPU Adam (84 s); torch's fused one is as fast.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    in_host_memory = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if config.offload_optimizer:
        zero["offload_optimizer"] = in_host_memory
    if config.offload_parameters:
        zero["offload_param"] = in_host_memory
    if config.resolved_zero_stage == 3:
        # Small tensors stay whole on every rank. DeepSpeed's bound is absolute; a relative one shards small models too.
        zero["stage3_param_persistence_threshold"] = min(num_parameters // 1000, _MAX_PERSISTENT_ELEMENTS)
    if config.dtype == "bfloat16":
        values["bf16"] = {"enabled": True}
        values["communication_data_type"] = "fp32"
        # Without ZeRO, DeepSpeed accumulates only in the model's dtype; its master weights are still float32.
        values["data_types"] = {"grad_accum_dtype": "bf16" if config.resolved_zero_stage == 0 else "fp32"}
    return values


def build_engine(config: TrainerConfig, model: nn.Module) -> DeepSpeedEngine:
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if _runs_bare_optimizer(config):
        return DeepSpeedEngine(config, model, clipping_adamw(config, trained))
    return DeepSpeedEngine(config, model, torch.optim.AdamW(trained, **adamw_arguments(config)))


def build_frozen_engine(config: TrainerConfig, model: nn.Module, *, offload: bool) -> DeepSpeedEngine:
    model.requires_grad_(False).eval()
    frozen = config.model_copy(update={"zero_stage": 3, "offload_parameters": offload, "offload_optimizer": False})
    return DeepSpeedEngine(frozen, model, None)


def _runs_bare_optimizer(config: TrainerConfig) -> bool:
    """Whether DeepSpeed calls the optimizer directly (stage 0 in float32), which then has to clip and skip itself.
    Otherwise DeepSpeed's ZeRO and bf16 optimizers do both around a plain AdamW.
    """
    return config.resolved_zero_stage == 0 and config.dtype == "float32"


def join_process_group(timeout_seconds: float) -> torch.device:
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"deepspeed\.")  # one warning per collective
    deepspeed.utils.logger.setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        # Avoids compiling DeepSpeed's shared-memory collectives (a minute, needs g++), which training never uses. Where
        # this is not set, DeepSpeed runs a compiler to find out which of its operators could be compiled.
        deepspeed.ops.__compatible_ops__ = {}
    device = process_group.join_process_group(timeout_seconds)
    if process_group.is_alone():
        os.environ["LOCAL_RANK"] = "0"  # required by DeepSpeed
    deepspeed.init_distributed(
        dist_backend=distributed.get_backend(),
        timeout=timedelta(seconds=timeout_seconds),
        auto_mpi_discovery=False,
        verbose=False,
    )
    return device


def leave_process_group() -> None:
    if distributed.is_initialized():
        deepspeed_comm.destroy_process_group()
        deepspeed_comm.cdb = None  # else DeepSpeed would keep using the closed group
        if process_group.is_alone():
            del os.environ["LOCAL_RANK"]
