"""Fixtures for the tests of workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.reward.config import LimitsConfig, RewardConfig
from tandem.reward.registry import ScorerSpec, make_spec
from tandem.reward.workers.launcher_process import Launchers
from tandem.reward.workers.pool import ScorerPool
from tests.support.pool_trouble import TROUBLE, Make


@pytest.fixture
def trouble(tmp_path: Path) -> str:
    file = tmp_path / "trouble.py"
    file.write_text(TROUBLE)
    return f"{file}:compute_score"


@pytest.fixture
def spec(trouble: str) -> ScorerSpec:
    return make_spec(trouble, {})


@pytest.fixture
def launchers() -> Iterator[Launchers]:
    made = Launchers(RewardConfig(), 60.0)
    yield made
    made.close()


@pytest.fixture
def make_pool() -> Iterator[Make]:
    pools: list[ScorerPool] = []

    def make(
        num_workers: int = 1, timeout_seconds: float = 60.0, startup_seconds: float = 60.0, **limits: Any
    ) -> ScorerPool:
        config = RewardConfig(num_workers=num_workers, timeout_seconds=timeout_seconds, limits=LimitsConfig(**limits))
        pools.append(ScorerPool(config, startup_seconds=startup_seconds))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
