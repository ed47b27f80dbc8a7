"""Turns a judge's answer into a number: by a JSON key or a regular expression, within a range or from labels."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping

from tandem.reward.text.values import finite

_END_CHARACTERS = 8000  # the verdict is at the end; earlier text is not searched
_MOST_OBJECTS = 200  # opening braces tried before the search for JSON gives up
_OBJECT_START = re.compile(r'\{\s*"')
_PATTERN_SECONDS = 1.0


class NoVerdictError(Exception):
    """The judge's answer has no usable verdict. The message says why."""


class VerdictReader:
    """Reads the last verdict of an answer. The model's reasoning (`<think>` … `</think>`) is ignored.

    Args:
        pattern: a regular expression; its first group (or all of it) is the verdict. Empty: `key` of the last JSON
            object that has it.
        labels: verdict → number, case-insensitive. Empty: the verdict is a number.
        lowest, highest: a number outside is no verdict: a judge that leaves its scale did not understand its task.

    Raises ValueError if the pattern is not a regular expression, or the range is empty.
    """

    def __init__(self, *, pattern: str, key: str, labels: Mapping[str, float], lowest: float, highest: float) -> None:
        import regex  # unlike `re`, its search has a time limit and lets other threads run

        if not lowest < highest and not labels:
            raise ValueError(f"lowest {lowest:g} must be below highest {highest:g}")
        if not pattern and not key:
            raise ValueError("set pattern or score_key: one of them must say where the score is")
        try:
            self._pattern = regex.compile(pattern) if pattern else None
        except regex.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None
        self._key = key
        self._labels = {label.strip().casefold(): value for label, value in labels.items()}
        self._lowest, self._highest = lowest, highest

    def read(self, answer: str) -> float:
        """The verdict as a number. Raises NoVerdictError if there is none, or it is outside the range."""
        said = answer.rpartition("</think>")[2].partition("<think>")[0][-_END_CHARACTERS:]
        found = self._last_object(said) if self._pattern is None else self._last_match(said)
        if found is None:
            where = f"JSON with {self._key}" if self._pattern is None else "match of the pattern"
            raise NoVerdictError(f"no {where} in the judge's answer {_end_of(said)}")
        if self._labels:
            value = self._labels.get(str(found).strip().casefold())
            if value is None:
                raise NoVerdictError(f"the judge's verdict {found!r:.80} is none of {', '.join(self._labels)}")
            return float(value)
        number = _number(found)
        if number is None:
            raise NoVerdictError(f"the judge's verdict {found!r:.80} is no number")
        if not self._lowest <= number <= self._highest:
            raise NoVerdictError(f"the judge's verdict {number:g} is outside {self._lowest:g} … {self._highest:g}")
        return number

    def _last_match(self, text: str) -> str | None:
        assert self._pattern is not None
        try:
            last = next(iter(deque(self._pattern.finditer(text, timeout=_PATTERN_SECONDS), maxlen=1)), None)
        except TimeoutError:
            raise NoVerdictError(f"the pattern took longer than {_PATTERN_SECONDS:g} s on the judge's answer") from None
        found: str | None = None if last is None else last[1 if self._pattern.groups else 0]
        return found

    def _last_object(self, text: str) -> object:
        decoder, place, found = json.JSONDecoder(), 0, None
        for _ in range(_MOST_OBJECTS):
            start = _OBJECT_START.search(text, place)
            if start is None:
                break
            try:
                value, place = decoder.raw_decode(text, start.start())
            except (ValueError, RecursionError):
                place = start.start() + 1
                continue
            found = value.get(self._key, found)
        return found


def _number(found: object) -> float | None:
    if isinstance(found, str):
        try:
            found = float(found.strip()) if "_" not in found else None
        except ValueError:
            return None
    return finite(found)


def _end_of(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 80 else "…" + line[-80:])
