"""Pauses between attempts at what could not be scored."""

from __future__ import annotations

import random

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0


def pause_after(attempts: int) -> float:
    """Seconds to wait after so many failed attempts: doubles each time, with jitter."""
    seconds = FIRST_PAUSE_SECONDS * 2.0 ** min(attempts - 1, 30)
    return min(seconds, LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.0)
