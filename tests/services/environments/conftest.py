"""A run in Redis, and a recipe with an environment in a service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tests.support.redis_ring import new_run
from tests.support.run_inputs import recipe_of, small_values


@pytest.fixture
def buffer(redis_url: str) -> Iterator[Buffer]:
    buffer = new_run(redis_url)
    yield buffer
    buffer.close()


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Its environment notes every call in the folder `marks`."""
    marks = tmp_path / "marks"
    marks.mkdir()
    environment = {"path": "tests.support.environments:Restored", "arguments": {"marks": str(marks)}, "service": True}
    return recipe_of(small_values(tmp_path), environment=environment)
