"""Symbolic mathematics: the math-verify library parses answer and ground truth and compares them with sympy."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.protos.contracts import FAULT, Score, Scored, ScoreItem, Unscored
from tandem.protos.error_text import shown
from tandem.reward.contracts import Scorer
from tandem.reward.text.values import accepted_texts, last_boxed, unusable

# The library reports any failure of its own as "different", even when it runs out of stack or memory. So expressions
# that could cause that are refused first: deep nesting exhausts the stack, large numbers and long sums the memory.
_MAX_DEPTH = 30
_MAX_DIGITS = 1000
_MAX_BITS = float(1 << 17)
_MAX_TERMS = 1e6

_BRACKET = re.compile(r"[({\[]|[)}\]]")
_LONG_NUMBER = re.compile(rf"\d{{{_MAX_DIGITS + 1}}}")
_TOO_LARGE = (RecursionError, OverflowError)
_BEYOND = Scored(0.0, {"answered": 1.0, f"{FAULT}limit": 1.0})


class MathVerify(Scorer):
    r"""1 if the answer is mathematically equal to the ground truth, else 0: `0.5` equals `\frac{1}{2}`.

    The math-verify library finds the last final answer of the text (after "final answer is", in a box, in LaTeX, or a
    plain number) and compares it with sympy. Both may run forever, so this scorer runs in a worker process. Expressions
    that could exhaust stack or memory score 0, with `fault/limit` in the breakdown: nesting deeper than 30, numbers of
    more than 1,000 digits, powers and factorials of more than 131,072 bits, products of more than a million terms. The
    ground truth is LaTeX without dollar signs, or text with a box.

    Example:
        >>> MathVerify().judge(ScoreItem("", r"Therefore $x = \boxed{0.5}$", r"\frac{1}{2}"))
        Scored(value=1.0, breakdown={'answered': 1.0})
    """

    VERSION = "2"
    ISOLATION = "worker"
    PRELOAD = ("math_verify",)

    extraction: Literal["anywhere", "boxed"] = "anywhere"
    r"""Where the answer may be: anywhere the library finds one, or only in the last `\boxed{…}`."""
    strict: bool = True
    """False: variable names are ignored, and a set equals the tuple of its elements."""
    float_rounding: Annotated[int, Field(ge=0, le=15)] = 6
    """Decimal places to which numbers with a decimal point are compared."""

    def judge(self, item: ScoreItem) -> Score:
        accepted = accepted_texts(item.ground_truth)
        if accepted is None:
            return unusable(item.ground_truth)
        golds = [_gold(text) for text in accepted]
        for text, (gold, _) in zip(accepted, golds, strict=True):
            if gold is None:
                return unusable(text, "no mathematics that math-verify reads within this scorer's limits")
        box = last_boxed(item.solution)
        if box is None and self.extraction == "boxed":
            return Scored(0.0, {"answered": 0.0})
        if box is not None and _text_too_large(box):
            return _BEYOND
        text = f"\\boxed{{{box}}}" if self.extraction == "boxed" else item.solution
        try:
            return self._compared(golds, text)
        except MemoryError:
            raise  # a fresh worker process finds out whether this answer needs too much
        except _TOO_LARGE as error:
            return Unscored("limit", f"math-verify: {_one_line(error)}")
        except Exception as error:  # sympy's own, on an expression nobody has tried yet
            return Unscored("crashed", f"math-verify: {_one_line(error)}")

    def _compared(self, golds: Sequence[tuple[object, str]], text: str) -> Score:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig

        plain = () if self.extraction == "boxed" else (ExprExtractionConfig(),)
        answer, source = _read(text, (*plain, LatexExtractionConfig()))
        if answer is None:
            beyond = source and (_text_too_large(source) or _too_large_to_read(source))
            return _BEYOND if beyond else Scored(0.0, {"answered": float(source != "")})
        if any(gold == answer or written == source for gold, written in golds):
            return Scored(1.0, {"answered": 1.0})
        if _text_too_large(source) or _value_too_large(answer):
            return _BEYOND
        if type(answer).__name__ in ("NaN", "ComplexInfinity"):
            return Scored(0.0, {"answered": 1.0})  # 1/0 equals nothing; the library refuses to compare it
        return Scored(float(any(self._same(gold, answer) for gold, _ in golds)), {"answered": 1.0})

    def _same(self, gold: Any, answer: Any) -> bool:
        from math_verify import verify

        if _is_exact(gold) and _is_exact(answer):
            return bool(gold.doit() == answer.doit())
        options = {"float_rounding": self.float_rounding, "strict": self.strict, "timeout_seconds": None}
        return bool(verify(gold, answer, **options, raise_on_error=True))


@lru_cache(maxsize=256)  # the answers of a group have one ground truth
def _gold(text: str) -> tuple[object, str]:
    """The ground truth as a sympy expression, None if it cannot be read or is too large, and as it is written."""
    from math_verify import LatexExtractionConfig

    text = text.rpartition("####")[2].strip()
    boxed = text if "\\boxed" in text else f"\\boxed{{{text}}}"
    if _text_too_large(text):
        return None, ""
    try:
        gold, written = _read(boxed, (LatexExtractionConfig(),))
    except _TOO_LARGE:
        return None, ""
    return (None, "") if gold is None or _value_too_large(gold) else (gold, written)


def _read(text: str, wanted: Sequence[object]) -> tuple[object, str]:
    """The expression that the library finds in a text (None if there is none) and its source ("" if nothing is found).

    The library's own time limits are off: they are signals, for the main thread only, and the worker has a limit.
    """
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing time limit
    found = parse(text, wanted, parsing_timeout=None, raise_on_error=True)
    meaning = next((one for one in found if not isinstance(one, str)), None)
    return meaning, next((one for one in found if isinstance(one, str)), "")


def _text_too_large(text: str) -> bool:
    """Whether a text has a number that is too long, or is nested too deeply."""
    if _LONG_NUMBER.search(text):
        return True
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += 1 if match[0] in "({[" else -1
        if depth > _MAX_DEPTH:
            return True
    return False


def _too_large_to_read(latex: str) -> bool:
    """Whether LaTeX is mathematics that is too large to be parsed. Parses it again, as the library does not say it."""
    from latex2sympy2_extended.latex2sympy2 import latex2sympy

    try:
        latex2sympy(latex, is_real=True, convert_degrees=False, normalization_config=None)
    except _TOO_LARGE:
        return True
    except MemoryError:
        raise
    except Exception:  # the parser's own; text that is no mathematics raises all kinds of things
        return False
    return False


def _value_too_large(expression: object) -> bool:
    try:
        bits, terms = _size(expression)
    except (OverflowError, RecursionError):
        return True
    return bits > _MAX_BITS or terms > _MAX_TERMS


def _is_exact(expression: object) -> bool:
    """Whether it is a rational number, or evaluates to one with + · ^ and !.

    The library may fail to compare two such numbers (2^{2^{2^{2^2}}} and 2^{65536}), or factor them forever.
    """
    if getattr(expression, "is_Rational", False):
        return True
    kind, parts = type(expression).__name__, list(getattr(expression, "args", ()))
    if kind not in ("Add", "Mul", "Pow", "factorial") or not all(_is_exact(part) for part in parts):
        return False
    return kind in ("Add", "Mul") or bool(parts[-1].doit().is_Integer)  # an exponent, or what the factorial is of


def _size(expression: Any) -> tuple[float, float]:
    """Estimated bits of an expression's value (a variable has 1), and maximum number of terms when expanded."""
    if getattr(expression, "is_Integer", False):
        return math.log2(max(abs(int(expression)), 2)), 1.0
    sizes = [_size(inner) for inner in getattr(expression, "args", ())]
    if not sizes:
        return 1.0, 1.0
    bits, terms = max(size[0] for size in sizes), max(size[1] for size in sizes)
    kind = type(expression).__name__
    if kind == "Add":
        return bits + len(sizes).bit_length(), sum(size[1] for size in sizes)
    if kind == "Mul":
        return sum(size[0] for size in sizes), math.prod(size[1] for size in sizes)
    if kind == "Pow":
        exponent = abs(_value(expression.args[1], sizes[1][0]))
        return sizes[0][0] * max(1.0, exponent), _power_terms(sizes[0][1], exponent)
    if kind in ("factorial", "gamma"):
        return _MAX_BITS * 2 if sizes[0][0] > 20 else 20 * 2.0 ** sizes[0][0], 1.0
    return bits, terms


def _value(expression: Any, bits: float) -> float:
    """An exponent as a number, or an upper bound of it."""
    if getattr(expression, "is_Number", False):
        return float(expression)
    if bits >= 1000:
        return math.inf
    return 1.0 if getattr(expression, "free_symbols", None) else 2.0**bits


def _power_terms(terms: float, exponent: float) -> float:
    if terms <= 1 or exponent <= 1:
        return terms
    if exponent > _MAX_TERMS or terms > _MAX_TERMS:
        return math.inf
    logarithm = math.lgamma(terms + exponent) - math.lgamma(exponent + 1) - math.lgamma(terms)
    return math.exp(logarithm) if logarithm < 700 else math.inf


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(shown(str(error)).split())}"
