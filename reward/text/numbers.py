"""Numbers that come from a user's function, an endpoint or a judge."""

from __future__ import annotations

import math


def finite(value: object) -> float | None:
    """Returns the value as a float, booleans as 1 or 0; None for a non-number or a non-finite or too large number."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
