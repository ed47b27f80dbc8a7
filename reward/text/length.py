"""Length of an answer in tokens or characters."""

from __future__ import annotations

from typing import Literal

from tandem.protos.contracts import ScoreItem, Unscored
from tandem.protos.error_text import shown

TOKENS = "num_tokens"
"""Key of `extra_info` with the number of tokens of the answer. Scorers have no tokenizer."""

Unit = Literal["tokens", "characters"]


def measured(item: ScoreItem, unit: Unit) -> int | Unscored:
    """Returns the answer's length in characters (Unicode code points), or in tokens from `extra_info.num_tokens`."""
    if unit == "characters":
        return len(item.solution)
    return told_count(item, TOKENS)


def told_count(item: ScoreItem, key: str) -> int | Unscored:
    """Returns the count under a key of `extra_info`; unscored (`invalid_input`) without one."""
    count: object = item.extra_info.get(key)
    if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
        return count
    told = "is missing" if count is None else f"is {shown(count)}, not a number of tokens or characters"
    return Unscored("invalid_input", f"extra_info.{key} {told}")
