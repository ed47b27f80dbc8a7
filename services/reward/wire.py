"""Items, scores and errors ⇄ protobuf, for the service. No I/O.

A batch of 64 cheap items should cost little more than its bytes. The shortcuts below (columns, one `json` call for many
texts, joined message bytes) are measured by part `calls` of benchmarks/reward.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import lru_cache, partial, wraps
from itertools import repeat
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from tandem.protos import reward_pb2
from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored, UnscoredReason
from tandem.protos.errors import (
    DataError,
    JobError,
    JobExistsError,
    JobLimitError,
    ScorerError,
    SizeError,
    TandemError,
    UnknownJobError,
    UserError,
)

MAX_ITEMS = 8192
"""Items of one request or chunk."""
MAX_REQUEST_BYTES = 16 << 20
"""Bytes of one request or chunk."""
MAX_CARRIED_BYTES = MAX_REQUEST_BYTES + 64
"""Bytes of one gRPC message: the request or chunk, and the few bytes of the message around it."""
MAX_DEPTH = 64
"""Nesting of lists and objects in `ground_truth` and `extra_info`, because scorers may recurse."""

_MAX_DETAIL = 1000
_MAX_QUOTED = 320
_read_json_prefix = json.JSONDecoder().raw_decode
_NAMES = ("data_source", "solution", "ground_truth", "extra_info", "group")
_fields = attrgetter(*_NAMES)  # one call instead of five
_new_item: Callable[[Iterable[object]], ScoreItem] = partial(tuple.__new__, ScoreItem)  # `_make` is not written in C
_NOTHING: Mapping[str, object] = MappingProxyType({})
_Message = reward_pb2.ScoreRequest.Item

Handler = TypeVar("Handler", bound=Callable[..., AsyncGenerator[Message]])

# A class stands before those it inherits from.
_CAUSES: dict[type[TandemError], str] = {
    UnknownJobError: "unknown_job",
    JobExistsError: "key_in_use",
    JobLimitError: "limit_reached",
    JobError: "wrong_state",
    ScorerError: "invalid_rubric",
    SizeError: "too_large",
    DataError: "invalid_request",
}


def check_size(what: str, num_items: int, num_bytes: int) -> None:
    """Raises DataError for a request or chunk with too many items, SizeError for one with too many bytes."""
    if num_items > MAX_ITEMS:
        raise DataError(
            f"{what} has {num_items:,} items, at most {MAX_ITEMS:,} are allowed: send several, or submit a job"
        )
    if num_bytes > MAX_REQUEST_BYTES:
        raise SizeError(
            f"{what} has {num_bytes:,} bytes, at most {MAX_REQUEST_BYTES:,} are allowed: send fewer items at a time"
        )


def read_items(messages: Iterable[_Message], first_item: int = 0) -> tuple[list[ScoreItem], dict[int, Unscored]]:
    """The readable items of a batch, and the faults of the others by position. `first_item` is the number of the first
    item, for the text of a fault. The texts of the messages may be bytes (`tandem.services.reward.undecoded_text`).
    """
    columns = list(zip(*map(_fields, messages), strict=True))
    if not columns:
        return [], {}
    truths = _Truths({"": None})
    data_sources, solutions, truth_texts, extras, groups = columns
    are_texts = isinstance(groups[0], str)
    if are_texts and not any(extras):
        try:  # column by column, which fits nearly every batch and takes half the time
            read = _read_strings(truth_texts) or map(truths.__getitem__, truth_texts)
            nothing = repeat(_NOTHING, len(groups))
            return [*map(_new_item, zip(data_sources, solutions, read, nothing, groups, strict=True))], {}
        except _UnreadableError:
            pass  # the loop below finds the item
    items: list[ScoreItem] = []
    faults: dict[int, Unscored] = {}
    for position, values in enumerate(zip(*columns, strict=True)):
        try:
            data_source, solution, truth, extra, group = values if are_texts else map(_decoded, _NAMES, values)
            information = _read_object(extra) if extra else _NOTHING
            items.append(_new_item((data_source, solution, truths[truth], information, group)))
        except _UnreadableError as error:
            faults[position] = Unscored("invalid_input", f"item {first_item + position}: {error}")
    return items, faults


def with_faults(scores: Sequence[Score], faults: dict[int, Unscored]) -> list[Score]:
    """All results in order: the scores of the readable items and the faults of the others."""
    rest = iter(scores)
    return [faults[position] if position in faults else next(rest) for position in range(len(scores) + len(faults))]


def reply_of(scores: Sequence[Score]) -> reward_pb2.ScoreReply:
    # The bytes of several messages in a row decode as one message whose lists are joined. So each distinct score of a
    # batch, and there are few, is serialised once.
    known: dict[int, bytes] = {}  # by identity: scorers return the same few objects
    parts = []
    for score in scores:
        part = known.get(id(score))
        if part is None:
            part = known[id(score)] = _reply_bytes(score)
        parts.append(part)
    return reward_pb2.ScoreReply.FromString(b"".join(parts))


def _reply_bytes(score: Score) -> bytes:
    if isinstance(score, Scored):
        return _scored_bytes(score.value, tuple(score.breakdown.items()) if score.breakdown else ())
    unscored = reward_pb2.ScoreReply.Unscored(reason=score.reason, detail=_sendable(score.detail[:_MAX_DETAIL]))
    return reward_pb2.ScoreReply(items=[reward_pb2.ScoreReply.Item(unscored=unscored)]).SerializeToString()


@lru_cache(maxsize=4096)
def _scored_bytes(value: float, breakdown: tuple[tuple[str, float], ...]) -> bytes:
    # `+ 0.0` turns -0.0 into 0.0: both are one key of this cache.
    parts = {_sendable(name): part + 0.0 for name, part in breakdown}
    scored = reward_pb2.ScoreReply.Scored(value=value + 0.0, breakdown=parts)
    return reward_pb2.ScoreReply(items=[reward_pb2.ScoreReply.Item(scored=scored)]).SerializeToString()


def _sendable(text: str) -> str:
    """The text with lone surrogates escaped, which JSON may contain and UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def score_of(message: reward_pb2.ScoreReply.Item) -> Score | None:
    """Returns the score in a message; None for a message without a result."""
    kind = message.WhichOneof("result")
    if kind == "scored":
        return Scored(message.scored.value, dict(message.scored.breakdown))
    if kind == "unscored":
        return Unscored(cast(UnscoredReason, message.unscored.reason), message.unscored.detail)
    return None


class _UnreadableError(Exception):
    """A field of an item is invalid. The message begins with its name."""


class _Truths(dict[str, Any]):
    """Ground truths by text, so that the shared ground truth of a group is parsed once."""

    def __missing__(self, text: str) -> object:
        try:
            value = _read_json(text)
        except ValueError as error:
            raise _UnreadableError(f"ground_truth is not JSON: {error}") from None
        self[text] = value
        return value


def _read_strings(texts: Sequence[str]) -> list[str] | None:
    """The strings that the JSON texts stand for, read in one call. None if one of them is no string."""
    # No JSON string contains a line break, so no string spans two texts: as many strings as texts means one each.
    joined = "[" + "\n,\n".join(texts) + "]"
    try:
        read, end = _read_json_prefix(joined)
    except (ValueError, RecursionError):
        return None
    whole = end == len(joined) and len(read) == len(texts)
    return read if whole and {*map(type, read)} == {str} else None


def _decoded(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise _UnreadableError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None


def _read_object(text: str) -> dict[str, object]:
    try:
        value = _read_json(text)
    except ValueError as error:
        raise _UnreadableError(f"extra_info is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _UnreadableError(f"extra_info is not a JSON object but {value!r:.{_MAX_QUOTED}}")
    return value


def _read_json(text: str) -> object:
    """The value. Raises ValueError, also instead of RecursionError."""
    try:
        try:
            value, end = _read_json_prefix(text)
        except ValueError:
            end = -1
        if end != len(text):  # white space around the value, or no JSON
            value = json.loads(text)
    except RecursionError:
        raise ValueError(f"more than {MAX_DEPTH} lists and objects within one another") from None
    if type(value) is not str and text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} lists and objects within one another")
    return value


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def error_message(error: UserError) -> reward_pb2.StreamError:
    message = reward_pb2.StreamError(message=str(error))
    cause = next((name for kind, name in _CAUSES.items() if isinstance(error, kind)), None)
    if cause is not None:
        getattr(message, cause).SetInParent()
    return message


def error_of(message: reward_pb2.StreamError) -> TandemError:
    """The error of a message: a TandemError if this version does not know the cause."""
    cause = message.WhichOneof("cause")
    kind = next((kind for kind, name in _CAUSES.items() if name == cause), TandemError)
    return kind(message.message)


def ends_with_error(reply: Callable[..., Message]) -> Callable[[Handler], Handler]:
    """Decorates a handler that streams replies: a UserError is sent as a last `reply(error=...)` and then raised."""

    def decorate(handler: Handler) -> Handler:
        @wraps(handler)
        async def call(*arguments: object) -> AsyncGenerator[Message]:
            async with aclosing(handler(*arguments)) as replies:
                try:
                    async for one in replies:
                        yield one
                except UserError as error:
                    yield reply(error=error_message(error))
                    raise

        return call  # type: ignore[return-value]

    return decorate
