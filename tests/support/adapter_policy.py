"""Policies with adapters: one in an engine, and one without, for the broadcast tests, that changes on demand."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, distributed, nn

from tandem.trainer.backend.base import parameter_specs
from tandem.trainer.backend.registry import load_backend
from tandem.trainer.checkpoints.export import collect_weights
from tandem.trainer.config import LoraOptions, TrainerConfig
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.lora import Adapters, insert_adapters

RANK, ALPHA = 4, 12.0


class TrainedPolicy:
    """A model with adapters in an engine; a source of weights like a learner."""

    def __init__(self, folder: Path, config: TrainerConfig, options: LoraOptions, seed: int = 0) -> None:
        self.rank = distributed.get_rank()
        self.config = config
        self.model = load_model(folder, config.dtype)
        adapted = insert_adapters(self.model, options, seed=seed)
        self.engine = load_backend(config).build_engine(config, self.model)
        self.adapters = Adapters(adapted, options, self.engine)
        self.parameter_specs = self.adapters.specs
        self.gather = self.adapters.gather

    def merged(self) -> dict[str, Tensor]:
        return collect_weights(self.adapters.specs(), self.adapters.gather, keep=True)


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

    def merged(self) -> dict[str, Tensor]:
        """The merged weights, as the trainer would broadcast them."""
        return collect_weights(self.adapters.specs(), self.gather, keep=True)

    def base(self) -> dict[str, Tensor]:
        return collect_weights(self.adapters.specs(), self.adapters.gather_base, keep=True)

    @property
    def model(self) -> Any:
        """A copy without adapters, merged by PEFT itself."""
        peft: PeftModel = copy.deepcopy(self.adapters._peft)
        return peft.merge_and_unload().eval()  # type: ignore[operator]
