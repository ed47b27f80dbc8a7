"""The critic: PPO's value model, in an engine separate from the policy's, and its loss."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tandem.trainer.backend.base import Backend
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.loading import load_value_model
from tandem.trainer.policy_losses.inputs import LossTerms


class Critic:
    """Estimates V, the value of the state before each token. `engine` trains it; all ranks call the same methods."""

    def __init__(self, backend: Backend, config: TrainerConfig, folder: Path) -> None:
        """Loads the value model of a folder (see `load_value_model`) into a partitioned engine, with any `zero_stage`.
        Raises ModelError if it cannot be loaded, or not as a value model, and ConfigError if gradient checkpointing is
        on and the model does not support it.
        """
        model = load_value_model(folder, config.dtype)
        self.engine = backend.build_engine(config.model_copy(update={"zero_stage": 3}), model)

    def values(self, batch: MicroBatch) -> Tensor:
        """V of the N loss tokens, float32 (N,), with gradient unless gradients are off.

        Like a token's log-prob, it is read at the column before the token: the state in which the token was chosen.
        """
        values_BT: Tensor = self.engine(**batch.inputs, use_cache=False).logits.squeeze(-1)
        return values_BT[batch.row_N, batch.columns_K[batch.column_N]].float()


def clipped_value_loss(values_N: Tensor, returns_N: Tensor, start_values_N: Tensor, *, clip: float) -> LossTerms:
    """½·max((v − R)², (v_c − R)²) of every token, v_c = v clamped to v₀ ± clip around the value v₀ at the batch's
    start.

    Only `values_N` carries gradient; there is none where the clamped term is larger (mark `clipped`). An infinite
    `clip` gives the squared error. A NaN argument makes the token's loss NaN, so the critic's optimizer step is skipped
    and counted.
    """
    assert values_N.ndim == 1, values_N.shape
    assert values_N.shape == returns_N.shape == start_values_N.shape, (values_N.shape, returns_N.shape)
    assert clip > 0, clip
    returns_N, start_values_N = returns_N.detach(), start_values_N.detach()
    clipped_values_N = torch.clamp(values_N, start_values_N - clip, start_values_N + clip)
    errors_N = (values_N - returns_N).square()
    clipped_errors_N = (clipped_values_N - returns_N).square()
    return LossTerms(
        losses_N=torch.maximum(errors_N, clipped_errors_N) / 2,
        marks={"clipped": (clipped_errors_N > errors_N).detach()},
    )
