r"""DAPO's rule for mathematics: the text after `Answer:` at the end of the answer."""

from __future__ import annotations

import re

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer
from tandem.reward.text.values import accepted_texts, last_boxed, unusable

_READ_CHARACTERS = 300  # the longest answer of MATH-500 has 159
_BOX_CHARACTERS = 100
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")  # read on those 300 characters only

# The words and marks that Minerva's evaluation drops or replaces, in its order (arXiv:2206.14858, appendix D.1),
# without `ft`, which is also in `\left`.
_REPLACED = {"an ": "", "a ": "", ".$": "$", "\\$": "", "\\ ": "", " ": "", "mbox": "text"}
_REPLACED |= {",\\text{and}": ",", "\\text{and}": ",", "\\text{m}": "\\text{}"}
_DROPPED_FIRST = r"""square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents
degrees cm gm pounds meters meals edges students childrentickets multiples \text{s} \text{.}"""
_DROPPED_NEXT = "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}"
_DROPPED_LAST = r'\text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots'
_DROPPED = (*_DROPPED_FIRST.split(), *_DROPPED_NEXT, *_DROPPED_LAST.split())
_UNWRAPPED = ("\\text{", "\\textbf{", "\\overline{")
_SHORT_FRACTION = re.compile(r"(frac)([^{])(.)")
_SHORT_ROOT = re.compile(r"(sqrt)([^{])")


class MathDapo(Scorer):
    r"""1 if the answer ends with the ground truth, else -1. Only its last 300 characters count.

    The rule of DAPO (arXiv:2503.14476). It reads the line after the last `Answer:` and normalises it as Minerva's
    evaluation does (arXiv:2206.14858, appendix D.1): spaces, articles, units and dollar signs are removed, `\text{…}`
    and `\boxed{…}` are unwrapped, and integers lose their commas. Without `Answer:` it reads the last `\boxed{…}` of
    the last 100 characters and compares it unchanged.

    Example:
        >>> MathDapo().judge(ScoreItem("math_dapo", "Thus x = 14.\nAnswer: $x = 14$ degrees", "14"))
        Scored(value=1.0, breakdown={'answered': 1.0})
    """

    ISOLATION = "in_process"

    strict_box: bool = False
    r"""Read only the last `\boxed{…}` of the last 100 characters, and compare it unchanged."""

    def judge(self, item: ScoreItem) -> Score:
        accepted = accepted_texts(item.ground_truth)
        if accepted is None:
            return unusable(item.ground_truth)
        text = item.solution[-_READ_CHARACTERS:]
        named = [] if self.strict_box else _ANSWER.findall(text)
        if named:
            answer = normalised(named[-1])
            right = any(answer == normalised(truth) for truth in accepted)
        else:
            box = last_boxed(text[-_BOX_CHARACTERS:])
            if box is None:
                return Scored(-1.0, {"answered": 0.0})
            right = box in accepted
        return Scored(1.0 if right else -1.0, {"answered": 1.0})


def normalised(answer: str) -> str:
    """A normalised final answer."""
    answer = answer.rpartition("=")[2]
    for old, new in _REPLACED.items():
        answer = answer.replace(old, new)
    for one in _DROPPED:
        answer = answer.replace(one, "")
    answer = "\n".join(_first_formula(line) for line in answer.split("\n"))
    for command in _UNWRAPPED:
        answer = _unwrapped(answer, command)
    before, box, after = answer.partition("\\boxed{")
    content, closing, rest = after.rpartition("}")
    if box and closing:
        answer = before + content + rest
    answer = _SHORT_FRACTION.sub(r"\1{\2}{\3}", answer)
    answer = _SHORT_ROOT.sub(r"\1{\2}", answer).replace("$", "")
    plain = answer.replace(",", "")
    return plain.strip() if plain.isdigit() else answer.strip()


def _first_formula(line: str) -> str:
    _, opening, after = line.partition("$")
    content, closing, _ = after.partition("$")
    return f"${content}$" if opening and closing else line


def _unwrapped(text: str, command: str) -> str:
    """The text with the content of `command…}` in place of it. One walk from left to right."""
    pieces, position = [], 0
    while (start := text.find(command, position)) >= 0:
        end = text.find("}", start)
        if end < 0:
            break
        pieces += [text[position:start], text[start + len(command) : end]]
        position = end + 1
    return "".join([*pieces, text[position:]])
