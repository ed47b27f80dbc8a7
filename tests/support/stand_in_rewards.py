"""GSM8K's shipped rewards for a model that never answers right: adds the share of letters, so that rewards differ."""

from __future__ import annotations

from typing import Any

from examples import gsm8k_components, gsm8k_reward


def compute_score(**item: Any) -> float:
    return gsm8k_reward.compute_score(**item) + _share_of_letters(item["solution_str"])


def components(**item: Any) -> dict[str, float]:
    found = gsm8k_components.compute_score(**item)
    share = _share_of_letters(item["solution_str"])
    return {"score": found["score"] + share, "right": found["right"], "format": found["format"] + share}


def _share_of_letters(text: str) -> float:
    return sum(character.isalpha() for character in text) / max(1, len(text))
