"""The turns of a recorded trajectory, and the first place where a turn that was sampled again differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tandem.protos.types import Segment, Trajectory

LOGPROB_TOLERANCE = 1e-5
"""Largest difference of two log-probs of one token that counts as none: the last bits of a float32 log-prob depend on
what else is in the engine's batch, and on whether the tokens before were read at once or sampled one by one.
"""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """The tokens of a turn that were sampled by its first version; arrays (T,) of these tokens."""

    number: int
    """In its trajectory, from 0."""
    history_ids: NDArray[np.int32]
    """All tokens before the turn."""
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    policy_version: int
    num_later: int
    """Tokens after these, of later versions. The engine sampled them with a KV cache of several versions, which it
    cannot compute again.
    """


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """What was recorded at a place of a turn and what was sampled there again; None: nothing."""

    place: int
    """In the turn, from 0."""
    recorded: tuple[int, float]
    """Token id and log-prob."""
    sampled: tuple[int, float] | None

    def __str__(self) -> str:
        sampled = "nothing" if self.sampled is None else _in_words(*self.sampled)
        return f"token {self.place} of the turn: {_in_words(*self.recorded)} was recorded, {sampled} was sampled"


def recorded_turns(trajectory: Trajectory) -> Iterator[RecordedTurn]:
    """The turns of the policy, in their order. A trajectory without an environment has one."""
    number = 0
    for segment in trajectory.segments:
        edges = np.flatnonzero(np.diff(segment.loss_mask, prepend=0, append=0))
        for begin, end in edges.reshape(-1, 2).tolist():
            version, until = _first_version(segment, begin, end)
            yield RecordedTurn(
                number,
                segment.ids[:begin],
                segment.ids[begin:until],
                segment.behavior_logprobs[begin:until],
                version,
                end - until,
            )
            number += 1


def first_difference(turn: RecordedTurn, sampled: Segment) -> TokenDifference | None:
    """Compares the turn with a segment of its history and what was sampled after it with the turn's length as
    `max_tokens`.
    """
    begin = len(turn.history_ids)
    ids, logprobs = sampled.ids[begin:], sampled.behavior_logprobs[begin:]
    length = min(len(ids), len(turn.ids))
    differs = ids[:length] != turn.ids[:length]
    differs |= ~(np.abs(logprobs[:length] - turn.logprobs[:length]) <= LOGPROB_TOLERANCE)  # also if one is no number
    place = int(differs.argmax()) if differs.any() else length
    if place == len(turn.ids):
        return None
    found = None if place == len(ids) else (int(ids[place]), float(logprobs[place]))
    return TokenDifference(place, (int(turn.ids[place]), float(turn.logprobs[place])), found)


def largest_logprob_difference(turn: RecordedTurn, sampled: Segment) -> float:
    """Of equal tokens."""
    return float(np.abs(sampled.behavior_logprobs[len(turn.history_ids) :] - turn.logprobs).max())


def _first_version(segment: Segment, begin: int, end: int) -> tuple[int, int]:
    """The version of the token at `begin`, and where the first one of a later version follows, at most `end`."""
    firsts = [span.first_token for span in segment.spans]
    ends = [after for _, after in pairwise([*firsts, len(segment.ids)])]
    covering = [span for span, after in zip(segment.spans, ends, strict=True) if after > begin]
    version = covering[0].policy_version
    changes = (span.first_token for span in covering if span.policy_version != version)
    return version, min(next(changes, end), end)


def _in_words(token_id: int, logprob: float) -> str:
    return f"token id {token_id} with log-prob {logprob:.7g}"
