"""The lines that a worker answers a chunk with. User's code shares its process, so nothing that arrives is trusted.

A line is the chunk's token, its number in the chunk, and JSON. Anything else written to the channel has neither token
nor number, so it cannot pass for an answer or shift the answers of other items.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from typing import Literal, get_args

from tandem.protos.contracts import Score, Scored, Unscored, UnscoredReason

STRAY = Unscored("crashed", "wrote to the channel of the scoring process")
_REASONS = frozenset(get_args(UnscoredReason))


def make_token() -> str:
    return secrets.token_hex(8)


def line(token: bytes, number: int, payload: bytes) -> bytes:
    return b"%b %d %b\n" % (token, number, payload)


def payloads(lines: Sequence[bytes], token: bytes, number: int) -> list[bytes]:
    """The payloads of the lines, numbered from `number`, up to the first line that does not belong to the chunk."""
    found = []
    for one in lines:
        head = b"%b %d " % (token, number)
        if not one.startswith(head):
            break
        found.append(one[len(head) :])
        number += 1
    return found


def encode_score(score: Score) -> bytes:
    """A score as JSON. One that is not finite is a bug of the scorer and becomes unscored."""
    if isinstance(score, Unscored):
        return json.dumps([score.reason, score.detail]).encode()
    for value in (score.value, *score.breakdown.values()):
        if not math.isfinite(value):
            return json.dumps(["infrastructure", f"the scorer answered {value}, not a finite number"]).encode()
    return json.dumps([float(score.value), dict(score.breakdown)]).encode()


def decode_scores(found: Sequence[bytes]) -> tuple[list[Score], Literal["", "memory", "stray"]]:
    """The scores up to the first payload that is none, and what that is: `memory` (the worker has none) or `stray`."""
    scores: list[Score] = []
    for one in found:
        try:
            answer = json.loads(one)
        except (ValueError, RecursionError):
            return scores, "stray"
        score = _score(answer)
        if score is None:
            return scores, "memory" if answer == {"memory": True} else "stray"
        scores.append(score)
    return scores, ""


def _score(answer: object) -> Score | None:
    match answer:
        case [float() | int() as value, dict() as breakdown] if all(map(_is_finite, [value, *breakdown.values()])):
            return Scored(value, breakdown)
        case [str() as reason, str() as detail] if reason in _REASONS:
            return Unscored(reason, detail)  # type: ignore[arg-type]
    return None


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False
