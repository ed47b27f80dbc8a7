"""Code scorer: the program in an answer is run against tests, in a sandbox."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.contracts import Scorer
from tandem.reward.sandbox.test_cases import Comparison, Test, UnusableTestsError, parse_tests, spread
from tandem.reward.text.values import last_code_block

# Imports that solutions on contest sites rely on; the evaluations of APPS and LiveCodeBench add much the same.
_STARRED = "bisect collections copy datetime functools heapq itertools math operator random statistics string typing"
PRELUDE = f"""
{chr(10).join(f"from {module} import *" for module in _STARRED.split())}
import array, bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, os, random, re
import statistics, string, sys, time
from builtins import *
"""

_FAILURES = ("wrong", "error", "time", "memory", "output")
_WAITING = 2.0  # wall time of a program in units of its processor time: on a busy machine it gets less than a core
_SLACK_SECONDS = 60.0  # a run may be lost with its sandbox, and what makes sandboxes be replaced


class CodeTests(Scorer):
    """1 if the program in the answer passes all its tests, else 0; or the share of them that it passes.

    Ground truths (or JSON text of them): `{"inputs": [...], "outputs": [...]}` for programs that read and print, with
    `"fn_name"` for functions and methods of `Solution` (APPS, TACO, LiveCodeBench); a list of `{"input", "output",
    "testtype"}` (LiveCodeBench); a list of statements, or `{"test_list", "test_setup_code"}` (MBPP); `{"test",
    "entry_point"}` (HumanEval).

    A program that is wrong, crashes, hangs, or exceeds its memory or output limit scores 0. The breakdown counts the
    tests by outcome (`passed`, `wrong`, `error`, `time`, `memory`, `output`, `not_run`, and `total`; `no_code` is 1 if
    the answer has no code). An item is unscored if nobody could pass its tests (`invalid_input`), and if the sandbox
    does not start or itself dies twice, or the machine is out of memory (`infrastructure`).

    The answer cannot forge a verdict. What it prints or returns is compared outside its sandbox. A test's statements
    run in a second sandbox, which calls the answer and gets plain data back. Objects of the answer's own classes stay
    in the answer's sandbox; a test can call them, read their attributes and iterate over them, and nothing else.

    Example:
        >>> CodeTests().judge(ScoreItem("", "I cannot solve this.", ["assert f(1) == 2"])).breakdown["no_code"]
        1.0
    """

    ISOLATION = "sandbox"
    PRELOAD = ("tandem.reward.sandbox.trial",)
    RECIPE_ONLY = ("allow_unsandboxed", "packages", "memory_bytes", "seconds_per_answer")

    extract: Literal["last_block", "whole"] = "last_block"
    """Where the program is: in the last closed code block, or the whole answer."""
    partial: bool = False
    """The score is the share of tests that pass, and all tests run. Otherwise the first failure ends the answer."""
    max_tests: Annotated[int, Field(ge=0)] = 0
    """Maximum number of tests, picked evenly from all; 0: all."""
    seconds_per_test: Annotated[float, Field(gt=0.0)] = 6.0
    """Processor time of one test. The wall-clock limit is about twice as long."""
    seconds_per_answer: Annotated[float, Field(le=3600.0)] = 60.0
    """Time for all tests of an answer; tests that have no time left fail (`time`)."""
    memory_bytes: Annotated[int, Field(ge=128 << 20)] = 1 << 30
    """Address space of the program. The minimum is 128 MiB, because the interpreter alone takes much of that."""
    comparison: Comparison = "tokens"
    """How printed output is compared: `tokens` ignores line breaks, `lines` does not."""
    tolerance: Annotated[float, Field(ge=0.0)] = 1e-6
    """Largest accepted difference between numbers that are not both integers, relative to an expected one above 1."""
    prelude: str = PRELUDE
    """Python code that runs before the program, e.g. usual imports; empty: none."""
    packages: tuple[str, ...] = ()
    """Installed packages that the program may import besides the standard library: `["numpy"]`."""
    allow_unsandboxed: bool = False
    """Run programs where the machine cannot isolate them: with the service's access to files and network."""

    @model_validator(mode="after")
    def _a_test_fits_in_an_answer(self) -> Self:
        if self.seconds_per_test > self.seconds_per_answer:
            raise ValueError("seconds_per_test is above seconds_per_answer: lower it, or raise the other")
        return self

    @property
    def longest_seconds(self) -> float:
        return self.seconds_per_answer + self._wall_seconds + _SLACK_SECONDS

    @property
    def _wall_seconds(self) -> float:
        return _WAITING * self.seconds_per_test + 1.0

    def start(self) -> None:
        from tandem.reward.sandbox.trial import sandboxes

        sandboxes(self.packages, self.allow_unsandboxed)

    def judge(self, item: ScoreItem) -> Score:
        try:
            tests = spread(parse_tests(item.ground_truth, item.extra_info), self.max_tests)
        except UnusableTestsError as error:
            return Unscored("invalid_input", f"ground truth: {error}")
        code = last_code_block(item.solution) if self.extract == "last_block" else item.solution
        if code is None or not code.strip():
            return self._scored(Counter(no_code=1), len(tests))
        from tandem.reward.sandbox.sandbox import SandboxError

        try:
            return self._scored(self._tried(code, tests), len(tests))
        except UnusableTestsError as error:
            return Unscored("invalid_input", f"ground truth: {error}")
        except (SandboxError, ScorerError) as error:
            return Unscored("infrastructure", str(error))

    def _tried(self, code: str, tests: Sequence[Test]) -> Counter[str]:
        from tandem.reward.sandbox.sandbox import Limits
        from tandem.reward.sandbox.trial import Trial, sandboxes

        limits = Limits(self.seconds_per_test, self._wall_seconds, self.memory_bytes)
        pool = sandboxes(self.packages, self.allow_unsandboxed)
        counts: Counter[str] = Counter()
        deadline = time.monotonic() + self.seconds_per_answer
        with closing(Trial(pool, self.prelude, code, limits, deadline)) as trial:
            for test in tests:
                verdict = trial.verdict(test, self.comparison, self.tolerance)
                counts[verdict] += 1
                if verdict != "passed" and not self.partial:
                    break
        return counts

    def _scored(self, counts: Counter[str], total: int) -> Scored:
        passed = counts["passed"]
        failed = sum(counts[name] for name in _FAILURES)
        value = passed / total if self.partial else float(passed == total)
        breakdown = {name: float(counts[name]) for name in ("passed", *_FAILURES, "no_code")}
        return Scored(value, {**breakdown, "not_run": float(total - passed - failed), "total": float(total)})
