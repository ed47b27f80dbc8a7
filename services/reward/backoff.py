"""Exponential backoff with jitter."""

from __future__ import annotations

import random

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


def pause_after(attempts: int) -> float:
    """Seconds to wait after so many failed attempts: doubles each time, with jitter."""
    longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(attempts - 1, 30), LONGEST_PAUSE_SECONDS)
    return longest * random.uniform(0.5, 1.0)
