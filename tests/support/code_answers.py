"""Shared by the code scorer's tests: small answers, their tests, and a function that scores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.sandbox.isolation import find_isolation
from tandem.reward.scorers.code import CodeTests
from tests.support import scores

isolated = pytest.mark.skipif(
    find_isolation().name == "none", reason=f"no isolation here: {'; '.join(find_isolation().faults)}"
)

DOUBLE = "print(2 * int(input()))"
DOUBLE_TESTS = {"inputs": ["1\n", "5\n", "-3\n"], "outputs": ["2\n", "10\n", "-6\n"]}
ADD = "def add(a, b):\n    return a + b"


def answer(code: str) -> str:
    return f"First some thoughts.\n\n```python\n{code}\n```\nThat is all."


def judge(code: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **parameters: Any) -> Score:
    scorer = CodeTests(**parameters)
    return scorer.judge(ScoreItem("", answer(code), ground_truth, extra_info or {}))


def value(code: str, ground_truth: Any, **parameters: Any) -> float:
    return scores.value(judge(code, ground_truth, **parameters))


def counted(score: Score) -> dict[str, float]:
    assert isinstance(score, Scored), score
    return {name: number for name, number in score.breakdown.items() if number}
