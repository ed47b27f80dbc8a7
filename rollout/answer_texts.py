"""The texts of sampled answers. Short ones that are equal, as the rows of a group often are, are decoded once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

SHORT = 32
"""Tokens; longer answers are seldom equal, and would take memory."""
_KEPT = 1024


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that a sampler uses."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class AnswerTexts:
    """Decodes answers without their special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._of_short = lru_cache(maxsize=_KEPT)(self._decode)

    def of(self, token_ids: Sequence[int]) -> str:
        """The text of a whole answer."""
        return self._of_short(tuple(token_ids)) if len(token_ids) <= SHORT else self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*token_ids], skip_special_tokens=True)
