"""Checks of settings for the DeepSpeed backend. Imports no torch."""

from __future__ import annotations

from importlib.util import find_spec

from tandem.protos.errors import ConfigError
from tandem.trainer.config import TrainerConfig


def check(config: TrainerConfig) -> None:
    """Raises ConfigError if DeepSpeed is not installed, or would silently ignore a setting or handle it wrongly."""
    if find_spec("deepspeed") is None:
        raise ConfigError(
            'trainer.backend "deepspeed" needs a package that is not installed: pip install deepspeed, '
            'or set trainer.backend to "fsdp"'
        )
    if config.offload_optimizer and config.resolved_zero_stage == 0:
        raise ConfigError(
            "trainer.offload_optimizer needs ZeRO: set trainer.zero_stage to 1, 2 or 3, or switch the offload off"
        )
    if config.offload_optimizer and config.resolved_zero_stage < 3 and config.dtype == "bfloat16":
        # There DeepSpeed 0.19.8 keeps the gradient of a skipped step, so every later step is skipped too.
        raise ConfigError(
            "trainer.offload_optimizer in bfloat16 needs trainer.zero_stage = 3, or dtype float32 "
            f"(zero_stage is {config.resolved_zero_stage})"
        )
    if config.offload_parameters and config.resolved_zero_stage != 3:
        raise ConfigError(
            "trainer.offload_parameters needs partitioned parameters: set trainer.zero_stage to 3, "
            f"or switch the offload off (zero_stage is {config.resolved_zero_stage})"
        )
