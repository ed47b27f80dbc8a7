"""How calls of tools end and how long they take: sums by tool, their buckets, and what a step may report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.protos.contracts import StepResult, ToolOutcome
from tandem.rollout.environments.inside import result_fields
from tandem.rollout.environments.loading import ContractError
from tandem.rollout.environments.tools.outcomes import BOUNDS_SECONDS, Durations, ToolFigures


def test_a_duration_counts_in_the_bucket_of_its_bound_and_in_all_above_it() -> None:
    durations = Durations()
    for seconds in (0.0, 0.01, 0.0101, 100.0, 100.1, 1e9):
        durations.add(seconds)
    between = len(BOUNDS_SECONDS) - 2
    assert durations.cumulative() == [2, *[3] * between, 4, 6]
    assert durations.total_seconds == pytest.approx(1e9 + 200.1201)


def test_names_that_a_policy_or_an_environment_invents_add_no_label() -> None:
    figures = ToolFigures(["add", "add"])
    tables = {name: len(table) for name, table in figures.tables().items()}  # type: ignore[arg-type]
    invented: list[ToolOutcome] = [
        {"tool": f"add{number}", "outcome": f"outcome {number}", "seconds": 1.0} for number in range(50)
    ]
    figures.add([*invented, {"tool": "add", "outcome": "result", "seconds": 0.5}])
    figures.add([{"tool": "", "outcome": "unknown_tool", "seconds": None}])
    assert {name: len(table) for name, table in figures.tables().items()} == tables  # type: ignore[arg-type]
    calls = {tool: one.cumulative()[-1] for (tool,), one in figures.call_seconds.items()}
    assert calls == {"add": 1, "other": 50}
    failures = {key: count for key, count in figures.failures.items() if count}
    assert failures == {("other", "other"): 50, ("other", "unknown_tool"): 1}


def test_an_environment_of_the_user_may_report_outcomes() -> None:
    outcome: ToolOutcome = {"tool": "search", "outcome": "result", "seconds": 1}
    result = StepResult([], terminated=True, tool_outcomes=(outcome,))
    assert json.loads(json.dumps(result_fields(result)))["tool_outcomes"] == [outcome]


@pytest.mark.parametrize(
    "outcome",
    [
        "search",
        {"tool": "search", "outcome": "result", "seconds": "1"},
        {"tool": "search", "outcome": "result", "seconds": float("nan")},
        {"tool": "search", "outcome": "result", "seconds": -1.0},
        {"tool": "search", "seconds": 1.0},
    ],
)
def test_an_outcome_that_says_no_time_or_no_name_breaks_the_contract(outcome: Any) -> None:
    with pytest.raises(ContractError, match="it needs tool, outcome and seconds"):
        result_fields(StepResult([], terminated=True, tool_outcomes=[outcome]))
