"""What a judge model is shown, in templates that answers cannot break, and how its answer becomes a number."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence

from tandem.protos.contracts import ScoreItem, Unscored
from tandem.protos.error_text import nearest
from tandem.reward.text.values import finite

Message = dict[str, str]

ITEM_NAMES = ("question", "answer", "ground_truth", "data_source")
_EXTRA = "extra_info."
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.]*)\}")

_END_CHARACTERS = 8000  # the verdict is at the end; earlier text is not searched
_MOST_OBJECTS = 200  # opening braces tried before the search for JSON gives up
_OBJECT_START = re.compile(r'\{\s*"')
_PATTERN_SECONDS = 1.0


class PromptTemplate:
    """A text with placeholders `{name}`. Only known names are placeholders; other braces are text.

    Values are inserted unchanged: a placeholder inside one stays text. Raises ValueError if a required placeholder is
    missing, or one looks like a misspelt known name.
    """

    def __init__(self, text: str, *, known: Sequence[str] = ITEM_NAMES, needed: Sequence[str] = ("answer",)) -> None:
        self._text = text
        found = set(_PLACEHOLDER.findall(text))
        self.names = {name for name in found if name in known or (name.startswith(_EXTRA) and len(name) > len(_EXTRA))}
        for name in sorted(found - self.names):
            if near := nearest(name, known, above=0.75):
                raise ValueError(f"template: {{{name}}} is not a placeholder; did you mean {{{near}}}?")
        if missing := [name for name in needed if name not in self.names]:
            raise ValueError(f"template: it lacks {{{missing[0]}}}")

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with the placeholders replaced by their values."""
        return _PLACEHOLDER.sub(lambda match: values[match[1]] if match[1] in self.names else match[0], self._text)


def item_values(item: ScoreItem, names: set[str], question_field: str) -> dict[str, str] | Unscored:
    """Texts for the placeholders `names`; unscored (`invalid_input`) if the item lacks a field."""
    values = {"answer": item.solution, "data_source": item.data_source}
    if "question" in names:
        prompt = prompt_of(item, question_field)
        if isinstance(prompt, Unscored):
            return prompt
        values["question"] = as_text(prompt)
    if "ground_truth" in names:
        if item.ground_truth is None:
            return Unscored("invalid_input", "the ground truth is missing, and the template shows it")
        values["ground_truth"] = _written(item.ground_truth)
    for name in names:
        if name.startswith(_EXTRA):
            value = item.extra_info.get(name.removeprefix(_EXTRA))
            if value is None:
                return Unscored("invalid_input", f"{name} is missing, and the template shows it")
            values[name] = _written(value)
    return values


def prompt_of(item: ScoreItem, field: str) -> str | list[Message] | Unscored:
    """`extra_info[field]`: a text, or chat messages with text. Other content is refused."""
    prompt = item.extra_info.get(field)
    if isinstance(prompt, str):
        return prompt
    if prompt is None:
        return Unscored("invalid_input", f"extra_info.{field} is missing: it should hold the prompt")
    messages = [_message(one) for one in prompt] if isinstance(prompt, list | tuple) else []
    read = [message for message in messages if message is not None]
    if read and len(read) == len(messages):
        return read
    return Unscored("invalid_input", f"extra_info.{field} is neither text nor chat messages with text: {prompt!r:.80}")


def as_text(prompt: str | Sequence[Message]) -> str:
    """A prompt as one text: a single message unchanged, a conversation with the role before each turn."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _message(one: object) -> Message | None:
    if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
        return None
    content = one.get("content")
    if isinstance(content, list):  # OpenAI's form: a list of parts
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            return None
        content = "".join(str(text) for text in texts)
    return {"role": one["role"], "content": content} if isinstance(content, str) else None


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


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
