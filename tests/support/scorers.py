"""The rewards of whole runs. The reward service imports this file, so it imports little."""

from __future__ import annotations

import time
from typing import Any

from examples import gsm8k_components, gsm8k_reward


def digit_share(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """A reward with some variance in every group, even for an untrained model."""
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))


def unhurried_digit_share(**item: Any) -> float:
    """As `digit_share`, and waits a little."""
    time.sleep(0.05)
    return digit_share(**item)


def compute_score(**item: Any) -> float:
    """GSM8K's shipped reward plus the share of letters, so that rewards differ though no answer is right."""
    return gsm8k_reward.compute_score(**item) + _share_of_letters(item["solution_str"])


def components(**item: Any) -> dict[str, float]:
    """As `compute_score`, for the reward of several components."""
    found = gsm8k_components.compute_score(**item)
    share = _share_of_letters(item["solution_str"])
    return {"score": found["score"] + share, "right": found["right"], "format": found["format"] + share}


def _share_of_letters(text: str) -> float:
    return sum(character.isalpha() for character in text) / max(1, len(text))
