"""The interface of training backends: an engine around a model, and the functions that build one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tandem.protos.errors import ConfigError
from tandem.protos.manifest import ParameterSpec
from tandem.trainer.config import TrainerConfig


def parameter_specs(module: nn.Module) -> tuple[ParameterSpec, ...]:
    """Specs of every parameter of an unpartitioned module; tied ones once, under the first of their names."""
    return tuple(
        (name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))
        for name, parameter in module.named_parameters()
    )


class TrainingEngine(ABC):
    """A model and its optimizer with state spread over the ranks. All ranks call the same methods in the same order.

    `module` is the model. Its parameters may be partitioned, so read them only through `gather`. `dtype` is that of the
    forward pass; the parameters themselves may be kept in a wider one.
    """

    holds_whole_weights = False
    """Whether every rank has all parameters, and only `step` and `load` change them. Another thread may then `gather`
    during a forward or backward pass, without the other ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        """Records the parameter specs and dtype before the parameters are partitioned or widened."""
        self.module: Any = module
        self.dtype = next(module.parameters()).dtype
        self.specs = parameter_specs(module)
        self.num_elements = sum(parameter.numel() for parameter in module.parameters())
        self.num_trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)

    @abstractmethod
    def __call__(self, **inputs: Any) -> Any:
        """The model's forward pass."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a micro-batch's share of the loss. Micro-batches and ranks are summed until `step`."""

    @abstractmethod
    def step(self, learning_rate: float) -> float | None:
        """Clips the gradient, takes the AdamW step and clears the gradient. Returns the global gradient norm before
        clipping, or None if it was not finite and the step was skipped.
        """

    @abstractmethod
    def gather(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """The full tensors of these parameters on every rank; valid only inside the block."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes this rank's part of the trained weights and of the optimizer's state, without frozen weights."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restores bit for bit what `save` wrote. Raises DataError if the folder lacks the files."""

    @abstractmethod
    def close(self) -> None:
        """Frees the memory."""


class Backend(Protocol):
    """The functions of a module `tandem.trainer.backend.<name>.engine`."""

    def join_process_group(self, timeout_seconds: float) -> torch.device:
        """Joins the ranks given by the environment (else a group of one) and returns this rank's device."""

    def leave_process_group(self) -> None:
        """Closes the process group, so that the process can end or join another one."""

    def build_engine(self, config: TrainerConfig, model: nn.Module) -> TrainingEngine:
        """An engine with AdamW over the model's trainable parameters. Raises ConfigError if the model does not support
        gradient checkpointing.
        """

    def build_frozen_engine(self, config: TrainerConfig, model: nn.Module, *, offload: bool) -> TrainingEngine:
        """A partitioned engine of a model that is only evaluated. `offload`: its weights live in host memory."""


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Enables gradient checkpointing. Raises ConfigError if the model does not support it."""
    # With adapters no input of the first layer requires a gradient, which reentrant checkpointing needs.
    arguments = {"use_reentrant": False}
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)  # type: ignore[operator]
    except (AttributeError, ValueError) as error:
        raise ConfigError(
            f"trainer.gradient_checkpointing: {type(model).__name__} does not support it; switch it off"
        ) from error
