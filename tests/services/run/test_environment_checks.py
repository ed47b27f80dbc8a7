"""Environments that a run cannot use are refused before it starts, those of evaluation sets among them."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.protos.errors import ConfigError
from tandem.services.run.environment_checks import check_environment
from tests.support.run_inputs import Values, recipe_of


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout": {"partial_rollout": False}}, "rollout.partial_rollout is false"),
        ({"eval": {"sets": [{"file": "any.jsonl"}]}}, "evaluations do not save their episodes"),
    ],
)
def test_an_unsafe_tool_is_refused_where_its_calls_would_not_be_saved(
    values: Values, changes: Values, says: str
) -> None:
    tools = {"environment": {"tools": ["tests.support.unsafe_tools:pay"]}}
    with pytest.raises(ConfigError, match=f"environment.tools: pay is unsafe, .*{says}"):
        check_environment(recipe_of(values, **tools, **changes))


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"arguments": {"turns": 8}}, "environment.path: .*Echo: TypeError: .*'turns'"),
        ("tests.support.environments:Nobody", "environment.path: .* has no class Nobody"),
    ],
)
def test_an_environment_of_an_evaluation_set_is_checked_too(values: Values, environment: Any, says: str) -> None:
    sets = [{"name": "other", "file": "any.jsonl", "environment": environment}]
    played = {"path": "tests.support.environments:Echo"}
    with pytest.raises(ConfigError, match=f"^evaluation set other: {says}"):
        check_environment(recipe_of(values, environment=played, eval={"sets": sets}))
