"""A policy with adapters for the broadcast tests: a source of weights that changes on demand, without an engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from tandem.trainer.backend.base import parameter_specs
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.lora import Adapters, insert_adapters
from tandem.trainer.models.options import LoraOptions

RANK, ALPHA = 4, 12.0


class WholeModel:
    """A model with unsharded parameters, in place of an engine."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.specs = parameter_specs(module)

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        yield {name: self.module.get_parameter(name).detach() for name in names}


class AdapterPolicy:
    """`step` changes A and B as a training step does, but by more."""

    rank = 0

    def __init__(self, folder: Path, dtype: str = "float32", **options: Any) -> None:
        module = load_model(folder, dtype)
        lora = LoraOptions(**{"rank": RANK, "alpha": ALPHA, **options})
        self.adapters = Adapters(insert_adapters(module, lora, seed=0), lora, WholeModel(module))
        self.parameter_specs = self.adapters.specs
        self.gather = self.adapters.gather
        self.matrices = [matrix for matrix in module.parameters() if matrix.requires_grad]
        self._module = module.eval()
        self._generator = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def step(self, size: float = 0.05) -> None:
        for matrix in self.matrices:
            matrix += (size * torch.randn(matrix.shape, generator=self._generator)).to(matrix.dtype)

    def merged(self) -> dict[str, torch.Tensor]:
        """The merged weights, as the trainer would broadcast them."""
        with self.gather([name for name, _, _ in self.parameter_specs()]) as tensors:
            return {name: tensor.clone() for name, tensor in tensors.items()}

    def base(self) -> dict[str, torch.Tensor]:
        with self.adapters.gather_base([name for name, _, _ in self.parameter_specs()]) as tensors:
            return {name: tensor.clone() for name, tensor in tensors.items()}

    @property
    def model(self) -> Any:
        """A copy without adapters, merged by PEFT itself."""
        peft: PeftModel = copy.deepcopy(self.adapters._peft)
        return peft.merge_and_unload().eval()  # type: ignore[operator]
