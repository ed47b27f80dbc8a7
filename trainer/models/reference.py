"""The reference policy of the KL penalty, which is never trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.trainer.backend.base import Backend, TrainingEngine
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.token_model import token_logprobs

if TYPE_CHECKING:
    from tandem.trainer.models.lora import Adapters


class ReferencePolicy:
    """A policy with fixed weights: a frozen copy, or the policy's own base weights without its adapters, which costs
    no memory. `engines` are those that it owns.
    """

    def __init__(
        self, engine: TrainingEngine, without_adapters: Callable[[], AbstractContextManager[None]], *, owned: bool
    ) -> None:
        self.engines = [engine] if owned else []
        self._engine = engine
        self._without_adapters = without_adapters

    @classmethod
    def frozen_copy(cls, backend: Backend, config: TrainerConfig, folder: Path) -> ReferencePolicy:
        """The model of a folder, which holds the run's first weights, in its own partitioned engine without optimizer;
        in host memory with `offload_reference`. All ranks must call it. Raises ModelError.
        """
        model = load_model(folder, config.dtype)
        engine = backend.build_frozen_engine(config, model, offload=config.offload_reference)
        return cls(engine, nullcontext, owned=True)

    @classmethod
    def base_weights(cls, engine: TrainingEngine, adapters: Adapters) -> ReferencePolicy:
        """The policy's own engine with its adapters disabled. The engine's owner closes it."""
        return cls(engine, adapters.disabled, owned=False)

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """log π_reference of the N loss tokens of every micro-batch, without gradient, at each row's temperature. Equal
        weights give the policy's bits.

        All ranks must call it with the same number of micro-batches, and never between a forward pass of the policy and
        its backward pass.
        """
        with self._without_adapters():
            return [token_logprobs(self._engine, micro_batch) for micro_batch in micro_batches]
