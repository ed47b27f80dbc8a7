"""Engine settings that the trainer's tests cover."""

from __future__ import annotations

from typing import Any

import pytest

Settings = dict[str, Any]

ENGINES: dict[str, Settings] = {
    **{f"stage{stage}": {"zero_stage": stage} for stage in range(4)},
    "fsdp": {"backend": "fsdp"},
}
"""Settings of every way to shard a model over the ranks, by name."""
every_engine = pytest.mark.parametrize("engine_settings", ENGINES.values(), ids=ENGINES)
