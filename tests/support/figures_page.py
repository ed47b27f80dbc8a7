"""The names of figures in the section of docs/metrics.md on the lines of metrics.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from tests.support.paths import ROOT

_HEADING = "## The figures of a batch"
_NOT_ALWAYS = "**Only in some runs or lines**"


@cache
def _section() -> str:
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    return text.partition(f"\n{_HEADING}\n")[2].partition("\n## ")[0]


def _names(text: str) -> set[str]:
    """The names before the colon of each item, without those in brackets, which are verl's."""
    heads = [re.sub(r"\([^)]*\)", "", item) for item in re.findall(r"^- (.*?): ", text, re.M | re.S)]
    return {name for head in heads for name in re.findall(r"`([^`]+)`", head)}


def _pattern(name: str) -> str:
    """A regular expression: `<word>` stands for any part of a name."""
    return "[^/]+".join(map(re.escape, re.split(r"<\w+>", name)))


def unnamed(figures: Iterable[str]) -> set[str]:
    """The figures that the section does not name. After the beginning of a family (`staleness_<s>/…`) comes a name."""
    names = _names(_section())
    whole = "|".join(_pattern(name) for name in names if not name.endswith("…"))
    families = "|".join(_pattern(name.removesuffix("…")) for name in names if name.endswith("…"))
    expected = re.compile(rf"(?:{families})?(?:{whole})")
    return {figure for figure in figures if not expected.fullmatch(figure)}


def unwritten(figures: Iterable[str]) -> set[str]:
    """What the section says is in every run, and is not among these figures."""
    always = _names(_section().partition(_NOT_ALWAYS)[0])
    return {name for name in always if "<" not in name} - set(figures)
