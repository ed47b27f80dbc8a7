"""Channels to services, and the translation of errors that the services raised."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import grpc

from tandem.protos.errors import DeadlineError, SizeError, TandemError, UnavailableError, error_class
from tandem.services.addresses import named_addresses, target_of
from tandem.services.rpc.limits import ERROR_KEY, MAX_MESSAGE_BYTES

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


def connect(addresses: str) -> grpc.Channel:
    """A channel to `host:port`, or to several addresses separated by commas, over which the calls rotate. It connects
    with the first call. Raises UserError if an address is invalid, or one of several addresses cannot be resolved.
    """
    return grpc.insecure_channel(target_of(named_addresses(addresses)), options=_CLIENT_OPTIONS)


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
