"""The reference policy of the KL penalty, which is never trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.trainer.backend.base import Backend, TrainingEngine
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.token_model import token_logprobs


@dataclass(frozen=True, slots=True)
class ReferencePolicy:
    """A policy with fixed weights: a frozen copy in its own engine, or the policy's engine with its adapters disabled,
    which costs no memory.
    """

    engine: TrainingEngine
    without_adapters: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def frozen_copy(cls, backend: Backend, config: TrainerConfig, folder: Path) -> ReferencePolicy:
        """The model of a folder, which holds the run's first weights, in a partitioned engine without optimizer; in
        host memory with `offload_reference`. All ranks must call it. Raises ModelError.
        """
        model = load_model(folder, config.dtype)
        return cls(backend.build_frozen_engine(config, model, offload=config.offload_reference))

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """log π_reference of the N loss tokens of every micro-batch, without gradient, at each row's temperature. Equal
        weights give the policy's bits.

        All ranks must call it with the same number of micro-batches, and never between a forward pass of the policy and
        its backward pass.
        """
        with self.without_adapters():
            return [token_logprobs(self.engine, micro_batch) for micro_batch in micro_batches]
