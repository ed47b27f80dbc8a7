"""The code scorer: where the program is, the shapes of tests, what counts as right, who is to blame, and programs that cheat."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.contracts import Score, Scored, ScoreItem, Unscored
from protos.errors import ScorerError
from reward import code_trial
from reward.code import CodeTests
from reward.code_tests import (
    CallTest,
    ScriptTest,
    StatementTest,
    UnusableTestsError,
    parse_tests,
    same_output,
    same_value,
    spread,
)
from reward.sandbox.isolation import find_isolation
from reward.sandbox.sandbox import SandboxError

isolated = pytest.mark.skipif(
    find_isolation().name == "none", reason=f"no isolation here: {'; '.join(find_isolation().faults)}"
)

DOUBLE = "print(2 * int(input()))"
DOUBLE_TESTS = {"inputs": ["1\n", "5\n", "-3\n"], "outputs": ["2\n", "10\n", "-6\n"]}
ADD = "def add(a, b):\n    return a + b"


UNITTEST = """
import unittest
class Cases(unittest.TestCase):
    def test_one(self):
        self.assertEqual(add(1, 2), 3)
"""


def answer(code: str) -> str:
    return f"First some thoughts.\n\n```python\n{code}\n```\nThat is all."


def judge(code: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **parameters: Any) -> Score:
    scorer = CodeTests(**parameters)
    return scorer.judge(ScoreItem("", answer(code), ground_truth, extra_info or {}))


def value(code: str, ground_truth: Any, **parameters: Any) -> float:
    score = judge(code, ground_truth, **parameters)
    assert isinstance(score, Scored), score
    return score.value


def counted(score: Score) -> dict[str, float]:
    assert isinstance(score, Scored), score
    return {name: number for name, number in score.breakdown.items() if number}


# ---- shapes of tests ----


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
        (
            "class Solution:\n    def add(self, a: List[int], b):\n        return (*a, *b)",
            {"fn_name": "add", "inputs": ["[1]\n[2]"], "outputs": ["[1, 2]"]},
        ),
        (
            "class Solution:\n    def add(self, a, b): return a + b",
            {"fn_name": "Solution().add", "inputs": ["1\n2"], "outputs": ["3"]},
        ),
        (ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert set(add([1], [1])) == {1}"]),
        (ADD, json.dumps(["assert add(1, 2) == 3"])),
        (ADD, "assert add(1, 2) == 3\nassert add(2, 2) == 4"),
        (
            ADD,
            {
                "test_list": ["assert isclose(add(a, 2), 3)"],
                "test_setup_code": "a = 1",
                "test_imports": ["from math import isclose"],
            },
        ),
        (ADD, {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}),
        (
            ADD,
            "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n\ndef test_more():\n    assert add(0, 2) == 2",
        ),
        (ADD, {"test": UNITTEST}),
        (ADD, [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]),
        (ADD, {"test": "assert candidate(1, 2) == add(2, 1) == 3", "entry_point": "add"}),
    ],
)
def test_right_answers_to_tests_of_every_shape(code: str, ground_truth: Any) -> None:
    assert value(code, ground_truth) == 1.0
    broken = code.replace("+", "-").replace("2 *", "3 *").replace("*b)", "*b, 0)")
    assert value(broken, ground_truth) == 0.0


@isolated
def test_the_functions_name_may_come_from_the_item() -> None:
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
def test_a_test_that_nobody_could_pass_is_invalid_input(test: str, named: str) -> None:
    score = judge("def f(x): return x", {"test": test})
    assert isinstance(score, Unscored) and score.reason == "invalid_input" and named in score.detail


def test_parsed_tests_are_what_they_say() -> None:
    assert parse_tests(DOUBLE_TESTS, {})[1] == ScriptTest("5\n", "10\n")
    assert parse_tests({"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[3]]}, {}) == [
        CallTest("f", (1, [2]), ([3], 3))
    ]
    assert parse_tests({"test": "t", "entry_point": "f"}, {}) == [StatementTest("t", "f")]
    with pytest.raises(UnusableTestsError):
        parse_tests("no tests", {})


@given(st.integers(1, 50), st.integers(0, 60))
def test_a_selection_of_tests_is_even_and_in_order(number: int, most: int) -> None:
    tests = [ScriptTest(str(place), "") for place in range(number)]
    chosen = spread(tests, most)
    assert len(chosen) == (min(number, most) if most else number)
    places = [int(test.stdin) for test in chosen]
    assert places == sorted(set(places)) and places[0] == 0
    gaps = [after - before for before, after in zip(places, [*places[1:], number], strict=True)]
    assert max(gaps) - min(gaps) <= 1


# ---- where the program is ----


@isolated
def test_the_last_closed_block_counts() -> None:
    right, wrong = f"```python\n{DOUBLE}\n```\n", "```\nprint(0)\n```\n"
    scorer = CodeTests()

    def of(solution: str) -> float:
        score = scorer.judge(ScoreItem("", solution, DOUBLE_TESTS))
        assert isinstance(score, Scored)
        return score.value

    assert of(wrong + right) == 1.0 and of(right + wrong) == 0.0
    assert of(f"<think>\n{wrong}</think>\n{right}") == 1.0
    assert of(right + "```python\nprint(0)") == 1.0, "a block that was never closed is none"


@pytest.mark.parametrize("solution", ["", "I do not know.", DOUBLE, "```python\nprint(1)", "```python\n\n```"])
def test_an_answer_without_a_program_is_wrong(solution: str) -> None:
    score = CodeTests().judge(ScoreItem("", solution, DOUBLE_TESTS))
    assert isinstance(score, Scored) and score.value == 0.0
    assert counted(score) == {"no_code": 1.0, "total": 3.0, "not_run": 3.0}


@isolated
def test_the_whole_answer_as_program() -> None:
    score = CodeTests(extract="whole").judge(ScoreItem("", DOUBLE, DOUBLE_TESTS))
    assert isinstance(score, Scored) and score.value == 1.0


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
        ("print(2 * int(input()))\nimport sys\nsys.exit(1)", "error"),
        ("syntax error", "error"),
        ("import os\nos.kill(os.getpid(), 11)", "error"),
        ("while True: pass", "time"),
        ("import time\ntime.sleep(60)", "time"),
        ("x = bytearray(1 << 30)", "memory"),
        ("while True: print('x' * 10000)", "output"),
        ("import numpy", "error"),
    ],
)
def test_a_program_that_fails_is_a_wrong_answer(program: str, counter: str) -> None:
    score = judge(program, DOUBLE_TESTS, seconds_per_test=0.5, memory_bytes=256 << 20)
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
    score = judge(program, tests, seconds_per_test=0.5, memory_bytes=256 << 20)
    assert isinstance(score, Scored) and score.value == 0.0
    expected = {"wrong", "error", "memory"} if "20_000_000" in program else {counter}
    assert set(counted(score)) - {"total"} <= expected


@isolated
def test_the_time_of_an_answer_bounds_all_its_tests() -> None:
    tests = {"inputs": [""] * 100, "outputs": ["1"] * 100}
    score = judge(
        "import time\ntime.sleep(1)\nprint(1)", tests, partial=True, seconds_per_test=1.0, seconds_per_answer=3.0
    )
    found = counted(score)
    assert found["passed"] <= 3 and found["time"] == 100 - found["passed"]


@isolated
def test_the_prelude_and_without_it() -> None:
    program = "class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n        return gcd(*x) + len(Counter(x)) + math.floor(1.5)"
    tests = {"fn_name": "f", "inputs": ["[4, 6]"], "outputs": ["5"]}
    assert value(program, tests) == 1.0
    assert value(program, tests, prelude="") == 0.0
    assert (
        value(
            program,
            tests,
            prelude="import math\nfrom math import gcd\nfrom typing import *\nfrom collections import Counter",
        )
        == 1.0
    )


@isolated
def test_packages_that_are_named_can_be_imported() -> None:
    program = "import numpy as np\nprint(np.arange(int(input())).sum())"
    tests = {"inputs": ["4"], "outputs": ["6"]}
    assert value(program, tests, packages=("numpy",)) == 1.0
    assert (
        value(
            "import numpy as np\ndef f(n): return np.arange(n)",
            {"fn_name": "f", "inputs": ["2"], "outputs": ["[0, 1]"]},
            packages=("numpy",),
        )
        == 1.0
    )
    with pytest.raises(ScorerError, match="no_such_package"):
        CodeTests(packages=("no_such_package",)).start()


# ---- what tests may do with an answer that runs elsewhere ----


@isolated
@pytest.mark.parametrize(
    ("program", "test"),
    [
        (
            "class P:\n    def __init__(self, a): self.a = a\n    def twice(self): return 2 * self.a",
            "p = P(4)\nassert p.a == 4 and p.twice() == 8",
        ),
        (
            "class P:\n    def __init__(self, a): self.a = a\ndef most(ps): return max(p.a for p in ps)",
            "assert most([P(1), P(3)]) == 3",
        ),
        ("def f(x): x.sort()", "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"),
        ("def f(x): x['a'] = 1", "x = {}\nf(x)\nassert x == {'a': 1}"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
        (
            "def f(x): raise ValueError('no')",
            "try:\n    f(1)\n    raise SystemExit(1)\nexcept ValueError as e:\n    assert str(e) == 'no'",
        ),
        ("def f(x, *, y): return x, y", "assert f(1, y={2, 3}) == (1, {2, 3})"),
        (
            "def f(): return {(1, 2): b'x', 'y': 1j, None: frozenset([1])}",
            "assert f() == {(1, 2): b'x', 'y': 1j, None: frozenset([1])}",
        ),
        ("def f(): return 1 << 100_000", "assert f() == 1 << 100_000"),
        ("def f(): return float('nan')", "import math\nassert math.isnan(f())"),
        ("LIMIT = 10\ndef f(): return LIMIT", "assert f() == LIMIT == 10"),
        ("def sum(a, b): return 6", "assert sum(10, 15) == 6"),
        ("def gcd(a, b): return 2", "assert gcd(4, 6) == 2"),
        ("def select(x): return x", "assert set(select([1])) == {1}"),
        ("def f(g): return g", "class Mine: pass\nassert f(1) == 1"),
        ("def apply(x): return x", "def helper(x):\n    return apply(x) + 1\nassert helper(1) == 2"),
        (
            "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
            "assert f() == (1, 2)",
        ),
        ("def f(x): return x", "import re\nassert re.match('a+', f('aa'))"),
    ],
)
def test_statements_about_an_answer_in_another_process(program: str, test: str) -> None:
    assert value(program, [test]) == 1.0


@isolated
def test_many_calls_in_one_test() -> None:
    test = "for n in range(2000):\n    assert f(n) == n + 1"
    assert value("def f(n): return n + 1", {"test": test}) == 1.0
    assert value("def f(n): return n + (n < 1999)", {"test": test}) == 0.0


# ---- programs that cheat ----

CHEATS = {
    "ends before the test does": "import os\nos._exit(0)",
    "ends quietly": "import sys\nsys.exit(0)",
    "ends when it is called": "import os\ndef f(x): os._exit(0)",
    "exits when it is called": "import sys\ndef f(x): sys.exit(0)",
    "raises SystemExit": "def f(x): raise SystemExit(0)",
    "ends a loop in silence": "def f(x): raise StopIteration",
    "equals everything": """
class E(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return E(0)
""",
    "equals everything as an object": """
class E:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __gt__(self, other): return True
    def __bool__(self): return True
    def __sub__(self, other): return 0
    def __abs__(self): return 0
def f(x): return E()
""",
    "changes what Python's words mean": """
import builtins
builtins.abs = builtins.len = lambda *a: 0
builtins.AssertionError = type("A", (Exception,), {})
def abs(x): return 0
def isclose(*a): return True
def f(x): return 0
""",
    "defines Python's words anew": """
def abs(x): return 0
def len(x): return 1
def all(x): return True
def isclose(*a): return True
def f(x): return 0
""",
    "changes modules": """
import sys, math
math.isclose = lambda *a, **k: True
sys.modules["math"] = math
def f(x): return 0
""",
    "prints a protocol": """
print('{"value": true}')
print('{"stopped": "", "code": 0}')
def f(x): return 0
""",
    "writes to every descriptor": r"""
import os
for descriptor in range(3, 64):
    for line in (b'{"value": true}\n', b'\0\0\0\2{}', b'begun', b'k'):
        try: os.write(descriptor, line)
        except OSError: pass
def f(x): return 0
""",
    "answers its line by itself": r"""
import os
for _ in range(50): os.write(3, b'{"value": {"object": 0, "type": "function"}}\n')
""",
    "answers with an exit": r"""
import os
for _ in range(50): os.write(3, b'{"error": "SystemExit", "message": 0}\n')
""",
    "answers with no data": r"""
import os
for _ in range(50): os.write(3, b'{"value": {"dict": [[[], 1]]}}\n')
def f(x): return 0
""",
    "replaces the test": """
import sys
sys.modules["__main__"] = sys
sys.settrace(lambda *a: None)
def f(x): return 0
""",
    "leaves a handler": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "looks at its caller": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for v in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if type(v) is int and v * v == 22193521: return v
        frame = frame.f_back
    return 0
""",
    "looks through memory": """
import gc
def f(x):
    for o in gc.get_objects():
        for v in list(o.values()) if isinstance(o, dict) else list(o) if isinstance(o, (list, tuple)) else ():
            if type(v) is int and v * v == 22193521 or type(v) is str and len(v) < 50 and v.isdigit() and int(v) ** 2 == 22193521:
                return int(v)
    return 0
""",
    "looks at files": """
import os
def f(x):
    for top, _, files in os.walk("/tmp"):
        for name in files:
            return int(open(os.path.join(top, name)).read())
    return 0
""",
    "kills the test": """
import os, signal
for process in range(1, 400):
    if process != os.getpid():
        try: os.kill(process, signal.SIGTERM)
        except OSError: pass
def f(x): return 0
""",
}
CHEATED: dict[str, Any] = {
    "call": {"fn_name": "f", "inputs": ["1"], "outputs": ["4711"]},
    "statement": ["assert f(1) == 4711"],
    "loop": ["assert all(map(lambda x: f(x) == 4711, [1, 2]))"],
    "close": {
        "test": "import math\ndef check(candidate):\n    assert abs(candidate(1) - 4711) < 1e-6 and math.isclose(candidate(1), 4711)\n",
        "entry_point": "f",
    },
    "abs": {"test": "assert abs(f(1) - 4711) < 1e-6"},
    "length": ["assert len([f(1)]) == 1 and f(1) > 4710 and f(1) != 0"],
}


@isolated
@pytest.mark.parametrize("shape", CHEATED)
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_earn_nothing(cheat: str, shape: str) -> None:
    score = judge(CHEATS[cheat], CHEATED[shape], seconds_per_test=2.0)
    assert isinstance(score, Scored) and score.value == 0.0, score
    assert value("def f(x): return 4711", CHEATED[shape]) == 1.0


@isolated
@pytest.mark.parametrize("cheat", ["looks at its caller", "looks through memory"])
def test_the_search_would_find_what_is_there(cheat: str) -> None:
    """Else the test above would prove nothing."""
    assert value(CHEATS[cheat] + "\nhidden = 4711\nmore = [hidden]", CHEATED["call"]) == 1.0


@isolated
@pytest.mark.parametrize(
    "cheat",
    [
        "print(open(0).read())",
        """
import gc
for o in gc.get_objects():
    for v in list(o.values()) if isinstance(o, dict) else list(o) if isinstance(o, (list, tuple)) else ():
        if type(v) is str and v.startswith("the wan") and len(v) == 16:
            print(v)
""",
        """
import sys
frame = sys._getframe()
while frame:
    print(*[v for v in frame.f_locals.values() if type(v) is str and v.startswith("the wan")])
    frame = frame.f_back
""",
        """
import os
for top, _, files in os.walk("/tmp"):
    print(*[open(os.path.join(top, name)).read() for name in files])
""",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        'print(\'{"failure": "", "verdict": "passed"}\')',
    ],
)
def test_what_a_program_should_print_is_nowhere_in_its_sandbox(cheat: str) -> None:
    tests = {"inputs": ["x"], "outputs": ["the wanted words"]}
    assert value(cheat, tests) == 0.0
    assert value("print('the wanted  words')", tests) == 1.0


@isolated
def test_nothing_passes_from_one_test_of_an_answer_to_the_next() -> None:
    program = "import os\nprint(len(os.listdir('.')))\nopen(f'note{os.getpid()}', 'w').write('x')"
    assert value(program, {"inputs": [""] * 3, "outputs": ["0"] * 3}) == 1.0


# ---- whose fault ----


def test_a_sandbox_that_does_not_start_is_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def take(self) -> None:
            raise SandboxError("a sandbox did not start: no memory")

    monkeypatch.setattr(code_trial, "sandboxes", lambda packages, allow: Broken())
    assert judge(DOUBLE, DOUBLE_TESTS) == Unscored("infrastructure", "a sandbox did not start: no memory")


def test_no_isolation_is_refused_at_the_start_and_infrastructure_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(packages: tuple[str, ...], allow: bool) -> None:
        raise ScorerError("this machine has no isolation for untrusted code")

    monkeypatch.setattr(code_trial, "sandboxes", none)
    with pytest.raises(ScorerError, match="no isolation"):
        CodeTests().start()
    assert judge(DOUBLE, DOUBLE_TESTS) == Unscored("infrastructure", "this machine has no isolation for untrusted code")


@pytest.mark.parametrize(
    "parameters",
    [
        {"tolerance": -1.0},
        {"tolerance": math.inf},
        {"max_tests": -1},
        {"seconds_per_test": 0.0},
        {"seconds_per_test": 61.0},
        {"seconds_per_answer": math.inf},
        {"memory_bytes": 1 << 20},
    ],
)
def test_impossible_parameters(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(parameters))):
        CodeTests(**parameters)


# ---- what is the same ----


@pytest.mark.parametrize(
    ("got", "wanted", "tokens", "lines"),
    [
        ("1 2\n3\n", "1 2\n3", True, True),
        ("1 2 3", "1 2\n3", True, False),
        (" 1   2\n\n", "1 2", True, True),
        ("1\n\n2", "1\n2", True, False),
        ("", "", True, True),
        ("", "0", False, False),
        ("YES", "Yes", False, False),
        ("1.0000001", "1", True, True),
        ("1.001", "1", False, False),
        ("3", "3.0", True, True),
        ("1e3", "1000", True, True),
        ("007", "7", True, True),
        ("1000001", "1000002", False, False),
        ("100000000000000000001", "100000000000000000002", False, False),
        ("1000000.5", "1000001", True, True),
        ("nan", "nan", True, True),
        ("inf", "1e999", False, False),
        ("1_0", "10", False, False),
        ("0x10", "16", False, False),
        ("-0", "0", True, True),
        ("1" * 5000, "1" * 5000, True, True),
        ("1" * 5000, "1" * 4999 + "2", False, False),
        ("٣", "3", False, False),
    ],
)
def test_same_output(got: str, wanted: str, tokens: bool, lines: bool) -> None:
    assert same_output(got, wanted, "tokens", 1e-6) == tokens
    assert same_output(got, wanted, "lines", 1e-6) == lines


WORDS = st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8), max_size=6)


@given(WORDS, st.lists(st.sampled_from([" ", "\n", "  ", "\t", " \n "]), min_size=7, max_size=7))
def test_white_space_never_counts_among_tokens(words: list[str], between: list[str]) -> None:
    scattered = "".join(gap + word for gap, word in zip(between, words, strict=False)) + between[-1]
    assert same_output(scattered, " ".join(words), "tokens", 0.0)
    assert not same_output(scattered + " more", " ".join(words), "tokens", 0.0)


@given(st.floats(-1e6, 1e6), st.floats(-1.0, 1.0))
def test_numbers_within_the_tolerance_and_not_beyond(wanted: float, share: float) -> None:
    reach = 1e-3 * max(1.0, abs(wanted))
    assert same_output(repr(wanted + 0.99 * share * reach), repr(wanted), "tokens", 1e-3)
    beyond = wanted + math.copysign(1.01 + abs(share), share) * reach
    if "." in repr(beyond):
        assert not same_output(repr(beyond), repr(wanted), "tokens", 1e-3)


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        ((1, (2, 3)), [1, [2, 3]], True),
        ([1, 2], [2, 1], False),
        ({1: "a"}, {"1": "a"}, True),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        (0.3, 0.30001, False),
        (10**17 + 1, 10**17, False),
        (10**400, 1.5, False),
        (None, None, True),
        (None, False, False),
        (True, 1, True),
        ("1", 1, False),
        ({1, 2}, [1, 2], False),
        (math.nan, 1.0, False),
        ("ab", ["a", "b"], False),
    ],
)
def test_same_value(got: Any, wanted: Any, same: bool) -> None:
    assert same_value(got, wanted, 1e-6) == same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_every_value_of_json_is_the_same_as_itself(value: Any) -> None:
    assert same_value(value, json.loads(json.dumps(value)), 0.0)
    assert not same_value([value], value, 0.0) and not same_value([value, 0], [value], 0.0)
