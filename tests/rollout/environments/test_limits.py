"""The order of an episode's limits, and what follows them."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from tandem.protos.types import SamplingParameters, Segment, Trajectory, VersionSpan
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.limits import Limits, Stop, is_invalid, longest_turn, with_policy

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


def test_policies_leave_rows_unscored_and_refuse_what_makes_no_sense() -> None:
    ids, mask = np.array([1, 2], np.int32), np.array([0, 1], np.int8)
    segment = Segment(ids, mask, np.zeros(2, np.float32), (VersionSpan(1, 1, 0),))
    row = Trajectory(0, "policy", (segment,), "stop", "", SamplingParameters(), metadata={"stop": "turns"})
    assert with_policy(row, limits_of().config) is row
    found = with_policy(row, limits_of(policies={"turns": "unscored"}).config)
    assert found.finish_reason == "error" and "environment.policies" in found.metadata["unscored"]
    with pytest.raises(ValidationError, match="turns"):
        limits_of(policies={"turns": "observation"})
