"""Fixtures of the sampler contract: every test in this folder runs with every engine."""

from __future__ import annotations

import pytest

from tandem.rollout.config import engine_names


@pytest.fixture(scope="session", params=engine_names())
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
