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
    """A policy with fixed weights. `frozen_copy` loads one; if the policy has adapters, `base_weights` uses the
    policy's own base weights, which costs no memory.
    """

    def __init__(
        self, engine: TrainingEngine, without_adapters: Callable[[], AbstractContextManager[None]], *, owned: bool
    ) -> None:
        self._engine = engine
        self.engines = [engine] if owned else []  # engines that `close` frees
        self._policy_set_aside = without_adapters

    @classmethod
    def frozen_copy(cls, backend: Backend, config: TrainerConfig, folder: Path) -> ReferencePolicy:
        """The model of a folder in its own partitioned engine without optimizer; in host memory with
        `offload_reference`.

        The folder holds the run's first weights, also when the run resumes. All ranks must call it, after joining the
        process group.

        Raises:
            ModelError: transformers cannot load it.
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
        """log π_reference of the N loss tokens of every micro-batch, without gradient, at each row's temperature.

        All ranks must call it with the same number of micro-batches, and never between a forward pass of the policy and
        its backward pass. The computation is the same as the policy's, so equal weights give equal bits.
        """
        with self._policy_set_aside():
            return [token_logprobs(self._engine, micro_batch) for micro_batch in micro_batches]

    def close(self) -> None:
        """Frees the memory."""
        for engine in self.engines:
            engine.close()
