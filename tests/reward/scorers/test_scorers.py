"""The exact, numeric and regex scorers: right, wrong and missing answers, and invalid options."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import Scored, Unscored
from tandem.reward.scorers.exact import ExactMatch
from tandem.reward.scorers.numeric import NumericEquality, numbers_in
from tandem.reward.scorers.regex import RegexMatch
from tests.support.scores import item, value


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("42", "42", 1.0),
        (" 42\n", "42 ", 1.0),
        ("42", 42, 1.0),
        ("42.0", "42", 0.0),
        ("Paris", "paris", 0.0),
        ("", "42", 0.0),
        ("b", ["a", "b"], 1.0),
        ("c", ["a", "b"], 0.0),
    ],
)
def test_exact(solution: str, truth: Any, expected: float) -> None:
    assert value(ExactMatch().judge(item(solution, truth))) == expected


def test_exact_options() -> None:
    assert value(ExactMatch(ignore_case=True).judge(item("PARIS", "paris"))) == 1.0
    assert value(ExactMatch(last_line=True).judge(item("12 + 3\nis\n 15 \n\n", "15"))) == 1.0
    assert value(ExactMatch(last_line=True).judge(item("15\nor not", "15"))) == 0.0


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


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("8 * 9 = 72.\n#### 72", "72", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("it is 0.3333333", "1/3", 1.0),
        ("it is 0.33", "1/3", 0.0),
        ("seven", "7", 0.0),
        ("7", 7, 1.0),
        ("1000000.5", "1000000", 1.0),
        ("7", "#### 7", 1.0),
    ],
)
def test_numeric(solution: str, truth: Any, expected: float) -> None:
    assert value(NumericEquality().judge(item(solution, truth))) == expected


def test_numeric_marker() -> None:
    judge = NumericEquality(marker="####")
    assert value(judge.judge(item("#### 5 (checked 9 times)", "5"))) == 1.0
    assert value(judge.judge(item("the answer is 5", "5"))) == 0.0
    assert value(judge.judge(item("#### 3 and then #### x", "3"))) == 1.0
    assert value(judge.judge(item("#### 3 no, #### 5", "3"))) == 0.0


def test_numeric_ground_truth_must_be_one_number() -> None:
    assert isinstance(NumericEquality().judge(item("1", "1 or 2")), Unscored)
    assert isinstance(NumericEquality().judge(item("1", math.nan)), Unscored)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789.,-+/eE$ #x\n", max_size=60))
def test_numeric_never_raises(text: str) -> None:
    assert isinstance(NumericEquality().judge(item(text, "1")), Scored)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_numeric_accepts_what_python_writes(number: float) -> None:
    assert value(NumericEquality().judge(item(f"so {number!r}", number))) == 1.0


@pytest.mark.timeout(90)
@pytest.mark.parametrize("piece", ["1", "1,", "1,111", " / ", "-", "1e"])
def test_numeric_takes_linear_time(piece: str) -> None:
    """Anything slower than linear would take hours on a million characters."""
    numbers_in(piece * (1_000_000 // len(piece)))


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("#### 5\n#### 72", "72", 1.0),
        ("#### 72\n#### 5", "72", 0.0),
        ("72", "72", 0.0),
        ("#### -3", ["-3", "three"], 1.0),
    ],
)
def test_regex_compares_the_last_match(solution: str, truth: Any, expected: float) -> None:
    assert value(RegexMatch(pattern=r"#### (-?\d+)").judge(item(solution, truth))) == expected


def test_regex_options() -> None:
    assert value(RegexMatch(pattern=r"<answer>.*</answer>", compare=False).judge(item("<answer>1</answer>"))) == 1.0
    assert value(RegexMatch(pattern=r"yes|no").judge(item("no, yes", "yes"))) == 1.0
    assert value(RegexMatch(pattern=r"ANSWER (\w+)", ignore_case=True).judge(item("answer Paris", "PARIS"))) == 1.0
