"""Tags: the parts that an answer must have, each once and in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer

MAX_NAMES = 64
"""Maximum number of parts: each costs a search of the whole answer."""

_NAME = re.compile(r"[^\s<>/]+")


class Tags(Scorer):
    """1 if the answer has all required parts, `<think>…</think><answer>…</answer>`, else 0; or the share of right ones.

    A part is right if its opening and its closing tag occur exactly once, in this order, after the end of the part
    before it, with more than white space between them (the format reward of DeepSeek-R1, arXiv:2501.12948, and its
    followers). The breakdown has 1 or 0 for each part. For patterns see the scorer `format`.

    Example:
        >>> Tags().judge(ScoreItem("", "<think>2 + 2</think> <answer>4</answer>", None))
        Scored(value=1.0, breakdown={'think': 1.0, 'answer': 1.0})
    """

    ISOLATION = "in_process"

    order: tuple[str, ...] = ("think", "answer")
    """Names of the parts, in the required order."""
    only: bool = False
    """Allow only white space before, between and after the parts."""
    allow_empty: bool = False
    """A part may be empty."""
    counts: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """Tags that may occur several times, anywhere, each closed: their least and largest number, `{search = [1, 4]}`."""
    partial: bool = False
    """The score is the share of checks (parts, `counts`, `only`) that pass, instead of all or nothing."""

    @model_validator(mode="after")
    def _names_are_tags(self) -> Self:
        check_names([*self.order, *self.counts])
        if not (self.order or self.counts):
            raise ValueError("order or counts must name a tag")
        for name, (fewest, most) in self.counts.items():
            if not 0 <= fewest <= most:
                raise ValueError(f"counts.{name} must be [fewest, most], not [{fewest}, {most}]")
        return self

    def judge(self, item: ScoreItem) -> Score:
        text = item.solution
        parts, outside = split_parts(text, self.order)
        right = {name: float(part is not None and (self.allow_empty or part != "")) for name, part in parts.items()}
        for name, (fewest, most) in self.counts.items():
            opened, closed = text.count(f"<{name}>"), text.count(f"</{name}>")
            right[name] = float(opened == closed and fewest <= opened <= most)
        if self.only:
            right["only"] = float(None not in parts.values() and not outside)
        share = sum(right.values()) / len(right)
        return Scored(share if self.partial else float(share == 1.0), right)


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for too many tags, a repeated tag, or a name that cannot be a tag's."""
    if len(names) > MAX_NAMES:
        raise ValueError(f"{len(names):,} tags are named, at most {MAX_NAMES} may be")
    seen: set[str] = set()
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a tag: write `think` for <think>")
        if name in seen:
            raise ValueError(f"tag {name} is named twice")
        seen.add(name)


def split_parts(text: str, order: Sequence[str]) -> tuple[dict[str, str | None], str]:
    """The content of each part, None for one that does not occur exactly once and in order; and the text outside them.
    Both without white space around them.
    """
    parts: dict[str, str | None] = dict.fromkeys(order)
    outside, position = "", 0
    for name in order:
        opening, closing = f"<{name}>", f"</{name}>"
        start, end = text.find(opening), text.find(closing)
        if text.count(opening) == text.count(closing) == 1 and position <= start <= end - len(opening):
            parts[name] = text[start + len(opening) : end].strip()
            outside += text[position:start]
            position = end + len(closing)
    return parts, (outside + text[position:]).strip()
