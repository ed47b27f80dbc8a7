"""The exact, numeric and regex scorers: right, wrong and missing answers, and invalid options."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protos.contracts import Unscored
from tandem.reward.contracts import Judge
from tandem.reward.scorers.exact import ExactMatch
from tandem.reward.scorers.numeric import NumericEquality, numbers_in
from tandem.reward.scorers.regex import RegexMatch
from tests.support.scores import item, value

EXACT, NUMERIC, MARKED = ExactMatch(), NumericEquality(), NumericEquality(marker="####")
LAST_LINE, HASHES = ExactMatch(last_line=True), RegexMatch(pattern=r"#### (-?\d+)")


@pytest.mark.parametrize(
    ("judge", "solution", "truth", "expected"),
    [
        (EXACT, "42", "42", 1.0),
        (EXACT, " 42\n", "42 ", 1.0),
        (EXACT, "42", 42, 1.0),
        (EXACT, "42.0", "42", 0.0),
        (EXACT, "Paris", "paris", 0.0),
        (EXACT, "", "42", 0.0),
        (EXACT, "b", ["a", "b"], 1.0),
        (EXACT, "c", ["a", "b"], 0.0),
        (ExactMatch(ignore_case=True), "PARIS", "paris", 1.0),
        (LAST_LINE, "12 + 3\nis\n 15 \n\n", "15", 1.0),
        (LAST_LINE, "15\nor not", "15", 0.0),
        (NUMERIC, "8 * 9 = 72.\n#### 72", "72", 1.0),
        (NUMERIC, "#### 1,234", "1234", 1.0),
        (NUMERIC, "it is 0.3333333", "1/3", 1.0),
        (NUMERIC, "it is 0.33", "1/3", 0.0),
        (NUMERIC, "seven", "7", 0.0),
        (NUMERIC, "7", 7, 1.0),
        (NUMERIC, "1000000.5", "1000000", 1.0),
        (NUMERIC, "7", "#### 7", 1.0),
        (MARKED, "#### 5 (checked 9 times)", "5", 1.0),
        (MARKED, "the answer is 5", "5", 0.0),
        (MARKED, "#### 3 and then #### x", "3", 1.0),
        (MARKED, "#### 3 no, #### 5", "3", 0.0),
        (HASHES, "#### 5\n#### 72", "72", 1.0),
        (HASHES, "#### 72\n#### 5", "72", 0.0),
        (HASHES, "72", "72", 0.0),
        (HASHES, "#### -3", ["-3", "three"], 1.0),
        (RegexMatch(pattern=r"<answer>.*</answer>", compare=False), "<answer>1</answer>", None, 1.0),
        (RegexMatch(pattern=r"yes|no"), "no, yes", "yes", 1.0),
        (RegexMatch(pattern=r"ANSWER (\w+)", ignore_case=True), "answer Paris", "PARIS", 1.0),
    ],
)
def test_right_and_wrong_answers(judge: Judge, solution: str, truth: Any, expected: float) -> None:
    assert value(judge.judge(item(solution, truth))) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the answer is 72.", [72.0]),
        ("1,234 eggs", [1234.0]),
        ("1,234,567.5", [1234567.5]),
        ("1, 2, 3", [1.0, 2.0, 3.0]),
        ("-5", [-5.0]),
        ("= \u22125", [-5.0]),
        ("5-3", [5.0, 3.0]),
        ("(4)-3", [4.0, 3.0]),
        ("-$5.50", [-5.5]),
        ("$1,000", [1000.0]),
        ("3/4 of it", [0.75]),
        ("a/5", [5.0]),
        ("1/0", []),
        (".5", [0.5]),
        ("1e3", [1000.0]),
        ("1e9999", []),
        ("2e", [2.0]),
        ("50%", [50.0]),
        ("no number", []),
        ("", []),
    ],
)
def test_numbers_in(text: str, found: list[float]) -> None:
    assert numbers_in(text) == found


def test_numeric_ground_truth_must_be_one_number() -> None:
    assert isinstance(NumericEquality().judge(item("1", "1 or 2")), Unscored)
    assert isinstance(NumericEquality().judge(item("1", math.nan)), Unscored)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_numeric_accepts_what_python_writes(number: float) -> None:
    assert value(NumericEquality().judge(item(f"so {number!r}", number))) == 1.0


@pytest.mark.timeout(90)
@pytest.mark.parametrize("piece", ["1", "1,", "1,111", " / ", "-", "1e"])
def test_numeric_takes_linear_time(piece: str) -> None:
    """Anything slower than linear would take hours on a million characters."""
    numbers = numbers_in(piece * (1_000_000 // len(piece)))
    assert all(math.isfinite(number) for number in numbers)
