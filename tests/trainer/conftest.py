"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A process group of one rank, in which engines of either backend can be built."""
    # takes seconds and few tests need it
    from tandem.trainer.backend.deepspeed.engine import join_process_group, leave_process_group

    join_process_group(60)
    yield
    leave_process_group()
