"""Memory use of deep recursion in a worker process."""

from __future__ import annotations

import resource

from tandem.reward.workers.worker import with_room


def _page_faults() -> list[int]:
    """Page faults of 100 shallow calls at each of 200 depths."""

    def down(frames: int) -> None:
        if frames:
            down(frames - 1)

    def sway(depth: int) -> int:
        if depth:
            return sway(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(100):
            down(3)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return [sway(depth) for depth in range(200)]


def test_with_room_avoids_page_faults_of_deep_recursion() -> None:
    # If the first assertion fails, this Python no longer needs `with_room`: remove it.
    assert max(_page_faults()) >= 100
    assert max(with_room(_page_faults)()) < 50  # type: ignore[arg-type, operator]
