"""How long to wait before something that was out of reach is tried again."""

from __future__ import annotations

import random

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


def pause_after(attempts: int) -> float:
    """Seconds after so many attempts in vain: twice as long each time, and not the same for all who wait."""
    longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(attempts - 1, 30), LONGEST_PAUSE_SECONDS)
    return longest * random.uniform(0.5, 1.0)
