"""Math scorers beyond the golden strings: normalisation rules, and the limits around math-verify."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tandem.protos.contracts import Scored
from tandem.reward.scorers import math_boxed, math_dapo
from tandem.reward.scorers.exact import ExactMatch
from tandem.reward.scorers.gsm8k import Gsm8k
from tandem.reward.scorers.math_boxed import MathBoxed
from tandem.reward.scorers.math_dapo import MathDapo
from tandem.reward.scorers.math_verify import MathVerify
from tandem.reward.scorers.numeric import NumericEquality
from tandem.reward.scorers.regex import RegexMatch
from tests.support.paths import ROOT
from tests.support.scores import item, refused, value

HANG_SECONDS = 5.0


def test_gsm8k_options_change_what_is_read() -> None:
    long = "#### 7\n" + "word " * 100
    assert value(Gsm8k().judge(item(long, "7"))) == 0.0
    assert value(Gsm8k(last_characters=0).judge(item(long, "7"))) == 1.0
    assert value(Gsm8k(last_characters=0, method="flexible").judge(item(long, 7))) == 1.0
    assert value(Gsm8k().judge(item("#### 3.5", 3.5))) == 1.0
    assert value(Gsm8k().judge(item("#### 8", ["7", "8"]))) == 1.0


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("\\frac{1}{2}", "\\frac{1}{2}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("\\frac{72}1", "\\frac{72}1"),
        ("3\\frac12", "3\\frac{1}{2}"),
        ("\\frac1", "\\frac1"),
        ("-1/2", "\\frac{-1}{2}"),
        ("01/2", "01/2"),
        ("1/2/3", "1/2/3"),
        ("k = 3", "3"),
        ("a=b=3", "a=b=3"),
        ("x\\in(1,.5)", "x\\in(1,.5)"),
        ("(1, .5)", "(1,0.5)"),
        ("{.5}", "{0.5}"),
        ("10\\text{ cm}", "10"),
        ("\\sqrt2+\\sqrt{3}", "\\sqrt{2}+\\sqrt{3}"),
        ("\\sqrt", None),
        ("1\\text{ m}2\\text{ cm}", None),
    ],
)
def test_latex_is_normalised(text: str, normal: str | None) -> None:
    assert math_boxed.normalised(text) == normal


def test_text_without_a_normal_form_equals_itself() -> None:
    for text in ("1\\text{ m}2\\text{ cm}", "\\sqrt"):
        assert value(MathBoxed().judge(item(f"\\boxed{{{text}}}", text))) == 1.0
        assert value(MathBoxed().judge(item(f"\\boxed{{{text} }}", "2"))) == 0.0


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("x = y = 7", "7"),
        ("$3$ and $4$", "3"),
        ("\\$3", "3"),
        ("\\text{Monday}", "Monday"),
        ("\\text{a}\\text{b}", "ab"),
        ("\\overline{AB}", "AB"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("1,000,000", "1000000"),
        ("1,x", "1,x"),
        ("90^\\circ", "90"),
        ("x, \\text{and} y", "x,y"),
        ("5 square units", "5"),
        ("\\frac23x", "\\frac{2}{3}x"),
        ("\\text{unclosed", "\\text{unclosed"),
    ],
)
def test_final_answers_are_normalised(text: str, normal: str) -> None:
    assert math_dapo.normalised(text) == normal
    assert value(MathDapo().judge(item(f"Answer: {text}", normal))) == 1.0


EXACT, NUMERIC, PATTERN = ExactMatch(), NumericEquality(), RegexMatch(pattern="(.*)")


@pytest.mark.parametrize("judge", [EXACT, NUMERIC, PATTERN, Gsm8k(), MathBoxed(), MathDapo(), MathVerify()])
@pytest.mark.parametrize("truth", [None, {"target": "1"}, [], [None], [10**5000]], ids=lambda _: "truth")
def test_a_missing_ground_truth_is_unscored(judge: Any, truth: Any) -> None:
    reason, detail = refused(judge.judge(item(r"Answer: \boxed{1} #### 1", truth)))
    assert reason == "invalid_input" and "ground truth" in detail


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        (r"so $\boxed{0.5}$", r"\frac{1}{2}", 1.0),
        (r"so $\boxed{\frac{2}{4}}$", "1/2", 1.0),
        (r"The final answer is $(x+1)^2$. I hope it is correct.", "x^2 + 2x + 1", 1.0),
        (r"$\boxed{x > 3}$", r"(3, \infty)", 0.0),
        (r"$\boxed{(3, \infty)}$", "x > 3", 1.0),
        (r"$\boxed{\{3, 1, 2\}}$", r"\{1,2,3\}", 1.0),
        (r"$\boxed{2\sqrt{3}}$", r"\sqrt{12}", 1.0),
        (r"$\boxed{1,234}$", 1234, 1.0),
        ("it is 72 eggs", "8 * 9 is 72\n#### 72", 1.0),
        ("the answer is 71", "72", 0.0),
        (r"$\boxed{7}$", ["6", "7"], 1.0),
        (r"$\boxed{1/0}$", "1", 0.0),
        (r"\boxed{}", "1", 0.0),
        ("no idea", "1", 0.0),
        ("", "1", 0.0),
    ],
)
def test_math_verify(solution: str, truth: Any, expected: float) -> None:
    assert value(MathVerify().judge(item(solution, truth))) == expected


def test_math_verify_options() -> None:
    boxed = MathVerify(extraction="boxed")
    assert boxed.judge(item("the answer is 5", "5")) == Scored(0.0, {"answered": 0.0})
    assert value(boxed.judge(item(r"\boxed{4}, no, \boxed{5}. Is 4 more?", "5"))) == 1.0
    variables = item(r"$\boxed{t^2+1}$", "x^2+1")
    assert value(MathVerify().judge(variables)) == 0.0
    assert value(MathVerify(strict=False).judge(variables)) == 1.0
    third = item(r"$\boxed{0.33}$", r"\frac{1}{3}")
    assert value(MathVerify().judge(third)) == 0.0
    assert value(MathVerify(float_rounding=2).judge(third)) == 1.0


def test_math_verify_gives_the_verdict_of_the_library() -> None:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    golden = json.loads((ROOT / "tests" / "golden" / "scorers.json").read_text())
    latex, plain = LatexExtractionConfig(), ExprExtractionConfig()
    compared = 0
    for case in golden["gsm8k"] + golden["math_reward"] + golden["math_dapo"]:
        score = MathVerify().judge(item(case["response"], case["ground_truth"]))
        gold = parse(f"\\boxed{{{case['ground_truth']}}}", (latex,), parsing_timeout=None)
        answer = parse(case["response"], (plain, latex), parsing_timeout=None)
        if isinstance(score, Scored):
            assert score.value == float(verify(gold, answer, timeout_seconds=None)), case
            compared += 1
        else:
            assert score.reason == "invalid_input" and not any(not isinstance(one, str) for one in gold), case
    assert compared > 110


@pytest.mark.parametrize("truth", ["", r"0.\overline{3}", "}{", "7" * 2000, "9^{9^{9}}", "(" * 40 + "1" + ")" * 40])
def test_a_ground_truth_that_math_verify_cannot_read_is_unscored(truth: str) -> None:
    for solution in (r"$\boxed{1}$", f"$\\boxed{{{truth}}}$"):
        reason, detail = refused(MathVerify().judge(item(solution, truth)))
        assert reason == "invalid_input" and "math-verify" in detail


BEYOND = {
    "a number of 10,000 digits": "7" * 10_000,
    "a power of 10,000 digits": "7^{" + "9" * 10_000 + "}",
    "a power of a power": "9^{9^{9^{9}}}",
    "six twos": "2^{2^{2^{2^{2^{2}}}}}",
    "a factorial of a factorial": "((10!)!)!",
    "factorial": "1000000!",
    "brackets": "(" * 5000 + "1" + ")" * 5000,
    "braces": "{" * 5000 + "1" + "}" * 5000,
    "fractions": r"\frac{1}{" * 100 + "1" + "}" * 100,
    "roots": r"\sqrt{" * 200 + "2" + "}" * 200,
    "a sum of 1,000": "+".join(["1"] * 1000),
    "a power of a sum": "(x+y+z+w)^{900}",
}


BEYOND = {name: f"So it is $\\boxed{{{latex}}}$." for name, latex in BEYOND.items()}
BEYOND |= {text: text for text in ("9**9**9**9", "9^9^9^9", "the answer is 7^7^7^7^7")}  # outside boxes, too


@pytest.mark.parametrize("text", BEYOND.values(), ids=BEYOND)
def test_expressions_that_would_exhaust_stack_or_memory_are_unscored(text: str) -> None:
    assert refused(MathVerify().judge(item(text, "4")))[0] == "limit"


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("2^{2^{2^{2^{2}}}}", "4", 0.0),
        ("2^{2^{2^{2^{2}}}}", "2^{65536}", 1.0),
        ("2^{2^{13}}", "2^{8192}", 1.0),
        ("2^{2^{13}}", "2^{8193}", 0.0),
        ("3^{2021}", "3^{2022}", 0.0),
        ("10^{10000}", "10^{10000}", 1.0),
        (r"\frac{2^{100}}{4^{51}}", "0.25", 1.0),
        (r"\frac{2^{100}}{4^{51}}", r"\frac{1}{4}", 1.0),
        (r"100 \cdot 99!", "100!", 1.0),
        (r"\frac{1}{2+" * 25 + "1" + "}" * 25, r"\frac{1}{2+" * 25 + "3" + "}" * 25, 0.0),
    ],
)
def test_large_numbers_within_the_limits_are_evaluated(answer: str, truth: str, expected: float) -> None:
    assert value(MathVerify().judge(item(f"$\\boxed{{{answer}}}$", truth))) == expected


_JUDGE_ONE = """
import json, sys
from tandem.protos.contracts import Scored, ScoreItem
from tandem.reward.registry import make_judge
solution, truth = json.loads(sys.stdin.read())
score = make_judge("math_verify", {}).judge(ScoreItem("", solution, truth))
print(type(score).__name__, score.value if isinstance(score, Scored) else score.reason)
"""

HANGING = {
    "sines of sines": (r"\sin(" * 12 + "x+2" + ")" * 12, r"\sin(" * 12 + "x+5" + ")" * 12),
    "a product of powers": ("(x+y+2)^{60}(x-y)^{40}", "(x+y+5)^{60}(x-y)^{40}"),
}


@pytest.mark.parametrize(("latex", "truth"), HANGING.values(), ids=HANGING)
def test_a_hanging_comparison_gives_no_result_until_its_process_is_killed(latex: str, truth: str) -> None:
    """Nothing may return a score before the worker's time limit kills the process."""
    question = json.dumps([f"$\\boxed{{{latex}}}$", truth])
    try:
        command = [sys.executable, "-c", _JUDGE_ONE]
        done = subprocess.run(
            command, input=question, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return
    assert done.stdout.split() in (["Unscored", "limit"], ["Unscored", "crashed"]), done
