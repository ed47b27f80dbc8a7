"""Numbers from outside: what a user's function, an endpoint or a judge calls a number."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> float | None:
    """The value as a float, truth as 1 or 0; None for what is no number, is not finite, or lies beyond every float."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
