"""Exact match: the answer equals the ground truth, or one of them if it is a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protos.contracts import Score, Scored, ScoreItem, Unscored


@dataclass(frozen=True, slots=True)
class ExactMatch:
    """1 if answer and ground truth are the same text, else 0. White space around either never counts."""

    ignore_case: bool = False
    last_line: bool = False
    """Compare only the last line of the answer that is not blank."""

    def judge(self, item: ScoreItem) -> Score:
        accepted = accepted_texts(item.ground_truth)
        if accepted is None:
            return Unscored(
                "invalid_input", f"ground truth {item.ground_truth!r:.80} is neither text, number nor list of those"
            )
        answer = item.solution.strip()
        if self.last_line:
            answer = answer.rpartition("\n")[2].strip()
        return Scored(float(any(self._same(answer, text) for text in accepted)))

    def _same(self, answer: str, truth: str) -> bool:
        return answer.casefold() == truth.casefold() if self.ignore_case else answer == truth


def accepted_texts(ground_truth: Any) -> list[str] | None:
    """The texts a ground truth accepts, stripped; None if it is no text, number or list of those."""
    alternatives = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not alternatives or not all(isinstance(one, str | int | float) for one in alternatives):
        return None
    return [str(one).strip() for one in alternatives]
