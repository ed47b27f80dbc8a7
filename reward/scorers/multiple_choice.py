"""Multiple choice: the letter that the answer chooses."""

from __future__ import annotations

import re
from collections import deque
from functools import cached_property

from pydantic import field_validator

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer
from tandem.reward.text.values import last_boxed, last_tagged, unusable

_DECORATION = " \t\r\n()[]{}*_`$\"'.,:;\\"
_COMMANDS = ("\\text", "\\mathrm", "\\mathbf", "\\textbf", "\\boxed")
_OPENING = r"""[\s:*_()\[\]{}$"'`=-]{0,8}"""
_CUE = (
    r"(?i:\b(?:answer|choice|option)\b)"
    r"(?i:\s{1,3}(?:is|would\sbe|must\sbe|should\sbe))?"
    rf"{_OPENING}(?i:(?:option|choice|letter)\s{{1,3}})?(?:\\(?:text|mathrm|mathbf|textbf|boxed)\{{)?{_OPENING}"
)


class MultipleChoice(Scorer):
    r"""1 if the letter that the answer chooses is the ground truth, else 0; an answer without a letter is wrong.

    The scorer reads the last `<answer>…</answer>` if there is one, else the whole answer. The first rule with a match
    counts, and its last match: the text is only the letter; `\boxed{B}`; a letter after "answer", "choice" or "option"
    ("the answer is (B)", as evaluations of MMLU-Pro read it, arXiv:2406.01574); a last line that begins with `B.` or
    `(B)`; a letter in brackets or bold; and, unless `strict`, a capital letter on its own ("A" and "I" before a
    lower-case letter are words). The ground truth is a letter, the index of a choice (from 0), or a list of those.

    Example:
        >>> MultipleChoice().judge(ScoreItem("", "I think (B)", "B"))
        Scored(value=1.0, breakdown={'answered': 1.0})
    """

    ISOLATION = "in_process"

    choices: str = "ABCD"
    """The letters or digits of the choices."""
    strict: bool = False
    """Do not accept a letter on its own in a sentence."""

    @field_validator("choices")
    @classmethod
    def _different_letters(cls, choices: str) -> str:
        if len(choices) < 2 or len(set(choices.upper())) != len(choices):
            raise ValueError("must be at least two different letters")
        if not (choices.isascii() and choices.isalnum()):
            raise ValueError("must be ASCII letters or digits")
        return choices.upper()

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        """How a letter may be written: after a cue, at the start of a line, in brackets or bold, alone."""
        one, either = f"([{self.choices}])", f"([{self.choices}{self.choices.lower()}])"
        # Every repetition is bounded, so each of these takes linear time.
        return (
            re.compile(rf"{_CUE}(?:{one}(?![\w'])|(?<=\(){either}(?=\)))"),
            re.compile(rf"[\s*_(\[]{{0,8}}{either}[\])*_]{{0,4}}[.):](?!\w)"),
            re.compile(rf"\({either}\)|\[{either}\]|\*\*{either}\*\*|\*\*{either}[.):]"),
            re.compile(rf"(?<![\w'\\]){one}(?![\w'])(?!(?<=[AI]) [a-z])"),
        )

    def judge(self, item: ScoreItem) -> Score:
        accepted = self._accepted(item.ground_truth)
        if accepted is None:
            return unusable(item.ground_truth, f"not among the choices {self.choices}")
        answer = self.chosen(item.solution)
        return Scored(float(answer in accepted), {"answered": float(answer != "")})

    def chosen(self, solution: str) -> str:
        """The letter an answer chooses, "" if none."""
        tagged = last_tagged(solution, "answer")
        text = solution if tagged is None else tagged
        cue, line, bracketed, alone = self._patterns
        return (
            self._bare(text)
            or self._bare(last_boxed(text) or "")
            or _last(cue, text)
            or _first(line.match(text.rstrip().rpartition("\n")[2]))
            or _last(bracketed, text)
            or ("" if self.strict else _last(alone, text))
        )

    def _accepted(self, ground_truth: object) -> set[str] | None:
        alternatives = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
        letters = {self._letter(one) for one in alternatives}
        return letters if letters and "" not in letters else None

    def _letter(self, choice: object) -> str:
        if isinstance(choice, int) and not isinstance(choice, bool):
            return self.choices[choice] if 0 <= choice < len(self.choices) else ""
        return self._bare(choice) if isinstance(choice, str) else ""

    def _bare(self, text: str) -> str:
        """The letter if the rest of the text is only punctuation and markup, else ""."""
        text = text.strip(_DECORATION)
        for command in _COMMANDS:
            text = text.removeprefix(command[1:]).strip(_DECORATION) if len(text) > 1 else text
        return text.upper() if len(text) == 1 and text.upper() in self.choices else ""


def _last(pattern: re.Pattern[str], text: str) -> str:
    return _first(next(iter(deque(pattern.finditer(text), maxlen=1)), None))


def _first(match: re.Match[str] | None) -> str:
    return next((group for group in match.groups() if group), "").upper() if match else ""
