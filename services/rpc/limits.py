"""Handling of every call of a server: tokens, request limits, malformed requests, TandemErrors as status codes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from tandem.protos.errors import DataError, DeadlineError, TandemError, UnavailableError, UserError
from tandem.services.rpc.tokens import ROLES_NEEDED, Metadata, Role, Tokens

MAX_MESSAGE_BYTES = 256 << 20
MAX_CALLS = 256
"""Concurrent calls at one server. Each may hold a message of up to 16 MiB that is not counted yet: 4 GiB in total."""
ERROR_KEY = "tandem-error"
"""Key of the trailing metadata that names the class of an error."""
_MAX_DETAIL_BYTES = 4000  # a status is sent in headers, for which clients accept 8 KiB

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
_Call: TypeAlias = Callable[[Any, _Context], Any]
"""What serves a call: takes a request, or an iterator of them; returns a reply, or an iterator of them."""
_Receive: TypeAlias = Callable[[AsyncIterator[object]], Awaitable[object]]
"""Reads the one message of a call, or returns an iterator of its messages."""
_Reader: TypeAlias = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Limits of a server on its calls."""

    max_request_bytes: int = MAX_MESSAGE_BYTES
    """Maximum size of one message. A larger one ends its call before it is read."""
    read_seconds: float = 30.0
    """Time limit for the message of a unary call. Without it, calls that send only headers would use up `max_calls`."""
    max_calls: int = MAX_CALLS
    """Concurrent calls, without health, reflection and Info. Further calls are UNAVAILABLE, and clients retry them."""
    readers: Mapping[str, _Reader] = field(default_factory=dict)
    """By the path of a method: a second deserializer, for bytes that its own refuses. Raises DecodeError."""


class _Method(NamedTuple):
    handler: Handler
    role: Role | None
    is_counted: bool


class LimitedServer(grpc.GenericRpcHandler):
    """Serves what is registered on it through another server, with limits and error handling around each method.

    With `tokens`, a call whose token does not have the method's role is refused before its message is read.

    A TandemError from a handler ends the call with the status code and name of its class. A request that cannot be
    decoded (a string that is not UTF-8, for instance) becomes a DataError; gRPC would report an internal error. Past
    `max_calls` of the counted services, a call is refused before its message is read.

    An interceptor would make an empty call take half as long again (part `calls` of benchmarks/reward.py).
    """

    def __init__(
        self, server: grpc.aio.Server, limits: RpcLimits, counted: Sequence[str], tokens: Tokens | None = None
    ) -> None:
        server.add_generic_rpc_handlers([self])
        self._limits = limits
        self._counted = counted
        self._tokens = tokens
        self._methods: dict[str, _Method] = {}  # by path
        self._num_calls = 0

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """As `grpc.aio.Server` does."""
        for name, handler in method_handlers.items():
            path = f"/{service_name}/{name}"
            wrapped = _wrapped(handler, self._limits.readers.get(path), self._limits.read_seconds)
            role = ROLES_NEEDED.get(path, Role.internal)
            self._methods[path] = _Method(wrapped, role, service_name in self._counted)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Ignores the handlers: they are those of `add_registered_method_handlers` again."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Returns the handler of this call; None for an unknown method."""
        method = self._methods.get(str(handler_call_details.method))
        if method is None:
            return None
        try:
            if self._tokens is not None:
                metadata: Metadata = handler_call_details.invocation_metadata  # type: ignore[assignment]
                self._tokens.check(metadata, method.role)
        except UserError as error:
            return _refusing(error)
        if method.is_counted and not self._count():
            most = self._limits.max_calls
            return _refusing(UnavailableError(f"{most} calls are being served, the most this server takes; try again"))
        return method.handler

    def _count(self) -> bool:
        """Counts a call until its task ends. Returns False if there are too many calls."""
        if self._num_calls >= self._limits.max_calls:
            return False
        task = asyncio.current_task()
        assert task is not None, "gRPC serves every call in a task of its own"
        self._num_calls += 1
        task.add_done_callback(self._end_call)
        return True

    def _end_call(self, _task: asyncio.Task[object]) -> None:
        self._num_calls -= 1


def _refusing(error: TandemError) -> Handler:
    """A handler that ends any kind of call with the error, and reads no message."""

    async def refuse(_requests: object, context: _Context) -> None:
        await _end(context, error)

    behavior: Any = refuse
    handler: Handler = grpc.stream_stream_rpc_method_handler(behavior)
    return handler


def _wrapped(handler: Handler, reader: _Reader | None, read_seconds: float) -> Handler:
    """The handler with limits and errors. It takes a stream in any case: gRPC would wait for a message forever."""
    replies = "stream" if handler.response_streaming else "unary"
    inner = getattr(handler, f"{'stream' if handler.request_streaming else 'unary'}_{replies}")
    wrap = _streaming if handler.response_streaming else _unary
    call = wrap(inner, _all_messages if handler.request_streaming else partial(_one_message, seconds=read_seconds))
    made: Handler = getattr(grpc, f"stream_{replies}_rpc_method_handler")(
        call, _reading(handler, reader), handler.response_serializer
    )
    return made


def _unary(inner: _Call, receive: _Receive) -> _Call:
    async def call(requests: AsyncIterator[object], context: _Context) -> object:
        try:
            return await inner(await receive(requests), context)
        except TandemError as error:
            await _end(context, error)

    return call


def _streaming(inner: _Call, receive: _Receive) -> _Call:
    if not inspect.isasyncgenfunction(inner):  # it writes to the context itself, as some of gRPC's services do
        return _unary(inner, receive)

    async def call(requests: AsyncIterator[object], context: _Context) -> AsyncIterator[object]:
        try:
            async with aclosing(inner(await receive(requests), context)) as replies:  # it may hold tasks
                async for reply in replies:
                    yield reply
        except TandemError as error:
            await _end(context, error)

    return call


def _reading(handler: Handler, reader: _Reader | None) -> _Reader | None:
    """Tries the handler's deserializer, then the reader. Returns a DataError in place of a malformed request."""
    deserialize = handler.request_deserializer
    if deserialize is None:
        return None

    def read(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError as error:
            with suppress(DecodeError):
                if reader is not None:
                    return reader(data)
            return DataError(f"the request cannot be decoded, or a text in it is not UTF-8: {error}")

    return read


def _checked(request: object) -> object:
    if isinstance(request, DataError):
        raise request
    return request


async def _one_message(requests: AsyncIterator[object], *, seconds: float) -> object:
    """The message of a unary call. Raises DataError if it is malformed or missing, DeadlineError if none comes."""
    try:
        async with asyncio.timeout(seconds):
            return _checked(await anext(requests, DataError("the call ended without a message")))
    except TimeoutError:
        raise DeadlineError(f"the request did not arrive within {seconds:g} s") from None


async def _all_messages(requests: AsyncIterator[object]) -> AsyncIterator[object]:
    async def checked() -> AsyncIterator[object]:
        async for request in requests:
            yield _checked(request)

    return checked()


async def _end(context: _Context, error: TandemError) -> NoReturn:
    context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
    text = str(error).encode(errors="backslashreplace")[:_MAX_DETAIL_BYTES].decode(errors="ignore")
    await context.abort(getattr(grpc.StatusCode, error.grpc_code), text)
