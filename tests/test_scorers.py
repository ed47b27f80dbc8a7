"""The scorers: what is right, what is wrong, what is no answer at all, and what a recipe may not ask."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.contracts import Score, Scored, ScoreItem, Unscored
from protos.errors import ScorerError
from reward.config import RewardConfig
from reward.exact import ExactMatch
from reward.function import load_function, to_score
from reward.numeric import NumericEquality, numbers_in
from reward.regex import RegexMatch
from reward.registry import InProcessScorer, build_scorer, make_judge, validate


def item(solution: str, ground_truth: Any) -> ScoreItem:
    return ScoreItem("test", solution, ground_truth)


def value(score: Score) -> float:
    assert isinstance(score, Scored), score
    return score.value


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


@pytest.mark.parametrize("judge", [ExactMatch(), RegexMatch("(.*)"), NumericEquality()])
@pytest.mark.parametrize("truth", [None, {"target": "1"}, [], [None]])
def test_a_ground_truth_of_another_kind_is_unscored_not_zero(judge: Any, truth: Any) -> None:
    score = judge.judge(item("1", truth))
    assert isinstance(score, Unscored) and score.reason == "invalid_input" and "ground truth" in score.detail


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


def test_numeric_takes_linear_time() -> None:
    started = time.monotonic()
    for text in ("1" * 200_000, "1," * 100_000, "1,111" * 40_000, " / " * 70_000, "-" * 200_000, "1e" * 100_000):
        numbers_in(text)
    assert time.monotonic() - started < 5.0


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
    assert value(RegexMatch(r"#### (-?\d+)").judge(item(solution, truth))) == expected


def test_regex_options() -> None:
    assert value(RegexMatch(r"<answer>.*</answer>", compare=False).judge(item("<answer>1</answer>", None))) == 1.0
    assert value(RegexMatch(r"yes|no").judge(item("no, yes", "yes"))) == 1.0
    assert value(RegexMatch(r"ANSWER (\w+)", ignore_case=True).judge(item("answer Paris", "PARIS"))) == 1.0


class _Scalar:
    """As a torch tensor of one element looks."""

    def item(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (1, Scored(1.0)),
        (True, Scored(1.0)),
        (0.25, Scored(0.25)),
        (np.float32(0.5), Scored(0.5)),
        (np.bool_(True), Scored(1.0)),
        (np.array([0.5]), Scored(0.5)),
        (_Scalar(), Scored(0.5)),
        ({"score": 1, "acc": True, "pred": "x", "length": 3}, Scored(1.0, {"acc": 1.0, "length": 3.0})),
        ({"score": 0.5, "bad": math.nan}, Scored(0.5)),
    ],
)
def test_results_of_functions(result: Any, expected: Scored) -> None:
    assert to_score(result) == expected


@pytest.mark.parametrize(
    "result", [math.nan, math.inf, None, "1", [1.0], {"acc": 1}, {"score": None}, np.array([1, 2]), 10**400, (1.0, {})]
)
def test_results_that_are_no_score(result: Any) -> None:
    score = to_score(result)
    assert isinstance(score, Unscored) and score.reason == "invalid_input" and score.detail


FUNCTIONS = """
from pathlib import Path
import neighbour

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise KeyError("nothing here")
    if solution_str == "leave":
        raise SystemExit(1)
    return {"score": float(solution_str == ground_truth), "bonus": neighbour.BONUS + extra_info.get("bonus", 0)}

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5

def scaled(data_source, solution_str, ground_truth, extra_info, scale=1.0, **rest):
    return scale

def narrow(solution_str, ground_truth):
    return 0.0
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("BONUS = 2\n")
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


def test_function_with_verls_signature(functions: Path) -> None:
    judge = load_function(f"{functions}:compute_score", {})
    assert judge.judge(ScoreItem("d", "1", "1", {"bonus": 1})) == Scored(1.0, {"bonus": 3.0})
    raised = judge.judge(item("raise", "1"))
    assert isinstance(raised, Unscored) and raised.reason == "crashed"
    assert "KeyError: 'nothing here' (functions.py:7)" in raised.detail
    assert judge.judge(item("leave", "1")).reason == "crashed"  # type: ignore[union-attr]
    assert load_function(f"{functions}:later", {}).judge(item("1", "1")) == Scored(0.5)
    assert load_function(f"{functions}:scaled", {"scale": 3, "more": 1}).judge(item("1", "1")) == Scored(3.0)


def test_function_by_module() -> None:
    with pytest.raises(ScorerError, match="has no function nothing"):
        load_function("reward.function:nothing", {})


@pytest.mark.parametrize(
    ("path", "arguments", "told"),
    [
        ("{here}/functions.py:absent", {}, "has no function absent; it has compute_score, later, scaled, narrow"),
        ("{here}/functions.py:compute_score", {"scale": 2}, "unexpected keyword argument 'scale'"),
        ("{here}/functions.py:narrow", {}, "called with data_source, solution_str, ground_truth, extra_info"),
        ("{here}/absent.py:f", {}, "absent.py is no file"),
        ("{here}/broken.py:f", {}, "does not import: SyntaxError"),
        ("{here}/lacking.py:f", {}, "does not import: ModuleNotFoundError: No module named 'surely_not_there'"),
        ("surely.not.there:f", {}, "no module named surely.not.there"),
    ],
)
def test_functions_that_cannot_be_loaded(functions: Path, path: str, arguments: dict[str, Any], told: str) -> None:
    (functions.parent / "broken.py").write_text("def f(:\n")
    (functions.parent / "lacking.py").write_text("import surely_not_there\n")
    with pytest.raises(ScorerError) as caught:
        load_function(path.format(here=functions.parent), arguments)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"scorer": "exat"}, "'exat' is unknown; did you mean exact?"),
        ({"scorer": "something"}, "There are exact, regex, numeric, module.path:function"),
        (
            {"scorer": "exact", "arguments": {"ignore_cas": True}},
            "did you mean ignore_case? It takes ignore_case, last_line",
        ),
        ({"scorer": "exact", "arguments": {"ignore_case": "yes"}}, "needs a bool there, got 'yes'"),
        ({"scorer": "numeric", "arguments": {"tolerance": True}}, "needs a float there"),
        ({"scorer": "numeric", "arguments": {"tolerance": -1}}, "tolerance must be finite and at least 0"),
        ({"scorer": "regex"}, "reward.arguments.pattern is missing"),
        ({"scorer": "regex", "arguments": {"pattern": "(1"}}, "pattern '(1' is not a regular expression: missing )"),
        ({"scorer": "surely.not.there:f"}, "no module named surely.not.there"),
    ],
)
def test_recipes_that_cannot_be_scored(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ScorerError) as caught:
        validate(RewardConfig(**config))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_validation_leaves_user_code_out_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("import sys\nsys.tandem_was_here = True\ndef f(**everything):\n    return 1\n")
    validate(RewardConfig(scorer=f"{tmp_path}/loud.py:f"))
    import sys

    assert not hasattr(sys, "tandem_was_here")


def test_built_in_scorers_need_no_process() -> None:
    scorer = build_scorer(RewardConfig(scorer="numeric", arguments={"tolerance": 0.2}))
    assert isinstance(scorer, InProcessScorer) and scorer.name == "numeric"
    assert scorer.score([item("5", "6"), item("4", "6")]) == [Scored(1.0), Scored(0.0)]
    scorer.close()
    assert isinstance(make_judge("exact", {}), ExactMatch)
