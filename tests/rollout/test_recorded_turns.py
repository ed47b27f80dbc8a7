"""The turns of recorded trajectories, and where turns that are sampled again differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tandem.protos.types import SamplingParameters, Segment, Trajectory, VersionSpan
from tandem.rollout.recorded_turns import (
    LOGPROB_TOLERANCE,
    RecordedTurn,
    first_difference,
    largest_logprob_difference,
    recorded_turns,
)
from tandem.rollout.segments import unsampled, with_given, with_sampled


def sampled(begun: Segment, ids: Sequence[int], *spans: tuple[int, int, int]) -> Segment:
    """The segment and tokens whose log-probs are −1/id. Spans are (first token, incarnation, version)."""
    return with_sampled(begun, ids, [-1 / one for one in ids], [VersionSpan(*span) for span in spans])


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def turns_of(*segments: Segment) -> list[RecordedTurn]:
    return [*recorded_turns(Trajectory(0, "policy", segments, "stop", "", SamplingParameters()))]


PROMPT = unsampled(ids(5, 6))


def test_an_answer_without_an_environment_is_one_turn() -> None:
    (turn,) = turns_of(sampled(PROMPT, [7, 8, 9], (0, 1, 3)))
    assert (turn.number, turn.policy_version, turn.num_later) == (0, 3, 0)
    assert (turn.history_ids.tolist(), turn.ids.tolist()) == ([5, 6], [7, 8, 9])
    assert turn.logprobs.tolist() == pytest.approx([-1 / 7, -1 / 8, -1 / 9])


def test_each_turn_has_its_history_and_version_also_where_a_span_covers_several() -> None:
    first = with_given(sampled(PROMPT, [7, 8], (0, 1, 3)), ids(1, 2))
    second = with_given(sampled(first, [9], (0, 1, 3)), ids(3))
    assert len(second.spans) == 1
    turns = turns_of(sampled(second, [7], (0, 1, 4)), sampled(unsampled(ids(4)), [8, 9], (0, 2, 4)))
    assert [turn.number for turn in turns] == [0, 1, 2, 3]
    assert [turn.policy_version for turn in turns] == [3, 3, 4, 4]
    assert [turn.history_ids.tolist() for turn in turns] == [[5, 6], [5, 6, 7, 8, 1, 2], second.ids.tolist(), [4]]
    assert [turn.ids.tolist() for turn in turns] == [[7, 8], [9], [7], [8, 9]]


def test_tokens_of_later_versions_in_a_turn_are_counted_and_left_out() -> None:
    (turn,) = turns_of(sampled(PROMPT, [7, 8, 9, 10], (0, 1, 3), (1, 2, 3), (3, 2, 4)))
    assert (turn.ids.tolist(), turn.policy_version, turn.num_later) == ([7, 8, 9], 3, 1)


TURN = turns_of(sampled(PROMPT, [7, 8, 9], (0, 1, 3)))[0]
SAME = sampled(PROMPT, [7, 8, 9], (0, 1, 0))


def with_logprob(place: int, value: float) -> Segment:
    logprobs = SAME.behavior_logprobs.copy()
    logprobs[place] = value
    return replace(SAME, behavior_logprobs=logprobs)


def test_equal_turns_do_not_differ_and_rounding_is_measured() -> None:
    assert first_difference(TURN, SAME) is None
    rounded = with_logprob(3, -1 / 8 + LOGPROB_TOLERANCE / 2)
    assert first_difference(TURN, rounded) is None
    assert largest_logprob_difference(TURN, rounded) == pytest.approx(LOGPROB_TOLERANCE / 2, rel=0.01)


def test_the_first_other_token_is_named_with_both_values() -> None:
    difference = first_difference(TURN, sampled(PROMPT, [7, 10, 11], (0, 1, 0)))
    told = (
        "token 1 of the turn: token id 8 with log-prob -0.125 was recorded, token id 10 with log-prob -0.1 was sampled"
    )
    assert str(difference) == told


@pytest.mark.parametrize("value", [-1 / 8 - 1e-4, float("nan")])
def test_an_other_log_prob_is_a_difference(value: float) -> None:
    difference = first_difference(TURN, with_logprob(3, value))
    assert difference is not None and difference.place == 1
    assert difference.sampled == (8, pytest.approx(value, nan_ok=True))


def test_an_answer_that_ends_before_the_recorded_one_is_a_difference() -> None:
    difference = first_difference(TURN, sampled(PROMPT, [7, 8], (0, 1, 0)))
    assert str(difference) == (
        "token 2 of the turn: token id 9 with log-prob -0.1111111 was recorded, nothing was sampled"
    )
