"""Parses the tests in ground truths, and compares results with expected ones. Pure functions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.protos.error_text import shown

Comparison = Literal["tokens", "lines"]

_MOST_TESTS = 10_000
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"[-+]?\d+", re.ASCII)
_MAX_DIGITS = 400  # longer numbers are compared as text, because no float is that long


class UnusableTestsError(Exception):
    """The ground truth has no tests that can be run. The message says why."""


@dataclass(frozen=True, slots=True)
class ScriptTest:
    """A test that runs the program with `stdin` and compares its output."""

    stdin: str
    wanted: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A test that calls a function, or a method of the class `Solution`."""

    function: str
    arguments: tuple[object, ...]
    wanted: tuple[object, ...]
    """Accepted results."""


@dataclass(frozen=True, slots=True)
class StatementTest:
    """Python text that raises if the answer is wrong. If it defines `check(candidate)`, that gets the entry point."""

    text: str
    entry_point: str = ""


Test = ScriptTest | CallTest | StatementTest


def parse_tests(ground_truth: object, extra_info: Mapping[str, object]) -> list[Test]:
    """Parses the tests of a ground truth, at least one. Raises UnusableTestsError unless it has one of these formats:

    - `{"inputs": […], "outputs": […]}` (APPS, TACO): input and output of a program; with `"fn_name"`, arguments and
      result of a function: a list each, or text with one JSON value per line (LiveCodeBench).
    - a list of `{"input": …, "output": …}` (LiveCodeBench); with `"testtype": "functional"`, for the function
      `extra_info["fn_name"]` or the case's `"metadata": {"func_name": …}`.
    - a list of statements, `["assert f(1) == 2", …]`, or `{"test_list": […], "test_setup_code": …, "test_imports":
      […]}` (MBPP).
    - `{"test": "def check(candidate): …", "entry_point": "f"}` (HumanEval).
    - JSON text of any of these, or a text that contains `assert`, as one test. `test_…` functions and unittest cases
      in a test are run; `from solution import f` in it imports from the answer (KodCode).
    """
    function = extra_info.get("fn_name")
    match _loaded(ground_truth):
        case {"inputs": list(inputs), "outputs": list(outputs), **rest}:
            tests = _paired(inputs, outputs, rest.get("fn_name") or "")
        case {"test": str(text), **rest}:
            tests = [StatementTest(text, _name(rest.get("entry_point") or ""))]
        case {"test_list": list(statements), **rest}:
            setup = [*_texts(rest.get("test_imports") or []), *_texts([rest.get("test_setup_code") or ""])]
            tests = [StatementTest("\n".join([*setup, text])) for text in _texts(statements)]
        case [{"input": _, "output": _}, *_] as cases:
            tests = [_case(one, function) for one in cases]
        case [str(), *_] as statements:
            tests = [StatementTest(text) for text in _texts(statements)]
        case str(text) if "assert" in text:
            tests = [StatementTest(text)]
        case other:
            raise UnusableTestsError(
                f"{shown(other)} holds no tests: inputs and outputs, statements, or a test and its entry_point"
            )
    if not 0 < len(tests) <= _MOST_TESTS:
        raise UnusableTestsError(f"it has {len(tests)} tests; 1 to {_MOST_TESTS} can be run")
    return tests


def spread(tests: Sequence[Test], most: int) -> list[Test]:
    """Selects at most `most` tests, evenly from the first to the last. 0: all."""
    if not 0 < most < len(tests):
        return list(tests)
    return [tests[number * len(tests) // most] for number in range(most)]


def _loaded(ground_truth: object) -> object:
    if not isinstance(ground_truth, str) or ground_truth.lstrip()[:1] not in ("{", "["):
        return ground_truth
    try:
        return json.loads(ground_truth)
    except (ValueError, RecursionError):
        return ground_truth


def _paired(inputs: Sequence[object], outputs: Sequence[object], function: object) -> list[Test]:
    if len(inputs) != len(outputs):
        raise UnusableTestsError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    name = _name(function)
    pairs = enumerate(zip(inputs, outputs, strict=True))
    return [_call(name, *pair, place) if name else _script(*pair, place) for place, pair in pairs]


def _case(case: Any, function: object) -> Test:
    match case:
        case {"input": given, "output": wanted, "testtype": "functional"}:
            metadata = case.get("metadata")
            function = function or (metadata.get("func_name") if isinstance(metadata, dict) else None)
            if not function:
                raise UnusableTestsError("its tests call a function, but extra_info has no fn_name")
            return _call(_name(function), given, wanted, 0)
        case {"input": given, "output": wanted}:
            return _script(given, wanted, 0)
    raise UnusableTestsError(f"{shown(case)} has no input or no output")


def _script(given: object, wanted: object, place: int) -> ScriptTest:
    return ScriptTest(_joined(given, f"inputs[{place}]"), _joined(wanted, f"outputs[{place}]"))


def _joined(value: object, name: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, str):
        return value
    raise UnusableTestsError(f"{name} is neither text nor a list of lines")


def _call(function: str, given: object, wanted: object, place: int) -> CallTest:
    try:
        if isinstance(given, str):
            arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
            return CallTest(function, tuple(arguments), (json.loads(wanted) if isinstance(wanted, str) else wanted,))
    except (ValueError, RecursionError) as error:
        raise UnusableTestsError(f"inputs[{place}] or outputs[{place}] is not JSON: {error}") from None
    if not isinstance(given, list):
        raise UnusableTestsError(f"inputs[{place}] is neither a list of arguments nor text with one a line")
    # APPS writes most results as a list of one.
    accepted = (wanted, wanted[0]) if isinstance(wanted, list) and len(wanted) == 1 else (wanted,)
    return CallTest(function, tuple(given), accepted)


def _texts(values: object) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UnusableTestsError(f"{shown(values)} is not a list of statements")
    return values


def _name(value: object) -> str:
    """The last part of `Solution().f` and `Solution.f`."""
    name = value.rpartition(".")[2] if isinstance(value, str) else None
    if name is None or (name and not name.isidentifier()):
        raise UnusableTestsError(f"{shown(value)} is no function's name")
    return str(name)


def same_output(got: str, wanted: str, comparison: Comparison, tolerance: float) -> bool:
    """Whether a program's output matches the expected one.

    `tokens`: the same words, regardless of line breaks. `lines`: the same words in the same lines, ignoring blank lines
    at the end. Words that are numbers on both sides may differ by the tolerance, unless both are integers.
    """
    if comparison == "tokens":
        return _same_words(got.split(), wanted.split(), tolerance)
    got_lines, wanted_lines = got.rstrip().splitlines(), wanted.rstrip().splitlines()
    return len(got_lines) == len(wanted_lines) and all(
        _same_words(mine.split(), theirs.split(), tolerance)
        for mine, theirs in zip(got_lines, wanted_lines, strict=True)
    )


def _same_words(got: Sequence[str], wanted: Sequence[str], tolerance: float) -> bool:
    return len(got) == len(wanted) and all(
        mine == theirs or _same_number(mine, theirs, tolerance) for mine, theirs in zip(got, wanted, strict=True)
    )


def _same_number(got: str, wanted: str, tolerance: float) -> bool:
    if max(len(got), len(wanted)) > _MAX_DIGITS or not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(wanted)):
        return False
    if _INTEGER.fullmatch(got) and _INTEGER.fullmatch(wanted):
        return int(got) == int(wanted)
    return _close(float(got), float(wanted), tolerance)


def _close(got: float, wanted: float, tolerance: float) -> bool:
    return abs(got - wanted) <= tolerance * max(1.0, abs(wanted)) and math.isfinite(got)


def same_value(got: object, wanted: object, tolerance: float) -> bool:
    """Whether a function's result matches the expected one, which is a JSON value. Tuples count as lists, and floats
    may differ by the tolerance. Raises RecursionError if both are nested too deeply.
    """
    if isinstance(wanted, list):
        if not isinstance(got, list | tuple) or len(got) != len(wanted):
            return False
        return all(same_value(mine, theirs, tolerance) for mine, theirs in zip(got, wanted, strict=True))
    if isinstance(wanted, dict):
        if not isinstance(got, dict) or len(got) != len(wanted):
            return False
        by_text = {key if isinstance(key, str) else json.dumps(key, default=repr): value for key, value in got.items()}
        return by_text.keys() == wanted.keys() and all(
            same_value(by_text[key], wanted[key], tolerance) for key in wanted
        )
    if isinstance(got, float | int) and isinstance(wanted, float | int) and float in (type(got), type(wanted)):
        try:
            return got == wanted or _close(float(got), float(wanted), tolerance)
        except OverflowError:
            return False
    return bool(got == wanted)
