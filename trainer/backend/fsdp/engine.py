"""The FSDP backend (see `Backend`): FSDP2's `fully_shard`. As with ZeRO stage 3, every rank holds an even part of every
parameter, its gradient and its optimizer state. A model's layers are gathered one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tandem.protos.errors import ConfigError, DataError
from tandem.trainer.backend import process_group
from tandem.trainer.backend.adamw import clipping_adamw
from tandem.trainer.backend.base import TrainingEngine, enable_gradient_checkpointing
from tandem.trainer.config import TrainerConfig

_MOMENTS = "exp_avg", "exp_avg_sq"

join_process_group = process_group.join_process_group
leave_process_group = process_group.leave_process_group


class FsdpEngine(TrainingEngine):
    """In bfloat16 the partitioned weights are the optimizer's float32 master weights; forward and backward passes
    gather them as bfloat16.
    """

    def __init__(self, config: TrainerConfig, model: nn.Module, *, trained: bool, offload: bool) -> None:
        super().__init__(model)
        self._dtypes = {name: getattr(torch, dtype) for name, dtype, _ in self.specs}
        _shard(model, config, master_weights=trained, offload=offload)
        self._optimizer = None
        if trained:
            self._optimizer = clipping_adamw(config, (each for each in model.parameters() if each.requires_grad))

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, learning_rate: float) -> float | None:
        optimizer = self._optimizer
        assert optimizer is not None, "a frozen engine takes no step"
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
        return None if optimizer.overflow else optimizer._global_grad_norm

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            yield {name: parameters[name].to(self._dtypes[name]).full_tensor() for name in names}

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        safetensors.torch.save_file(self._local_state(), _file(folder))

    def load(self, folder: Path) -> None:
        assert self._optimizer is not None, "a frozen engine is not in a checkpoint"
        try:
            written = safetensors.torch.load_file(_file(folder))
        except (OSError, safetensors.SafetensorError) as error:
            raise DataError(
                f"checkpoint {folder.parent} lacks FSDP's files ({error}): remove it to resume from the one before it"
            ) from error
        self._optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in self._trained():
                _local(parameter).copy_(written[name])
                if f"{name}:step" in written:
                    moments = {key: torch.zeros_like(parameter) for key in _MOMENTS}
                    for key, moment in moments.items():
                        _local(moment).copy_(written[f"{name}:{key}"])
                    self._optimizer.state[parameter] = {"step": written[f"{name}:step"], **moments}

    def close(self) -> None:
        self._optimizer = None
        self.module = None

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, each) for name, each in self.module.named_parameters() if each.requires_grad]

    def _local_state(self) -> dict[str, Tensor]:
        """This rank's part of every trained weight and of its AdamW state, which exists after the first step."""
        assert self._optimizer is not None, "a frozen engine is not in a checkpoint"
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._trained():
            tensors[name] = _local(parameter).detach()
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{name}:{key}"] = _local(value)
        return {name: tensor.contiguous() for name, tensor in tensors.items()}


def build_engine(config: TrainerConfig, model: nn.Module) -> FsdpEngine:
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return FsdpEngine(config, model, trained=True, offload=config.offload_parameters)


def build_frozen_engine(config: TrainerConfig, model: nn.Module, *, offload: bool) -> FsdpEngine:
    model.requires_grad_(False).eval()
    return FsdpEngine(config, model, trained=False, offload=offload)


def _shard(model: nn.Module, config: TrainerConfig, *, master_weights: bool, offload: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if offload and device == "cpu":
        raise ConfigError(
            "FSDP offloads from a GPU to host memory, and this machine has no GPU: switch trainer.offload_parameters, "
            "trainer.offload_optimizer and trainer.offload_reference off"
        )
    precision = MixedPrecisionPolicy()
    if config.dtype == "bfloat16" and master_weights:
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        # Inputs are not cast, because that would round a micro-batch's temperatures to bfloat16.
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    arguments: dict[str, Any] = {
        "mesh": init_device_mesh(device, (distributed.get_world_size(),)),
        "reshard_after_forward": True,
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in [each for each in model.modules() if type(each).__name__ in layers]:
        fully_shard(module, **arguments)
    fully_shard(model, **arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed over ranks, not averaged, because the loss is a share of the whole batch's.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction with a factor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _file(folder: Path) -> Path:
    return folder / f"rank-{distributed.get_rank():05d}.safetensors"
