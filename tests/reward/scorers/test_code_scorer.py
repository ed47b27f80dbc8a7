"""The code scorer: extraction of the program, test formats, credit, and which failures are the answer's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.protos.contracts import Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.sandbox import trial as code_trial
from tandem.reward.sandbox.sandbox import SandboxError
from tandem.reward.scorers.code import CodeTests
from tests.support import scores
from tests.support.code_answers import ADD, DOUBLE, DOUBLE_TESTS, counted, isolated, judge, value

UNITTEST = """
import unittest
class Cases(unittest.TestCase):
    def test_one(self):
        self.assertEqual(add(1, 2), 3)
"""

PYTEST = """
from solution import add
def test_add():
    assert add(1, 2) == 3
def test_more():
    assert add(0, 2) == 2
"""
METHOD = "class Solution:\n    def add(self, a: List[int], b): return (*a, *b)"
IMPORTED = ["from math import isclose"]
MBPP = {"test_list": ["assert isclose(add(a, 2), 3)"], "test_setup_code": "a = 1", "test_imports": IMPORTED}

# ---- test formats ----


@isolated
@pytest.mark.parametrize(
    ("code", "ground_truth"),
    [
        (DOUBLE, DOUBLE_TESTS),
        (DOUBLE, json.dumps(DOUBLE_TESTS)),
        ("print(input() + input())", {"inputs": [["a", "b"]], "outputs": [["ab"]]}),
        (DOUBLE, [{"input": "4\n", "output": "8\n", "testtype": "stdin"}, {"input": "1", "output": "2"}]),
        (ADD, {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]", '"a"\n"b"'], "outputs": ["3", "[1, 2]", '"ab"']}),
        (ADD, {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [[1, 2]]]}),
        (METHOD, {"fn_name": "add", "inputs": ["[1]\n[2]"], "outputs": ["[1, 2]"]}),
        (METHOD, {"fn_name": "Solution().add", "inputs": ["[]\n[2]"], "outputs": ["[2]"]}),
        (ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert set(add([1], [1])) == {1}"]),
        (ADD, json.dumps(["assert add(1, 2) == 3"])),
        (ADD, "assert add(1, 2) == 3\nassert add(2, 2) == 4"),
        (ADD, MBPP),
        (ADD, {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}),
        (ADD, PYTEST),
        (ADD, {"test": UNITTEST}),
        (ADD, [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]),
        (ADD, {"test": "assert candidate(1, 2) == add(2, 1) == 3", "entry_point": "add"}),
    ],
)
def test_a_correct_answer_passes_every_test_format(code: str, ground_truth: Any) -> None:
    assert value(code, ground_truth) == 1.0
    broken = code.replace("+", "-").replace("2 *", "3 *").replace("*b)", "*b, 0)")
    assert value(broken, ground_truth) == 0.0


@isolated
def test_the_function_name_may_come_from_the_item() -> None:
    tests = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    score = judge(ADD, tests, {"fn_name": "add"})
    assert isinstance(score, Scored) and score.value == 1.0
    nameless = judge(ADD, tests)
    assert isinstance(nameless, Unscored) and "extra_info has no fn_name" in nameless.detail


@pytest.mark.parametrize(
    ("ground_truth", "named"),
    [
        (None, "None holds no tests"),
        ("42", "'42' holds no tests"),
        (7, "7 holds no tests"),
        ([], "[] holds no tests"),
        ({}, "{} holds no tests"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 tests"),
        ({"inputs": [1], "outputs": ["1"]}, "inputs[0] is neither text nor a list of lines"),
        ({"inputs": ["1", "2"], "outputs": ["1", None]}, "outputs[1] is neither"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "no name"}, "'no name' is no function's name"),
        ({"inputs": ["{"], "outputs": ["1"], "fn_name": "f"}, "inputs[0] or outputs[0] is not JSON"),
        ({"inputs": [3], "outputs": ["1"], "fn_name": "f"}, "inputs[0] is neither a list of arguments"),
        ({"inputs": ["[" * 100_000], "outputs": ["1"], "fn_name": "f"}, "is not JSON"),
        (["assert f()", 3], "is not a list of statements"),
        ({"test_list": "assert f()"}, "holds no tests"),
        ([{"input": "1", "output": "2"}, {"input": "1"}], "has no input or no output"),
        ({"test": "x", "entry_point": 3}, "3 is no function's name"),
        ("{" * 100_000, "holds no tests"),
        ({"inputs": ["1"] * 10_001, "outputs": ["1"] * 10_001}, "10001 tests"),
    ],
)
def test_tests_that_cannot_be_used_are_invalid_input(ground_truth: Any, named: str) -> None:
    score = judge(DOUBLE, ground_truth)
    assert isinstance(score, Unscored) and score.reason == "invalid_input"
    assert named in score.detail and score.detail.startswith("ground truth: ") and "\n" not in score.detail


@isolated
@pytest.mark.parametrize(
    ("test", "named"),
    [
        ("assert f(1) ===", "does not compile"),
        ("def check(candidate):\n  assert 1\n assert 2", "does not compile"),
        ("a\0", "does not compile"),
        ("def check(candidate):\n    assert candidate(1) == 1", "no entry_point"),
        ("def test_f(capsys):\n    assert f(1) == 1", "test_f takes arguments"),
    ],
)
def test_a_test_that_no_answer_can_pass_is_invalid_input(test: str, named: str) -> None:
    score = judge("def f(x): return x", {"test": test})
    assert isinstance(score, Unscored) and score.reason == "invalid_input" and named in score.detail


# ---- statements that call an answer in another process ----

POINT = "class P:\n    def __init__(self, a): self.a = a\n    def twice(self): return 2 * self.a"
DATA = "{(1, 2): b'x', 'y': 1j, None: frozenset([1])}"


@isolated
@pytest.mark.parametrize(
    ("program", "test"),
    [
        (POINT, "p = P(4)\nassert p.a == 4 and p.twice() == 8"),
        (f"{POINT}\ndef most(ps): return max(p.a for p in ps)", "assert most([P(1), P(3)]) == 3"),
        ("def f(x): x.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"),
        ("def f(x): x['a'] = 1", "x = {}\nf(x)\nassert x == {'a': 1}"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(): raise ValueError('no')", "try: f()\nexcept ValueError as e: assert str(e) == 'no'\nelse: assert 0"),
        ("def f(x, *, y): return x, y", "assert f(1, y={2, 3}) == (1, {2, 3})"),
        (f"def f(): return {DATA}", f"assert f() == {DATA}"),
        ("def f(): return 1 << 100_000", "assert f() == 1 << 100_000"),
        ("def f(): return float('nan')", "import math\nassert math.isnan(f())"),
        ("LIMIT = 10\ndef f(): return LIMIT", "assert f() == LIMIT == 10"),
        ("def sum(a, b): return 6", "assert sum(10, 15) == 6"),
        ("def gcd(a, b): return 2", "assert gcd(4, 6) == 2"),
        ("def select(x): return x", "assert set(select([1])) == {1}"),
        ("def f(g): return g", "class Mine: pass\nassert f(1) == 1"),
        ("def apply(x): return x", "def helper(x):\n    return apply(x) + 1\nassert helper(1) == 2"),
        ("P = collections.namedtuple('P', 'x y')\ndef f(): return P(1, 2)", "assert f() == (1, 2)"),
        ("def f(x): return x", "import re\nassert re.match('a+', f('aa'))"),
    ],
)
def test_test_statements_see_the_answer_in_another_process(program: str, test: str) -> None:
    assert value(program, [test]) == 1.0


@isolated
def test_one_test_may_call_the_answer_many_times() -> None:
    test = "for n in range(2000):\n    assert f(n) == n + 1"
    assert value("def f(n): return n + 1", {"test": test}) == 1.0
    assert value("def f(n): return n + (n < 1999)", {"test": test}) == 0.0


# ---- extraction ----


@isolated
def test_the_last_closed_code_block_or_the_whole_answer_is_the_program() -> None:
    right, wrong = f"```python\n{DOUBLE}\n```\n", "```\nprint(0)\n```\n"
    scorer = CodeTests()

    def of(solution: str) -> float:
        return scores.value(scorer.judge(ScoreItem("", solution, DOUBLE_TESTS)))

    assert of(wrong + right) == 1.0 and of(right + wrong) == 0.0
    assert of(f"<think>\n{wrong}</think>\n{right}") == 1.0
    assert of(right + "```python\nprint(0)") == 1.0, "a block that was never closed is none"
    assert scores.value(CodeTests(extract="whole").judge(ScoreItem("", DOUBLE, DOUBLE_TESTS))) == 1.0


@pytest.mark.parametrize("solution", ["", "I do not know.", DOUBLE, "```python\nprint(1)", "```python\n\n```"])
def test_an_answer_without_a_program_is_wrong(solution: str) -> None:
    score = CodeTests().judge(ScoreItem("", solution, DOUBLE_TESTS))
    assert isinstance(score, Scored) and score.value == 0.0
    assert counted(score) == {"no_code": 1.0, "total": 3.0, "not_run": 3.0}


# ---- credit ----

SOMETIMES = "n = int(input())\nprint(2 * n if n > 0 else 0)"


@isolated
def test_all_or_nothing_stops_at_the_first_failure_and_partial_credit_does_not() -> None:
    tests = {"inputs": ["1", "-1", "2", "-2"], "outputs": ["2", "-2", "4", "-4"]}
    score = judge(SOMETIMES, tests)
    assert isinstance(score, Scored) and score.value == 0.0
    assert counted(score) == {"passed": 1.0, "wrong": 1.0, "not_run": 2.0, "total": 4.0}
    score = judge(SOMETIMES, tests, partial=True)
    assert isinstance(score, Scored) and score.value == 0.5
    assert counted(score) == {"passed": 2.0, "wrong": 2.0, "total": 4.0}
    score = judge(SOMETIMES, tests, partial=True, max_tests=2)
    assert counted(score) == {"passed": 2.0, "total": 2.0}, "the first and the third"


@isolated
@pytest.mark.parametrize(
    ("program", "counter"),
    [
        ("print(0)", "wrong"),
        ("1 / 0", "error"),
        ("print(2 * int(input()))\n1 / 0", "error"),
        ("while True: pass", "time"),
        ("import time\ntime.sleep(60)", "time"),
        ("x = bytearray(1 << 30)", "memory"),
        ("while True: print('x' * 10000)", "output"),
    ],
)
def test_a_program_that_fails_is_a_wrong_answer(program: str, counter: str) -> None:
    score = judge(program, DOUBLE_TESTS, seconds_per_test=0.5 if counter == "time" else 20.0, memory_bytes=256 << 20)
    assert isinstance(score, Scored) and score.value == 0.0
    assert counted(score) == {counter: 1.0, "not_run": 2.0, "total": 3.0}


@isolated
@pytest.mark.parametrize(
    ("program", "counter"),
    [
        ("def f(x): return 0", "wrong"),
        ("def f(x): return 1 / 0", "error"),
        ("def g(x): return 1", "error"),
        ("def f(): return 1", "error"),
        ("f = 1", "error"),
        ("1 / 0", "error"),
        ("def f(x):\n    while True: pass", "time"),
        ("while True: pass", "time"),
        ("def f(x): return bytearray(1 << 30)", "memory"),
        ("def f(x):\n    while True: print('x' * 10000)", "output"),
        ("import os\ndef f(x): os._exit(0)", "error"),
        ("def f(x):\n    x = []\n    x.append(x)\n    return x", "error"),
        ("def f(x): return 'x' * 20_000_000", "error"),
    ],
)
@pytest.mark.parametrize("shape", ["call", "statement"])
def test_a_function_that_fails_is_a_wrong_answer(program: str, counter: str, shape: str) -> None:
    tests = {"fn_name": "f", "inputs": ["1"], "outputs": ["1"]} if shape == "call" else ["assert f(1) == 1"]
    score = judge(program, tests, seconds_per_test=0.5 if counter == "time" else 20.0, memory_bytes=256 << 20)
    assert isinstance(score, Scored) and score.value == 0.0
    expected = {"wrong", "error", "memory"} if "20_000_000" in program else {counter}
    assert set(counted(score)) - {"total"} <= expected


@isolated
def test_seconds_per_answer_limits_all_tests_together() -> None:
    program, tests = "import time\ntime.sleep(0.5)\nprint(1)", {"inputs": [""] * 100, "outputs": ["1"] * 100}
    found = counted(judge(program, tests, partial=True, seconds_per_test=1.0, seconds_per_answer=1.2))
    assert found["passed"] <= 2 and found["time"] == 100 - found["passed"]


@isolated
def test_the_prelude_runs_first_and_can_be_empty() -> None:
    head = "class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n        "
    program = f"{head}return gcd(*x) + len(Counter(x)) + math.floor(1.5)"
    tests = {"fn_name": "f", "inputs": ["[4, 6]"], "outputs": ["5"]}
    assert value(program, tests) == 1.0
    assert value(program, tests, prelude="") == 0.0
    prelude = "import math\nfrom math import gcd\nfrom typing import *\nfrom collections import Counter"
    assert value(program, tests, prelude=prelude) == 1.0


@isolated
def test_listed_packages_can_be_imported() -> None:
    program = "import numpy as np\nprint(np.arange(int(input())).sum())"
    assert value(program, {"inputs": ["4"], "outputs": ["6"]}, packages=("numpy",)) == 1.0
    function = "import numpy as np\ndef f(n): return np.arange(n)"
    called = {"fn_name": "f", "inputs": ["2"], "outputs": ["[0, 1]"]}
    assert value(function, called, packages=("numpy",)) == 1.0
    for package in ("no_such_package", "../reward"):
        with pytest.raises(ScorerError, match=f"packages: {package} is not installed"):
            CodeTests(packages=(package,)).start()


@isolated
def test_tests_of_an_answer_share_no_state() -> None:
    program = "import os\nprint(len(os.listdir('.')))\nopen(f'note{os.getpid()}', 'w').write('x')"
    assert value(program, {"inputs": [""] * 3, "outputs": ["0"] * 3}) == 1.0


# ---- infrastructure ----


def test_a_sandbox_that_does_not_start_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def take(self) -> None:
            raise SandboxError("a sandbox did not start: no memory")

    monkeypatch.setattr(code_trial, "sandboxes", lambda packages, allow: Broken())
    assert judge(DOUBLE, DOUBLE_TESTS) == Unscored("infrastructure", "a sandbox did not start: no memory")


def test_missing_isolation_fails_at_start_and_is_infrastructure_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(packages: tuple[str, ...], allow: bool) -> None:
        raise ScorerError("this machine has no isolation for untrusted code")

    monkeypatch.setattr(code_trial, "sandboxes", none)
    with pytest.raises(ScorerError, match="no isolation"):
        CodeTests().start()
    assert judge(DOUBLE, DOUBLE_TESTS) == Unscored("infrastructure", "this machine has no isolation for untrusted code")
