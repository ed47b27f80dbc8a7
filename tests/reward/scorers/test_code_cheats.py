"""Programs that cheat score 0 in every test format."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.code_answers import isolated, value

pytestmark = isolated


def flood(line: str) -> str:
    return f"import os\nfor _ in range(50): os.write(3, b'{line}\\n')\ndef f(x): return 0"


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
    "answers its line by itself": flood('{"value": {"object": 0, "type": "function"}}'),
    "answers with an exit": flood('{"error": "SystemExit", "message": 0}'),
    "answers with no data": flood('{"value": {"dict": [[[], 1]]}}'),
    "answers with a number that is none": flood('{"value": {"complex": [1' + 400 * "0" + ", 0]}}"),
    "answers with keys of one hash": "def f(x): return {number * (2**61 - 1): 0 for number in range(20_000)}",
    "reads its line": """
import os
def f(x):
    os.set_blocking(3, False)
    try: return int(os.read(3, 1 << 20))
    except (OSError, ValueError): return 0
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
            if type(v) is int and v * v == 22193521 or type(v) is str and len(v) < 50 \
                    and v.isdigit() and int(v) ** 2 == 22193521:
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
    "statements": [
        "assert f(1) == 4711",
        "assert all(map(lambda x: f(x) == 4711, [1, 2]))",
        "assert abs(f(1) - 4711) < 1e-6",
        "assert len([f(1)]) == 1 and f(1) > 4710 and f(1) != 0",
    ],
    "close": {
        "test": "import math\ndef check(candidate):\n    assert abs(candidate(1) - 4711) "
        "< 1e-6 and math.isclose(candidate(1), 4711)\n",
        "entry_point": "f",
    },
}
PRINTED = {"inputs": ["x"], "outputs": ["the wanted words"]}


@pytest.mark.parametrize("shape", CHEATED)
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_answers_score_0(cheat: str, shape: str) -> None:
    assert value(CHEATS[cheat], CHEATED[shape], seconds_per_test=2.0, partial=True) == 0.0


@pytest.mark.parametrize("shape", CHEATED)
def test_an_honest_answer_to_the_same_tests_scores_1(shape: str) -> None:
    assert value("def f(x): return 4711", CHEATED[shape]) == 1.0


def test_a_called_answer_has_no_descriptor_but_the_socket_to_its_caller() -> None:
    program = """
import os
def f(x):
    def is_open(descriptor):
        try: return os.fstat(descriptor) is not None
        except OSError: return False
    return [descriptor for descriptor in range(1024) if is_open(descriptor)]
"""
    assert value(program, {"fn_name": "f", "inputs": [[1]], "outputs": [[0, 1, 2, 3]]}) == 1.0


@pytest.mark.parametrize("cheat", ["looks at its caller", "looks through memory"])
def test_the_search_finds_a_planted_value(cheat: str) -> None:
    """Shows that the search of the test above can find a value."""
    assert value(CHEATS[cheat] + "\nhidden = 4711\nmore = [hidden]", CHEATED["call"]) == 1.0


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
def test_the_expected_output_is_not_in_the_sandbox(cheat: str) -> None:
    assert value(cheat, PRINTED) == 0.0


def test_a_program_that_prints_the_expected_output_passes() -> None:
    assert value("print('the wanted  words')", PRINTED) == 1.0
