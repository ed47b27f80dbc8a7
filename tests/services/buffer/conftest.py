"""A run in the file's Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.services.buffer.buffer import Buffer
from tests.support import redis_ring as ring


@pytest.fixture()
def buffer(redis_url: str) -> Iterator[Buffer]:
    """A fresh run, whose ledger must be consistent at the end of the test."""
    run = ring.new_run(redis_url)
    yield run
    assert run.verify() == []
    run.close()
