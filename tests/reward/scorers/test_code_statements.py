"""What test statements can do with an answer that runs in another process."""

from __future__ import annotations

import pytest

from tests.support.code_answers import isolated, value


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
def test_test_statements_see_the_answer_in_another_process(program: str, test: str) -> None:
    assert value(program, [test]) == 1.0


@isolated
def test_one_test_may_call_the_answer_many_times() -> None:
    test = "for n in range(2000):\n    assert f(n) == n + 1"
    assert value("def f(n): return n + 1", {"test": test}) == 1.0
    assert value("def f(n): return n + (n < 1999)", {"test": test}) == 0.0
