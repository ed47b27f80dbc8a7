"""The critic: PPO's value model, in an engine separate from the policy's.

N: loss tokens of a micro-batch, flat.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tandem.trainer.backend.base import Backend
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.loading import load_value_model
from tandem.trainer.models.options import CriticOptions


class Critic:
    """Estimates V, the value of the state before each token. All ranks call the same methods, after joining the process
    group.

    `engine` is what checkpoints save and load.
    """

    def __init__(self, backend: Backend, config: TrainerConfig, options: CriticOptions, folder: Path) -> None:
        """Loads the value model of a folder (see `load_value_model`) into a partitioned engine, with any `zero_stage`.

        Raises:
            ModelError: it cannot be loaded, or not as a value model.
            ConfigError: gradient checkpointing is on and the model does not support it.
        """
        self._learning_rate = options.learning_rate
        model = load_value_model(folder, config.dtype)
        self.engine = backend.build_engine(config.model_copy(update={"zero_stage": 3}), model)

    def values(self, batch: MicroBatch) -> Tensor:
        """V of the N loss tokens, float32 (N,), with gradient unless gradients are off.

        Like a token's log-prob, it is read at the column before the token: the state in which the token was chosen.
        """
        values_BT: Tensor = self.engine(**batch.inputs, use_cache=False).logits.squeeze(-1)
        return values_BT[batch.row_N, batch.columns_K[batch.column_N]].float()

    def backward(self, loss: Tensor) -> None:
        """Adds a micro-batch's share of the whole batch's loss; gradients sum over micro-batches and ranks until
        `step`.
        """
        self.engine.backward(loss)

    def step(self, learning_rate: float | None = None) -> float | None:
        """Takes the optimizer step, with the options' learning rate by default.

        Returns the gradient norm before clipping, or None if it was not finite and the step was skipped.
        """
        return self.engine.step(self._learning_rate if learning_rate is None else learning_rate)

    def close(self) -> None:
        """Frees the memory."""
        self.engine.close()
