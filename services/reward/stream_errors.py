"""Errors in the streams of `RewardService`: a UserError as a `StreamError`, whose `oneof` names the cause."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import wraps
from typing import TypeVar

from google.protobuf.message import Message

from tandem.protos import reward_pb2
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

Handler = TypeVar("Handler", bound=Callable[..., AsyncGenerator[Message]])


def error_message(error: UserError) -> reward_pb2.StreamError:
    """The error for the wire."""
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
