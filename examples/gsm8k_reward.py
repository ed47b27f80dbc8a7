"""GSM8K's rule as a reward function with verl's signature: the number behind the last `####` must be the right one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1.0 for the right number, 0.0 for another one or none. Only the last 300 characters count, as in verl's rule."""
    found = _ANSWER.findall(solution_str[-300:])
    return float(bool(found) and found[-1].replace(",", "").rstrip(".") == ground_truth)
