"""The way of every call into a server: what is no request, what is too much, and the error tree mapped to status codes,
once, here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from tandem.protos.errors import DataError, TandemError, UnavailableError

MAX_MESSAGE_BYTES = 256 << 20
MAX_CALLS = 256
"""Under way at one server. Each may hold a message that nothing else has counted yet: of the largest, 16 MiB, so many
take 4 GiB.
"""
ERROR_KEY = "tandem-error"
"""Of the trailing metadata with the name of the error's class."""
_MAX_DETAIL_BYTES = 4000  # a status travels in headers, for which clients accept 8 KiB

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """What a server takes from its callers."""

    max_request_bytes: int = MAX_MESSAGE_BYTES
    """Of one message; a larger one ends its call before it is read."""
    max_calls: int = MAX_CALLS
    """Calls under way at a time, those of health, reflection and Info not among them: one more is UNAVAILABLE, for
    clients to try again.
    """
    readers: Mapping[str, Callable[[bytes], Any]] = field(default_factory=dict)
    """By the path of a method: what else to read bytes with that are no request of it. Raises DecodeError."""


DEFAULT_RPC_LIMITS = RpcLimits()


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands where a request would, whose bytes are none."""

    fault: str


class LimitedServer:
    """Where services are registered in place of the server: each of their calls comes in through here.

    A handler that raises a TandemError ends its call with that class's status code and name, whatever kind of call it
    is. Bytes that are no request of the method (a string that is not UTF-8 among them) end as a DataError: gRPC would
    call that its own failure. Past `max_calls` of the counted services a call is refused before its message is read.

    An interceptor would do the same for half as much again as an empty call costs (a coroutine and a queue a call).
    """

    def __init__(self, server: grpc.aio.Server, limits: RpcLimits, counted: Sequence[str]) -> None:
        self._server = server
        self._intake = limits
        self._counted = frozenset(counted)
        self._num_calls = 0
        refuse: Any = self._refuse
        # For any kind of call, since it reads nothing.
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(refuse)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """As a server does it."""
        self._server.add_generic_rpc_handlers([_LimitedHandler(handler, self._wrapped) for handler in handlers])

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """Nothing: a server would find these before the ones above, which are the same."""

    def _wrapped(self, method: str, handler: Handler) -> Callable[[], Handler]:
        wrapped = _wrapped(handler, self._intake.readers.get(method))
        if method.split("/")[1] not in self._counted:
            return lambda: wrapped
        return lambda: wrapped if self._count() else self._refusal

    def _count(self) -> bool:
        """Whether one more call is taken; if so it counts until its task ends."""
        if self._num_calls >= self._intake.max_calls:
            return False
        task = asyncio.current_task()
        assert task is not None, "gRPC serves every call in a task of its own"
        self._num_calls += 1
        task.add_done_callback(self._end_call)
        return True

    def _end_call(self, _task: asyncio.Task[Any]) -> None:
        self._num_calls -= 1

    async def _refuse(self, _requests: Any, context: Any) -> None:
        most = self._intake.max_calls
        await _end(context, UnavailableError(f"{most} calls are under way here, no more are taken; try again"))


class _LimitedHandler(grpc.GenericRpcHandler):
    """The methods of one service, each wrapped when it is first called."""

    def __init__(self, handler: grpc.GenericRpcHandler, wrap: Callable[[str, Handler], Callable[[], Handler]]) -> None:
        self._handler = handler
        self._wrap = wrap
        self._open: dict[str, Callable[[], Handler]] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """What serves this call; None for a method of another service."""
        method = str(handler_call_details.method)
        enter = self._open.get(method)
        if enter is None:
            handler = self._handler.service(handler_call_details)
            if handler is None:
                return None
            enter = self._open[method] = self._wrap(method, handler)
        return enter()


def _wrapped(handler: Handler, reader: Callable[[bytes], Any] | None) -> Handler:
    read, write = _reading(handler, reader), handler.response_serializer
    # The stubs type a handler's context as grpc.ServicerContext; it is an aio one in truth.
    inner: Any
    if handler.unary_unary is not None:
        inner = handler.unary_unary
        call = grpc.unary_unary_rpc_method_handler(_answering(inner, _checked), read, write)
    elif handler.unary_stream is not None:
        inner = handler.unary_stream
        call = grpc.unary_stream_rpc_method_handler(_telling(inner, _checked), read, write)
    elif handler.stream_unary is not None:
        inner = handler.stream_unary
        call = grpc.stream_unary_rpc_method_handler(_answering(inner, _checked_stream), read, write)
    else:
        inner = handler.stream_stream
        call = grpc.stream_stream_rpc_method_handler(_telling(inner, _checked_stream), read, write)
    return call


def _answering(
    inner: Callable[[Any, Any], Awaitable[Any]], checked: Callable[[Any], Any]
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await inner(checked(request), context)
        except TandemError as error:
            await _end(context, error)

    return call


def _telling(inner: Callable[[Any, Any], Any], checked: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    if not inspect.isasyncgenfunction(inner):  # it writes to the context itself, as gRPC's own services do
        return _answering(inner, checked)

    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(inner(checked(request), context)) as replies:  # whoever leaves: it may hold tasks
                async for reply in replies:
                    yield reply
        except TandemError as error:
            await _end(context, error)

    return call


def _reading(handler: Handler, reader: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """The handler's deserializer, then the other reader; it raises nothing."""
    deserialize = handler.request_deserializer
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            with suppress(DecodeError):
                if reader is not None:
                    return reader(data)
            return _Malformed(f"the bytes are no request of this method, or a text in it is not UTF-8: {error}")

    return read


def _checked(request: Any) -> Any:
    """The request; raises DataError for a malformed one."""
    if isinstance(request, _Malformed):
        raise DataError(request.fault)
    return request


async def _checked_stream(requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


async def _end(context: Any, error: TandemError) -> None:
    context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
    text = str(error).encode(errors="backslashreplace")[:_MAX_DETAIL_BYTES].decode(errors="ignore")
    await context.abort(getattr(grpc.StatusCode, error.grpc_code), text)
