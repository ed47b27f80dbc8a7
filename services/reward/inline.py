"""Which requests are scored on the event loop itself: those that take it a few milliseconds at most, for which a thread
costs more.

How long the judges of this process take is bounded by what they read, so work is counted in bytes before any is done.
"""

from __future__ import annotations

from tandem.reward.scoring import CompiledRubric

MAX_INLINE_WORK = 128 << 10
"""Bytes that a scorer of the fastest kind may read: some nanoseconds each."""

_FAST = frozenset({"exact", "math_boxed", "math_dapo", "overlong", "target_length"})
_SLOWER = 16  # so many times as long for a byte as those, on nearly all texts (measured: up to 1,000 ns, and 6 ns)
_ITEM_BYTES = 256  # what an item costs before its first byte is read
_ARGUMENT_BYTES = 64  # arguments of this length are as much work as another scorer: every name of `tags` is looked for


def is_quick(rubric: CompiledRubric, num_items: int, num_bytes: int) -> bool:
    """Whether a request of this size may be scored on the event loop."""
    size = num_bytes + _ITEM_BYTES * num_items
    if not rubric.in_process or size > MAX_INLINE_WORK:
        return False
    weight = sum(
        (1 if spec.scorer in _FAST else _SLOWER) * (1 + len(spec.arguments) // _ARGUMENT_BYTES)
        for spec in rubric.rubric.specs()
    )
    return size * weight <= MAX_INLINE_WORK
