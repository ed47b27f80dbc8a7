"""A large job takes no more memory than a small one, and every item of it has one result. benchmarks/reward_job.py has
the million.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reward_job import demands, measure


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_times_the_items_take_no_more_memory(tmp_path: Path) -> None:
    found = measure(tmp_path, (20_000, 200_000))
    assert [job["rows"] for job in found] == [20_000, 200_000]
    assert [line for line, met in demands(found) if not met] == []
