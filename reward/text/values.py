r"""Reads items and parameters: accepted texts of a ground truth, lengths, finite numbers, patterns; the final answer of
a text, from `\boxed{…}`, tags or a code block.

Every function scans the text once. A regular expression such as `<answer>(.*?)</answer>` would take quadratic time on
`<answer><answer>…` without an end.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from tandem.protos.contracts import ScoreItem, Unscored
from tandem.protos.error_text import shown

MAX_ACCEPTED = 1000
"""Maximum number of accepted texts of a ground truth, because each is compared with the whole answer."""

Unit = Literal["tokens", "characters"]
_MOST_COUNTED = 1 << 53  # as far as a float counts

_BRACE = re.compile(r"[{}]")
_BOX = "\\boxed{"


def accepted_texts(ground_truth: object) -> list[str] | None:
    """The accepted texts, stripped; None unless the ground truth is text, a number or a short enough list of those."""
    alternatives = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not 0 < len(alternatives) <= MAX_ACCEPTED or not all(isinstance(one, str | int | float) for one in alternatives):
        return None
    try:
        return [str(one).strip() for one in alternatives]
    except ValueError:
        return None  # an integer with more digits than Python converts


def unusable(ground_truth: object, wanted: str = "neither text, number nor list of those") -> Unscored:
    """The result for an item with an unusable ground truth. `wanted` is the cause, as a phrase after "is"."""
    if isinstance(ground_truth, list | tuple) and len(ground_truth) > MAX_ACCEPTED:
        wanted = f"a list of {len(ground_truth):,}, at most {MAX_ACCEPTED:,} are compared"
    return Unscored("invalid_input", f"ground truth {shown(ground_truth)} is {wanted}")


def measured(item: ScoreItem, unit: Unit) -> int | Unscored:
    """The answer's length in characters (Unicode code points), or in tokens from `extra_info.num_tokens`."""
    return len(item.solution) if unit == "characters" else told_count(item, "num_tokens")  # scorers have no tokenizer


def told_count(item: ScoreItem, key: str) -> int | Unscored:
    """The count under a key of `extra_info`; unscored (`invalid_input`) without one."""
    count: object = item.extra_info.get(key)
    if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= _MOST_COUNTED:
        return count
    told = "is missing" if count is None else f"is {shown(count)}, not a number of tokens or characters"
    return Unscored("invalid_input", f"extra_info.{key} {told}")


def finite(value: object) -> float | None:
    """The value as a float, booleans as 1 or 0; None for what is no number, not finite or too large."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _checked(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_checked)]
"""A regular expression of Python's `re`, as a scorer's parameter."""


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`; None if it is missing or its braces, escaped or not, are unbalanced."""
    start = text.rfind(_BOX)
    return braced(text, start + len(_BOX) - 1) if start >= 0 else None


def braced(text: str, start: int) -> str | None:
    """The text between the opening brace at `start` and its closing brace; None without a closing brace."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : match.start()]
    return None


def last_tagged(text: str, tag: str) -> str | None:
    """The content of the last `<tag>…</tag>`. Each part ends at the first closing tag after its opening tag."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    found, position = None, 0
    while (start := text.find(opening, position)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            break
        found, position = text[start:end], end + len(closing)
    return found


def last_code_block(text: str) -> str | None:
    """The content of the last closed code block, without the name of its language."""
    fences = [match.start() for match in re.finditer(r"^ {0,3}```", text, re.MULTILINE)]
    if len(fences) < 2:
        return None
    opening, closing = fences[-2 if len(fences) % 2 == 0 else -3 :][:2]
    return text[opening:closing].partition("\n")[2]
