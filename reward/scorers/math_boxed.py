r"""MATH: the content of the last `\boxed{…}`, compared as normalised LaTeX text."""

from __future__ import annotations

import re

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer
from tandem.reward.text.values import accepted_texts, braced, unusable

_BOX = "\\boxed"
_DROPPED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_SLASHED = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")


class MathBoxed(Scorer):
    r"""1 if the last box of the answer equals the ground truth after both are normalised, else 0.

    The rule of the MATH benchmark (arXiv:2103.03874), which published rewards follow. It compares text, so `0.75` is
    not `\frac{3}{4}`, and `1,000` is not `1000`; the scorer `math_verify` compares by meaning. Normalisation covers
    spaces, sizes of fractions and brackets, degrees, per cent and dollar signs, a unit in `\text{ …}`, a name before
    `=`, `.5`, `0.5`, `\frac12`, `\sqrt2` and `1/2`. The older form `\boxed 7` takes precedence over braces wherever it
    occurs and ends at the next `$`; `\fbox` is not read.

    Example:
        >>> MathBoxed().judge(ScoreItem("lighteval/MATH", r"so $x = \boxed{\dfrac12}$", r"\frac{1}{2}"))
        Scored(value=1.0, breakdown={'answered': 1.0})
    """

    ISOLATION = "in_process"

    def judge(self, item: ScoreItem) -> Score:
        accepted = accepted_texts(item.ground_truth)
        if accepted is None:
            return unusable(item.ground_truth)
        answer = _boxed(item.solution)
        if answer is None:
            return Scored(0.0, {"answered": 0.0})
        # A text without a normal form (two units, a root without an argument) still equals itself.
        normal = normalised(answer)
        right = answer in accepted or (normal is not None and any(normal == normalised(text) for text in accepted))
        return Scored(float(right), {"answered": 1.0})


def _boxed(text: str) -> str | None:
    _, spaced, after = text.rpartition(_BOX + " ")
    if spaced:
        return after.partition("$")[0]
    start = text.rfind(_BOX)
    opening = start + len(_BOX)
    return braced(text, opening) if start >= 0 and text.startswith("{", opening) else None


def normalised(text: str) -> str | None:
    """Normalised LaTeX; None where the rule has no answer: two units, or a root without an argument."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for one in _DROPPED:
        text = text.replace(one, "")
    text, _, unit = text.partition("\\text{ ")
    if "\\text{ " in unit:
        return None
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text.startswith(".") else text
    name, _, value = text.partition("=")
    rooted = _with_braced_roots(value if text.count("=") == 1 and len(name) <= 2 else text)
    if rooted is None:
        return None
    text = _with_braced_fractions(rooted.replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    slashed = _SLASHED.fullmatch(text)
    return f"\\frac{{{slashed[1]}}}{{{slashed[2]}}}" if slashed else text


def _with_braced_roots(text: str) -> str | None:
    before, *roots = text.split("\\sqrt")
    if not all(roots):
        return None
    return before + "".join("\\sqrt" + (root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}") for root in roots)


def _with_braced_fractions(text: str) -> str:
    before, *fractions = text.split("\\frac")
    pieces = [before]
    for fraction in fractions:
        if not fraction.startswith("{"):
            if len(fraction) < 2:
                return text
            below = fraction[1] if fraction[1] == "{" else f"{{{fraction[1]}}}"
            fraction = f"{{{fraction[0]}}}{below}{fraction[2:]}"
        pieces.append("\\frac" + fraction)
    return "".join(pieces)
