"""The order of an episode's limits, and what follows them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from pydantic import ValidationError

from tandem.protos.types import SamplingParameters, Segment, Trajectory, VersionSpan
from tandem.rollout.environments.config import EnvironmentConfig, StopPolicies
from tandem.rollout.environments.limits import (
    LIMITS,
    STOPS,
    Limits,
    Stop,
    is_invalid,
    longest_turn,
    with_policy,
)
from tests.support.paths import ROOT

PLAIN = {"role": "assistant", "content": "one"}
UNREAD = {**PLAIN, "tool_calls": [{"id": "a", "error": "no JSON", "function": {"name": "", "arguments": ""}}]}
KNOWN = {**PLAIN, "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": "{}"}}]}


def limits_of(**config: object) -> Limits:
    return Limits(EnvironmentConfig.model_validate({"path": "a:B", **config}), began_at=0.0)


def test_before_a_turn_turns_come_first_then_tokens_then_time() -> None:
    late = limits_of(max_turns=2, episode_seconds=1e-9)
    assert late.before_turn(2, (0, "context")) == "turns"
    assert late.before_turn(1, (0, "context")) == "context"
    assert late.before_turn(1, (1, "context")) == "episode_time"
    assert limits_of(max_turns=2).before_turn(1, (1, "context")) is None
    assert limits_of(turn_seconds=3.0).turn_seconds() == (3.0, "turn_time") and limits_of().turn_seconds()[0] is None


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((5, 5, 5), (5, "episode_tokens")), ((5, 4, 0), (4, "context")), ((5, 4, 3), (3, "turn_tokens"))],
)
def test_the_smallest_limit_of_tokens_names_the_end(lengths: tuple[int, int, int], expected: tuple[int, Stop]) -> None:
    assert longest_turn(*lengths) == expected


def test_invalid_turns_in_a_row_end_an_episode_and_a_valid_one_begins_the_count_anew() -> None:
    limits, tools = limits_of(max_invalid_calls=2), {"add"}
    assert limits.after_turn([UNREAD, UNREAD], tools) == "invalid_calls"
    assert limits.after_turn([UNREAD], tools) is None and limits.after_turn([UNREAD, KNOWN, UNREAD], tools) is None
    assert is_invalid(KNOWN, ()) and not is_invalid(PLAIN, tools)
    assert limits_of(policies={"parse_error": "end"}).after_turn([UNREAD], tools) == "parse_error"


def test_a_time_out_of_a_tool_ends_an_episode_if_the_policy_says_so() -> None:
    outcomes = [{"tool": "add", "outcome": "timeout", "seconds": 1.0}]
    assert limits_of().after_step(outcomes) is None  # type: ignore[arg-type]
    ends = limits_of(policies={"tool_timeout": "unscored"})
    assert ends.after_step(outcomes) == "tool_timeout"  # type: ignore[arg-type]
    outcomes.append({"tool": "add", "outcome": "call_limit", "seconds": None})
    assert ends.after_step(outcomes) == "tool_timeout"  # type: ignore[arg-type]
    both = limits_of(policies={"tool_timeout": "unscored", "call_limit": "end"})
    assert both.after_step(outcomes) == "call_limit", "it is the first in the order"  # type: ignore[arg-type]


def row_ended_by(stop: str) -> Trajectory:
    ids, mask = np.array([1, 2], np.int32), np.array([0, 1], np.int8)
    segment = Segment(ids, mask, np.zeros(2, np.float32), (VersionSpan(1, 1, 0),))
    return Trajectory(0, "policy", (segment,), "stop", "", SamplingParameters(), metadata={"stop": stop})


@pytest.mark.parametrize("stop", StopPolicies.model_fields)
def test_the_policy_of_a_stop_and_no_other_leaves_its_row_unscored(stop: str) -> None:
    row = row_ended_by(stop)
    others = dict.fromkeys({*StopPolicies.model_fields} - {stop}, "unscored")
    assert with_policy(row, limits_of().config) is with_policy(row, limits_of(policies=others).config) is row
    assert with_policy(row, limits_of(policies={stop: "end"}).config) is row
    found = with_policy(row, limits_of(policies={stop: "unscored"}).config)
    assert found.finish_reason == "error" and f"{stop!r}, which environment.policies" in found.metadata["unscored"]


def test_only_what_may_be_answered_can_be_an_observation() -> None:
    answered = {name for name, one in StopPolicies.model_fields.items() if one.default == "observation"}
    assert answered == {"parse_error", "refused", "call_limit", "tool_timeout"}
    for stop in {*StopPolicies.model_fields} - answered:
        with pytest.raises(ValidationError, match=stop):
            limits_of(policies={stop: "observation"})


def test_the_documented_stops_are_those_of_the_code_and_each_limit_has_a_policy() -> None:
    text = (ROOT / "docs/environments.md").read_text()
    section = text.partition("## Ends and limits")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 5 and {stop for row in rows for stop in re.findall(r"`(\w+)`", row[1])} == {*STOPS}
    assert {*StopPolicies.model_fields} == {*LIMITS}
    told = section.partition("`[environment.policies]` says")[2]
    assert all(f"`{stop}`" in told for stop in ("terminated", "truncated"))
    for stop, one in StopPolicies.model_fields.items():
        assert (one.default == "observation") == (f"`{stop}`" in told), stop
