"""Builds the prompt of a judge model: the question of an item, and templates that answers cannot break."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from tandem.protos.contracts import ScoreItem, Unscored
from tandem.protos.error_text import nearest

Message = dict[str, str]

ITEM_NAMES = ("question", "answer", "ground_truth", "data_source")
_EXTRA = "extra_info."
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.]*)\}")


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
