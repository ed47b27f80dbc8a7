"""The reward of smoke.sh: the share of digits in an answer, which differs between the answers of a random model."""

from __future__ import annotations

import time
from collections.abc import Mapping


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object]) -> float:
    time.sleep(0.05)  # leaves the processors to the containers that start beside the run
    return sum(map(str.isdigit, solution_str)) / max(len(solution_str), 1)
