"""The contract of a sampler: every test in this folder runs over every engine, and an engine must pass them all."""

from __future__ import annotations

import pytest

from tandem.rollout.config import engine_names


@pytest.fixture(scope="session", params=engine_names())
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
