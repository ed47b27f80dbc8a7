"""A large job needs no more memory than a small one. benchmarks/reward_job.py covers a million items."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reward_job import demands, measure


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_does_not_grow_with_the_size_of_a_job(tmp_path: Path) -> None:
    found = measure(tmp_path, (20_000, 200_000))
    assert [job["rows"] for job in found] == [20_000, 200_000]
    assert [line for line, met in demands(found) if not met] == []
