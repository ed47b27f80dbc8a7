"""Code scorer: the program in an answer is run against tests, in a sandbox."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.contracts import Scorer
from tandem.reward.sandbox.test_cases import Comparison, Test, UnusableTestsError, parse_tests, spread
from tandem.reward.text.extraction import last_code_block

# What solutions on contest sites take for granted; the evaluations of APPS and LiveCodeBench put much the same before
# them.
PRELUDE = """
from bisect import *
from collections import *
from copy import *
from datetime import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from random import *
from statistics import *
from string import *
from typing import *
import array, bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, os, random, re
import statistics
import string, sys, time
from builtins import *
"""

_FAILURES = ("wrong", "error", "time", "memory", "output")
_WAITING = (
    2.0  # wall time a program has in units of its processor time: on a busy machine it gets less than all of a core
)
_SLACK_SECONDS = 60.0  # a run may be lost with its sandbox, and what makes sandboxes be replaced


class CodeTests(Scorer):
    """1 if the program in the answer passes all its tests, else 0; or the share of them that it passes.

    Ground truths (or JSON text of them): `{"inputs": [...], "outputs": [...]}` for programs that read and print, with
    `"fn_name"` for functions and methods of `Solution` (APPS, TACO, LiveCodeBench); a list of `{"input", "output",
    "testtype"}` (LiveCodeBench); a list of statements, or `{"test_list", "test_setup_code"}` (MBPP); `{"test",
    "entry_point"}` (HumanEval).

    A program that is wrong, crashes, hangs, or takes more memory or output than it may is a wrong answer, not a failure
    to score: 0, and the breakdown counts tests by what happened (`passed`, `wrong`, `error`, `time`, `memory`,
    `output`, `not_run`, of `total`;
    `no_code` is 1 if the answer holds none). Unscored are tests that nobody could pass (`invalid_input`) and a sandbox
    that does not start or that dies, not its program, twice, or a machine that ends programs for want of memory
    (`infrastructure`).

    The answer cannot forge a verdict: what it prints or returns is compared outside its sandbox, and a test's
    statements run in another one, which calls the answer and gets plain data back. Objects of the answer's own classes
    stay on its side; a test can call them, take their attributes and iterate over them, but no more.

    Example:
        >>> CodeTests().judge(ScoreItem("", "I cannot solve this.", ["assert f(1) == 2"])).breakdown["no_code"]
        1.0
    """

    VERSION = "1"
    ISOLATION = "sandbox"
    PRELOAD = ("tandem.reward.sandbox.trial",)
    RECIPE_ONLY = ("allow_unsandboxed", "packages", "memory_bytes", "seconds_per_answer")

    extract: Literal["last_block", "whole"] = "last_block"
    """Where the program is: in the last closed block between lines of three backticks, or it is the whole answer."""
    partial: bool = False
    """The score is the share of tests passed, and all are run. Otherwise the first failure ends it."""
    max_tests: Annotated[int, Field(ge=0)] = 0
    """Most tests to run, taken evenly from the first to the last; 0: all."""
    seconds_per_test: Annotated[float, Field(gt=0.0)] = 6.0
    """Processor time of one test. A program that waits instead of working has about twice as long."""
    seconds_per_answer: Annotated[float, Field(le=3600.0)] = 60.0
    """For all tests of an answer; those that find no time left fail (`time`)."""
    memory_bytes: Annotated[int, Field(ge=128 << 20)] = 1 << 30
    """Address space of the program. An interpreter alone takes a good part of the 128 MiB that are the least."""
    comparison: Comparison = "tokens"
    """Of printed output: the same words however the lines break, or the same words in every line."""
    tolerance: Annotated[float, Field(ge=0.0)] = 1e-6
    """Largest difference between numbers that are not both integers, relative to the wanted one where that is above 1.
    """
    prelude: str = PRELUDE
    """Python run before the program, e.g. imports that it takes for granted; empty: none."""
    packages: tuple[str, ...] = ()
    """Installed packages the program may import beside the standard library, and what these import: `["numpy"]`."""
    allow_unsandboxed: bool = False
    """Run programs where the machine has no isolation for them: with limits, but with the service's access to files and
    network.
    """

    @model_validator(mode="after")
    def _a_test_fits_in_an_answer(self) -> Self:
        if self.seconds_per_test > self.seconds_per_answer:
            raise ValueError("seconds_per_test is above seconds_per_answer: lower it, or raise the other")
        return self

    @property
    def longest_seconds(self) -> float:
        """How long one answer may take until this scorer itself ends it: a pool should not be quicker."""
        return self.seconds_per_answer + self._wall_seconds + _SLACK_SECONDS

    @property
    def _wall_seconds(self) -> float:
        return _WAITING * self.seconds_per_test + 1.0

    def start(self) -> None:
        """Looks for isolation and has the first sandboxes started. Raises ScorerError where there is none."""
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
        from tandem.reward.sandbox.limits import Limits
        from tandem.reward.sandbox.trial import Trial, sandboxes

        limits = Limits(
            cpu_seconds=self.seconds_per_test,
            wall_seconds=self._wall_seconds,
            memory_bytes=self.memory_bytes,
        )
        pool = sandboxes(self.packages, self.allow_unsandboxed)
        counts: Counter[str] = Counter()
        deadline = time.monotonic() + self.seconds_per_answer
        with Trial(pool, self.prelude, code, limits, deadline) as trial:
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
