"""The reference policy: what the KL penalty holds the policy to. It never learns."""

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
    """A policy that stays what it was. Made by `frozen_copy`, or where the policy has adapters by `base_weights`, which
    costs no memory.
    """

    def __init__(
        self, engine: TrainingEngine, without_adapters: Callable[[], AbstractContextManager[None]], *, owned: bool
    ) -> None:
        self._engine = engine
        self.engines = [engine] if owned else []  # those that are its own
        self._policy_set_aside = without_adapters

    @classmethod
    def frozen_copy(cls, backend: Backend, config: TrainerConfig, folder: Path) -> ReferencePolicy:
        """The model of a folder in an engine of its own, partitioned, without optimizer; with
        `offload_reference` in host memory.

        The folder is what the run started from, also when it resumes. All ranks enter, the process group joined.

        Raises:
            ModelError: transformers cannot load it.
        """
        model = load_model(folder, config.dtype)
        engine = backend.build_frozen_engine(config, model, offload=config.offload_reference)
        return cls(engine, nullcontext, owned=True)

    @classmethod
    def base_weights(cls, engine: TrainingEngine, adapters: Adapters) -> ReferencePolicy:
        """The policy's own engine with its adapters off. It lasts as long as that engine, whose owner closes it."""
        return cls(engine, adapters.disabled, owned=False)

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """log π_reference of the N loss tokens of every micro-batch, without gradient, under each row's temperature.

        All ranks enter, with equally many micro-batches; never between a forward pass of the policy and its backward.
        They are computed as the policy's own are, so that equal weights give equal numbers.
        """
        with self._policy_set_aside():
            return [token_logprobs(self._engine, micro_batch) for micro_batch in micro_batches]

    def close(self) -> None:
        """Gives the memory back."""
        for engine in self.engines:
            engine.close()
