"""Options of the engines beside the policy's own fields in trainer/config.py: adapters, critic, what fits with what.
Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tandem.protos.errors import ConfigError

if TYPE_CHECKING:
    from tandem.trainer.config import TrainerConfig


class LoraOptions(BaseModel):
    """Low-rank adapters (LoRA, arXiv 2106.09685): W + (alpha/rank)·B·A, of which only A and B are trained.

    There is no dropout: what is trained is what was sampled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: Annotated[int, Field(ge=1)] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0.0)] = 32.0
    """The adapters' part is scaled by alpha/rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get adapters, by the end of their names; `all-linear` is all but the output head."""
    broadcast: Literal["adapter", "merged"] = "adapter"
    """What samplers get of a version: `adapter` A and B, which each merges into base weights it keeps; `merged` all
    weights.
    """


class CriticOptions(BaseModel):
    """The value model of PPO. What is not said here it shares with the policy: dtype, offload, weight decay, gradient
    clip …
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    path: str = ""
    """Folder or hub name of the value model, or of the language model it grows from; "" is the policy's."""
    learning_rate: Annotated[float, Field(ge=0.0)] = 1e-5
    """Learning rate of its AdamW."""


def check_engine(config: TrainerConfig) -> None:
    """Refuses what DeepSpeed would ignore in silence or get wrong.

    Raises:
        ConfigError: optimizer offload without ZeRO, or in bfloat16 below stage 3; parameter offload below stage 3.
    """
    if config.offload_optimizer and config.zero_stage == 0:
        raise ConfigError(
            "trainer.offload_optimizer needs ZeRO: set trainer.zero_stage to 1, 2 or 3, or switch the offload off"
        )
    if config.offload_optimizer and config.zero_stage < 3 and config.dtype == "bfloat16":
        # DeepSpeed 0.19.8 keeps the gradient of a skipped step there, so that every later step is skipped, too.
        raise ConfigError(
            "trainer.offload_optimizer in bfloat16 needs trainer.zero_stage = 3, or dtype float32 "
            f"(zero_stage is {config.zero_stage})"
        )
    if config.offload_parameters and config.zero_stage != 3:
        raise ConfigError(
            "trainer.offload_parameters needs partitioned parameters: set "
            "trainer.zero_stage to 3, or switch the offload "
            f"off (zero_stage is {config.zero_stage})"
        )
