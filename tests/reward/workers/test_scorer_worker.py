"""What a scoring process does for its judges beside calling them."""

from __future__ import annotations

import resource

from tandem.reward.workers.worker import with_room


def _page_faults() -> list[int]:
    """Of 100 calls a few frames deep, begun at each of 200 depths."""

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


def test_recursion_in_a_roomy_frame_takes_no_memory_from_the_kernel_again_and_again() -> None:
    # Where the first one fails, this Python needs no room any more: take with_room out.
    assert max(_page_faults()) >= 100
    assert max(with_room(_page_faults)()) < 50  # type: ignore[arg-type, operator]
