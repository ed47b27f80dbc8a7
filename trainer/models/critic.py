"""The critic: PPO's value model, in an engine separate from the policy's."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tandem.trainer.backend.base import Backend
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.loading import load_value_model


class Critic:
    """Estimates V, the value of the state before each token. `engine` trains it; all ranks call the same methods."""

    def __init__(self, backend: Backend, config: TrainerConfig, folder: Path) -> None:
        """Loads the value model of a folder (see `load_value_model`) into a partitioned engine, with any `zero_stage`.

        Raises:
            ModelError: it cannot be loaded, or not as a value model.
            ConfigError: gradient checkpointing is on and the model does not support it.
        """
        model = load_value_model(folder, config.dtype)
        self.engine = backend.build_engine(config.model_copy(update={"zero_stage": 3}), model)

    def values(self, batch: MicroBatch) -> Tensor:
        """V of the N loss tokens, float32 (N,), with gradient unless gradients are off.

        Like a token's log-prob, it is read at the column before the token: the state in which the token was chosen.
        """
        values_BT: Tensor = self.engine(**batch.inputs, use_cache=False).logits.squeeze(-1)
        return values_BT[batch.row_N, batch.columns_K[batch.column_N]].float()
