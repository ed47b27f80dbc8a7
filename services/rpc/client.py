"""Channels to services, and the translation of errors that the services raised."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import grpc

from tandem.protos.errors import (
    AuthenticationError,
    DeadlineError,
    SizeError,
    TandemError,
    UnavailableError,
    error_class,
)
from tandem.services.addresses import named_addresses, target_of
from tandem.services.rpc.certificates import CERTIFICATES_VARIABLE
from tandem.services.rpc.limits import ERROR_KEY, MAX_MESSAGE_BYTES
from tandem.services.rpc.tokens import bearer

_TOO_LARGE = re.compile(r"larger than max(?: \((\d+) vs\. (\d+)\))?")  # in gRPC's words; no sizes if it was compressed
_LAST_ERROR = re.compile(r"last error: \w+: (?:ipv[46]:)?(\S+): (.+)", re.DOTALL)  # address and cause, in gRPC's words
_REFUSED_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")
_CLOSED = re.compile(r"Socket closed|Connection reset by peer|Broken pipe")
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
_CLIENT_OPTIONS: list[tuple[str, int | str]] = [
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


def connect(
    addresses: str, token: str = "", credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.Channel:
    """A channel to `host:port`, or to several addresses separated by commas, over which the calls rotate. It connects
    with the first call: over TLS if there are credentials; then the service's certificate has to name `server_name`, by
    default the host of the first address. Every call carries the token. Raises UserError if an address is invalid, or
    one of several addresses cannot be resolved.
    """
    named = named_addresses(addresses)
    if credentials is None:
        channel = grpc.insecure_channel(target_of(named), options=_CLIENT_OPTIONS)
    else:
        options = _tls_options(server_name or server_name_of(named))
        channel = grpc.secure_channel(target_of(named), credentials, options=options)
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


def connect_async(
    target: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """The same channel for `grpc.aio`, to a target of `target_of`, and without a token."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=_CLIENT_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=_tls_options(server_name))


def server_name_of(addresses: Sequence[str]) -> str:
    """What the certificates of several services all have to name: the host of the first address. "" for one address,
    which gRPC takes for the name.
    """
    return addresses[0].rpartition(":")[0].strip("[]") if len(addresses) > 1 else ""


def _tls_options(server_name: str) -> list[tuple[str, int | str]]:
    return [*_CLIENT_OPTIONS, ("grpc.ssl_target_name_override", server_name)] if server_name else _CLIENT_OPTIONS


@contextmanager
def translated() -> Iterator[None]:
    """Raises the TandemError that the other side raised instead of gRPC's error."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _unreachable(detail: str) -> TandemError:
    """The error of a call that found no connection. A TLS handshake that failed here is for good; one that failed at
    the service looks like a service that stops.
    """
    place, cause = found.groups() if (found := _LAST_ERROR.search(detail)) else ("", detail)
    if refused := _REFUSED_CERTIFICATE.search(cause):
        remedy = "renew it there, or connect with the ca.crt of this service"
        return AuthenticationError(f"{place}: the service's certificate is refused: {refused[1]}; {remedy}")
    if "Hostname Verification" in cause:
        remedy = "name this address in `tandem certs init`, or connect to one that it names"
        return AuthenticationError(f"{place}: the service's certificate is not for this address; {remedy}")
    if "WRONG_VERSION_NUMBER" in cause:
        return AuthenticationError(f"{place}: the service talks no TLS; connect to it without certificates")
    if place and _CLOSED.search(cause):
        cause += f"; if it talks TLS, set {CERTIFICATES_VARIABLE} to its ca.crt, or to a folder with client.crt"
    return UnavailableError(f"cannot be reached: {place}: {cause}" if place else f"cannot be reached: {cause}")


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
        return _unreachable(detail)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and (found := _TOO_LARGE.search(detail)):
        sizes = f" has {int(found[1]):,} bytes, at most {int(found[2]):,} are taken" if found[1] else " is too large"
        return SizeError(f"a message{sizes}: send less at a time")
    return TandemError(f"{code.name}: {detail}")
