"""Engine settings that the trainer's tests cover."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.trainer.config import TrainerConfig

Settings = dict[str, Any]

ENGINES: dict[str, Settings] = {
    **{f"stage{stage}": {"zero_stage": stage} for stage in range(4)},
    "fsdp": {"backend": "fsdp"},
}
"""Settings of every way to shard a model over the ranks, by name."""
every_engine = pytest.mark.parametrize("engine_settings", ENGINES.values(), ids=ENGINES)


def checkpoint_facts(settings: Settings) -> dict[str, Any]:
    """The facts that `load_checkpoint` compares, for one rank in float32."""
    config = TrainerConfig(**settings)
    return {"backend": config.backend, "world_size": 1, "zero_stage": config.zero_stage, "dtype": "float32"}
