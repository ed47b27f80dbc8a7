"""Rule scorers against the scores of another implementation (see golden/README.md), for every string and option set;
math scorers beyond the golden strings: normalisation rules, and the limits around math-verify.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from tandem.protos.contracts import Scored
from tandem.reward.scorers import math_boxed, math_dapo
from tandem.reward.scorers.exact import ExactMatch
from tandem.reward.scorers.gsm8k import Gsm8k
from tandem.reward.scorers.math_boxed import MathBoxed
from tandem.reward.scorers.math_dapo import MathDapo
from tandem.reward.scorers.math_verify import MathVerify
from tandem.reward.scorers.multiple_choice import MultipleChoice
from tandem.reward.scorers.numeric import NumericEquality
from tandem.reward.scorers.regex import RegexMatch
from tandem.reward.scorers.short_answer import ShortAnswer
from tests.support.golden_cases import GoldenCase, golden_cases
from tests.support.paths import GOLDEN, ROOT
from tests.support.scores import item, judge_of, refused, value

CASES: dict[str, list[dict[str, Any]]] = {
    name: cases for name, cases in json.loads((GOLDEN / "scorers.json").read_text()).items() if isinstance(cases, list)
}

WAYS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "gsm8k": {
        "strict": ("gsm8k", {}),
        "strict_format0.1": ("gsm8k", {"format_score": 0.1}),
        "flexible": ("gsm8k", {"method": "flexible"}),
        "flexible_format0.1": ("gsm8k", {"method": "flexible", "format_score": 0.1}),
    },
    "math_reward": {"default": ("math_boxed", {})},
    "math_dapo": {"default": ("math_dapo", {}), "strict_box": ("math_dapo", {"strict_box": True})},
    "search_em": {
        "em": ("short_answer", {}),
        "em_format0.1": ("short_answer", {"format_score": 0.1}),
        "subem": ("short_answer", {"metric": "contained"}),
    },
}
"""Name of the golden scorer → kind of score → our scorer and the options that give it."""


PAGE = ROOT / "docs" / "reward.md"


def test_the_reward_page_names_scorer_and_options_for_every_golden_case() -> None:
    table = PAGE.read_text().partition("| kind of score there |")[2].partition("\n\n")[0]
    shown: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {name: {} for name in WAYS}
    for name, kind, scorer, options in re.findall(r"^\| `(\w+)` `(\S+)` \|.*\| `(\w+)` \| `(.+)` \|$", table, re.M):
        shown[name][kind] = scorer, tomllib.loads(f"arguments = {options}")["arguments"]
    assert shown == WAYS


def penalties(case: GoldenCase, **options: Any) -> list[float]:
    """The overlong penalty of each length of a case."""
    judge = judge_of("overlong", options)
    return [value(judge.judge(item("", num_tokens=length))) for length in case.inputs["lengths"].tolist()]


def test_every_golden_case_can_be_expressed_with_a_scorer() -> None:
    kinds = {name: {kind for case in cases for kind in case["scores"]} for name, cases in CASES.items()}
    assert kinds == {name: set(ways) for name, ways in WAYS.items()}
    assert {name: len(cases) for name, cases in CASES.items()} == dict.fromkeys(WAYS, 40)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, ways in WAYS.items() for kind in ways], ids=lambda text: text
)
def test_golden_scores(name: str, kind: str) -> None:
    judge = judge_of(*WAYS[name][kind])
    got, want = {}, {}
    for case in CASES[name]:
        score = judge.judge(item(case["response"], case["ground_truth"]))
        got[case["id"]] = score.value if isinstance(score, Scored) else score
        want[case["id"]] = case["scores"][kind]
    assert got == want


@pytest.mark.parametrize(
    ("name", "kind", "read"),
    [
        ("gsm8k", "strict", "strict"),
        ("gsm8k", "flexible", "flexible"),
        ("math_reward", "default", "default"),
        ("math_dapo", "strict_box", "strict_box"),
        ("search_em", "em", "default"),
    ],
)
def test_answered_is_1_if_an_answer_was_extracted(name: str, kind: str, read: str) -> None:
    judge = judge_of(*WAYS[name][kind])
    for case in CASES[name]:
        score = judge.judge(item(case["response"], case["ground_truth"]))
        assert isinstance(score, Scored)
        assert score.breakdown["answered"] == float(case["extracted"][read] is not None), case


def test_the_ground_truth_of_search_data_sets_may_be_a_table() -> None:
    for case in CASES["search_em"]:
        as_table = item(case["response"], {"target": case["ground_truth"]})
        assert value(judge_of("short_answer", {}).judge(as_table)) == case["scores"]["em"]


@pytest.mark.parametrize("case", golden_cases("dapo/overlong/"), ids=lambda case: case.name)
def test_golden_overlong_penalty(case: GoldenCase) -> None:
    longest, buffer = case.hyper["max_resp_len"], case.hyper["overlong_buffer_len"]
    got = penalties(case, max_length=longest, buffer=buffer, factor=case.hyper["penalty_factor"], beyond="ramp")
    assert got == pytest.approx(case.outputs["penalty"].tolist(), rel=1e-5, abs=1e-6)


def test_the_overlong_penalty_is_flat_beyond_the_limit_by_default() -> None:
    case = golden_cases("dapo/overlong/4.beyond_max/s0")[0]
    got, ramp = penalties(case, max_length=64, buffer=16), case.outputs["penalty"].tolist()
    assert got == pytest.approx([max(-1.0, penalty) for penalty in ramp]) and min(ramp) < -1.0


# ---- mathematics beyond the golden strings ----

HANG_SECONDS = 2.0


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


JUDGES = [ExactMatch(), NumericEquality(), RegexMatch(pattern="(.*)"), ShortAnswer(), MultipleChoice()]


@pytest.mark.parametrize("judge", [*JUDGES, Gsm8k(), MathBoxed(), MathDapo(), MathVerify()])
@pytest.mark.parametrize("truth", [None, {"goal": "1"}, [], [None], [10**5000]], ids=lambda _: "truth")
def test_a_missing_ground_truth_is_unscored(judge: Any, truth: Any) -> None:
    reason, detail = refused(judge.judge(item(r"Answer: \boxed{1} #### 1", truth)))
    assert reason == "invalid_input" and detail.startswith("ground truth ")


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
def test_expressions_that_would_exhaust_stack_or_memory_score_0(text: str) -> None:
    assert MathVerify().judge(item(text, "4")) == Scored(0.0, {"answered": 1.0, "fault/limit": 1.0})


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
judge = make_judge("math_verify", {})
print(judge.judge(ScoreItem("", "1", "2")).value, flush=True)
score = judge.judge(ScoreItem("", *json.loads(sys.argv[1])))
print(type(score).__name__, score.value if isinstance(score, Scored) else score.reason)
"""


def test_a_hanging_comparison_gives_no_result_until_its_process_is_killed() -> None:
    """Nothing may return a score before the worker's time limit kills the process."""
    question = json.dumps([r"$\boxed{(x+y+2)^{60}(x-y)^{40}}$", "(x+y+5)^{60}(x-y)^{40}"])
    with subprocess.Popen([sys.executable, "-c", _JUDGE_ONE, question], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"0.0\n"
        try:
            said, _ = process.communicate(timeout=HANG_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return
    assert said.split() in ([b"Unscored", b"limit"], [b"Unscored", b"crashed"])
