"""Length of an answer, in what scorers may count it in."""

from __future__ import annotations

from typing import Any, Literal

from tandem.protos.contracts import ScoreItem, Unscored
from tandem.protos.error_text import shown

TOKENS = "num_tokens"
"""Key of `extra_info` that holds how many tokens the answer has: a scorer has no tokenizer."""

Unit = Literal["tokens", "characters"]


def measured(item: ScoreItem, unit: Unit) -> int | Unscored:
    """The length of an answer in characters (Unicode code points), or in the tokens that
    `extra_info.num_tokens` tells.
    """
    if unit == "characters":
        return len(item.solution)
    return told_count(item, TOKENS)


def told_count(item: ScoreItem, key: str) -> int | Unscored:
    """The count that `extra_info` holds under a key; unscored (`invalid_input`) without one."""
    count: Any = item.extra_info.get(key)
    if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
        return count
    told = "is missing" if count is None else f"is {shown(count)}, not a number of tokens or characters"
    return Unscored("invalid_input", f"extra_info.{key} {told}")
