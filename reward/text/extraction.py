r"""Extraction of the final answer from a text: from `\boxed{…}`, from tags, from a code block.

Every function scans the text once. A regular expression such as `<answer>(.*?)</answer>` would take quadratic time on
`<answer><answer>…` without an end.
"""

from __future__ import annotations

import re

_BRACE = re.compile(r"[{}]")
_BOX = "\\boxed{"


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
