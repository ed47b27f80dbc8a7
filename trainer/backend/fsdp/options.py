"""Checks of settings for the FSDP backend. Imports no torch."""

from __future__ import annotations

from tandem.protos.errors import ConfigError
from tandem.trainer.config import TrainerConfig


def check(config: TrainerConfig) -> None:
    """Raises ConfigError for DeepSpeed settings that FSDP does not support."""
    if config.zero_stage not in ("auto", 3):
        raise ConfigError(
            f"trainer.zero_stage = {config.zero_stage} is DeepSpeed's: FSDP always partitions parameters, gradients "
            'and optimizer, as stage 3 does; leave it out, or set trainer.backend to "deepspeed"'
        )
    if config.offload_optimizer != config.offload_parameters:
        raise ConfigError(
            "FSDP offloads parameters and optimizer together: set both trainer.offload_parameters and "
            'trainer.offload_optimizer, or neither, or set trainer.backend to "deepspeed"'
        )
