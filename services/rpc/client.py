"""Channels to services, and the translation of errors that the services raised."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import grpc

from tandem.protos.errors import DeadlineError, SizeError, TandemError, UnavailableError, error_class
from tandem.services.addresses import named_addresses, target_of
from tandem.services.rpc.limits import ERROR_KEY, MAX_MESSAGE_BYTES
from tandem.services.rpc.tokens import bearer

_TOO_LARGE = re.compile(r"larger than max(?: \((\d+) vs\. (\d+)\))?")  # in gRPC's words; no sizes if it was compressed
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{"service": "tandem.v1.RewardService"}],
            # Every call may be repeated: scoring has no side effects, and jobs have keys. About 2 s in total.
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 4,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
_CLIENT_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.per_rpc_retry_buffer_size", 32 << 20),  # larger calls are not repeated; gRPC's default is 256 KiB
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
]


class _TokenSender(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds a token to every call."""

    def __init__(self, token: str) -> None:
        self._token = bearer(token)

    def _call(self, continuation: Any, details: Any, request: object) -> Any:
        return continuation(details._replace(metadata=[*(details.metadata or ()), self._token]), request)

    intercept_unary_unary = intercept_unary_stream = _call  # type: ignore[assignment]
    intercept_stream_unary = intercept_stream_stream = _call  # type: ignore[assignment]


def connect(addresses: str, token: str = "") -> grpc.Channel:
    """A channel to `host:port`, or to several addresses separated by commas, over which the calls rotate. It connects
    with the first call. Every call carries the token. Raises UserError if an address is invalid, or one of several
    addresses cannot be resolved.
    """
    channel = grpc.insecure_channel(target_of(named_addresses(addresses)), options=_CLIENT_OPTIONS)
    return grpc.intercept_channel(channel, _TokenSender(token)) if token else channel


class TokenChannel:
    """A channel of `grpc.aio` whose calls carry a token. Has the methods that stubs use.

    An interceptor of `grpc.aio` would start another task for every call.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        metadata = (bearer(token),)

        def with_token(kind: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *method, **options: partial(kind(*method, **options), metadata=metadata)

        self.unary_unary = with_token(channel.unary_unary)
        self.unary_stream = with_token(channel.unary_stream)
        self.stream_unary = with_token(channel.stream_unary)
        self.stream_stream = with_token(channel.stream_stream)


def connect_async(target: str) -> grpc.aio.Channel:
    """The same channel for `grpc.aio`, to a target of `target_of`."""
    return grpc.aio.insecure_channel(target, options=_CLIENT_OPTIONS)


@contextmanager
def translated() -> Iterator[None]:
    """Raises the TandemError that the other side raised instead of gRPC's error."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def from_rpc_error(error: grpc.RpcError) -> TandemError:
    """The TandemError of a failed call: of the class that the server named, otherwise of one by status code."""
    detail = error.details() or "no detail"
    metadata = cast("Iterable[tuple[str, str]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == ERROR_KEY:
            return error_class(value)(detail)
    code = error.code()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"no answer within the deadline: {detail}")
    if code == grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(f"cannot be reached: {detail}")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and (found := _TOO_LARGE.search(detail)):
        sizes = f" has {int(found[1]):,} bytes, at most {int(found[2]):,} are taken" if found[1] else " is too large"
        return SizeError(f"a message{sizes}: send less at a time")
    return TandemError(f"{code.name}: {detail}")
