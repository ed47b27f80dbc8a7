"""GSM8K's rule as a reward function with verl's signature: the number after the last `####` must be correct."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    wrong: float = 0.0,
) -> float:
    """Returns 1.0 for the correct number, else `wrong`, which a recipe may set to e.g. −1 in `reward.arguments`.

    As in verl's rule, only the last 300 characters count.
    """
    found = _ANSWER.findall(solution_str[-300:])
    right = bool(found) and found[-1].replace(",", "").rstrip(".") == ground_truth
    return 1.0 if right else wrong
