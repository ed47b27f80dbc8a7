"""GSM8K's reward in two components, correctness and format, for estimators that normalise them separately (`gdpo`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_LAST_LINE = re.compile(r"(?:\A|\n)#### -?[0-9][0-9.,]*\s*\Z")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """`right` is the score of examples/gsm8k_reward.py; `format` is 1.0 if the last line is `####` and a number, else
    0.0.

    `score` equals `right`; reports and accuracy use it.
    """
    end = solution_str[-300:]
    found = _ANSWER.findall(end)
    right = float(bool(found) and found[-1].replace(",", "").rstrip(".") == ground_truth)
    return {"score": right, "right": right, "format": float(_LAST_LINE.search(end) is not None)}
