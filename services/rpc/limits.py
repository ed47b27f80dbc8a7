"""Handling of every call of a server: tokens, request limits, malformed requests, TandemErrors as status codes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from tandem.protos.errors import DataError, DeadlineError, SizeError, TandemError, UnavailableError, UserError
from tandem.services.rpc.tokens import ANYBODY, ROLES_NEEDED, Caller, Metadata, Role, Tokens

MAX_MESSAGE_BYTES = 256 << 20
"""Limit of a reply."""
MAX_CALLS = 256
ERROR_KEY = "tandem-error"
"""Key of the trailing metadata that names the class of an error."""
_MAX_DETAIL_BYTES = 4000  # a status is sent in headers, for which clients accept 8 KiB
_SHARE = 3  # places that a peer may hold for each that is free
_UNREAD_BYTES = 256 << 20  # unary requests of one peer that are being read

_WITHOUT_CODE = ("/grpc.health.v1.Health/List",)  # of grpc_health's asyncio servicer

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"
_Call: TypeAlias = Callable[[Any, _Context], Any]
"""What serves a call: takes a request, or an iterator of them; returns a reply, or an iterator of them."""
_Reader: TypeAlias = Callable[[bytes], object]

_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current_caller() -> Caller:
    """Who made the call that this task serves. `ANYBODY` if the server asks for no token."""
    return _caller.get() or ANYBODY


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """Limits of a server on its calls. Calls past them are UNAVAILABLE, and clients retry them.

    No peer can use up the places: it may hold three for each that is free, so three quarters while it is alone. A peer
    is a token (in a run: a role), or an address where no token is needed.
    """

    request_bytes: int = 64 << 10
    """Maximum size of a message."""
    payload_bytes: Mapping[str, int] = field(default_factory=dict)
    """By the path of a method: its own maximum. gRPC refuses what is larger than all of them before it is read; the
    smaller limit of another method holds before its message is decoded.
    """
    read_seconds: float = 30.0
    """Time limit for the message of a unary call. Without it, calls that send only headers would use up `max_calls`."""
    max_calls: int = MAX_CALLS
    """Concurrent calls, besides the two kinds below."""
    readers: Mapping[str, _Reader] = field(default_factory=dict)
    """By the path of a method: a second deserializer, for bytes that its own refuses. Raises DecodeError."""

    @property
    def max_streams(self) -> int:
        """Concurrent calls that send a stream, and all calls of health, reflection and Info: so many of each kind. Each
        stream can keep one message of the largest size half sent.
        """
        return max(1, self.max_calls // 4)

    @property
    def most_bytes(self) -> int:
        """The largest message of all methods."""
        return max([self.request_bytes, *self.payload_bytes.values()])


class _Places:
    """A limited number of places for calls, shared between peers by a dynamic threshold (Choudhury and Hahne 1998)."""

    def __init__(self, kind: str, number: int, read_at_once: int) -> None:
        self._kind = kind
        self._number = self._free = number
        self._read_at_once = read_at_once
        self._peers: WeakValueDictionary[Hashable, _Peer] = WeakValueDictionary()

    def take(self, context: _Context) -> asyncio.Semaphore:
        """Takes a place for the peer that calls, until the call's reply is sent. Returns what it reads its message
        under. Raises UnavailableError if it holds its share.
        """
        key: Hashable = _caller.get() or context.peer().rpartition(":")[0]  # an address without its port
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = _Peer(self._read_at_once)
        if peer.num_calls >= _SHARE * self._free:
            held = f"{peer.num_calls} {self._kind} of this caller are being served"
            raise UnavailableError(f"{held}, {self._free} of {self._number} places are free; try again")
        self._free -= 1
        peer.num_calls += 1
        task = asyncio.current_task()
        assert task is not None, "gRPC serves every call in a task of its own, which also sends the reply"
        task.add_done_callback(lambda _: self._give_back(peer))
        return peer.reading

    def _give_back(self, peer: _Peer) -> None:
        self._free += 1
        peer.num_calls -= 1


class _Peer:
    """The calls of a peer in progress."""

    def __init__(self, read_at_once: int) -> None:
        self.num_calls = 0
        self.reading = asyncio.Semaphore(read_at_once)


_Receive: TypeAlias = Callable[[AsyncIterator[object], asyncio.Semaphore], Awaitable[object]]
"""Reads the one message of a call, or returns an iterator of its messages."""


class _Method(NamedTuple):
    handler: Handler
    role: Role | None


class LimitedServer(grpc.GenericRpcHandler):
    """Serves what is registered on it through another server, with limits and error handling around each method.

    With `tokens`, a call whose token does not have the method's role is refused before its message is read.

    A TandemError from a handler ends the call with the status code and name of its class. A request that cannot be
    decoded (a string that is not UTF-8, for instance) becomes a DataError; gRPC would report an internal error. A call
    for which there is no place is refused before its message is read.

    An interceptor would make an empty call take half as long again (part `calls` of benchmarks/reward.py).
    """

    def __init__(
        self, server: grpc.aio.Server, limits: RpcLimits, names: Sequence[str], tokens: Tokens | None = None
    ) -> None:
        """`names`: the services that are not health, reflection or Info."""
        server.add_generic_rpc_handlers([self])
        self._limits = limits
        self._names = names
        self._tokens = tokens
        self._methods: dict[str, _Method] = {}  # by path
        read_at_once = max(1, _UNREAD_BYTES // limits.most_bytes)
        self._calls = _Places("calls", limits.max_calls, read_at_once)
        self._streams = _Places("streams", limits.max_streams, read_at_once)
        self._questions = _Places("calls", limits.max_streams, read_at_once)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """As `grpc.aio.Server` does."""
        for name, handler in method_handlers.items():
            path = f"/{service_name}/{name}"
            if path in _WITHOUT_CODE:
                continue
            reader = self._reader(path, handler)
            if service_name not in self._names:
                wrapped = _wrapped(handler, reader, self._questions, self._limits.read_seconds)
            elif handler.request_streaming:  # the method itself knows when its stream is idle
                wrapped = _wrapped(handler, reader, self._streams, None)
            else:
                wrapped = _wrapped(handler, reader, self._calls, self._limits.read_seconds)
            self._methods[path] = _Method(wrapped, ROLES_NEEDED.get(path, Role.internal))

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Ignores the handlers: they are those of `add_registered_method_handlers` again."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Returns the handler of this call; None for an unknown method. gRPC calls it in the task of the call."""
        method = self._methods.get(str(handler_call_details.method))
        if method is None:
            return None
        if self._tokens is not None and method.role is not None:
            metadata: Metadata = handler_call_details.invocation_metadata  # type: ignore[assignment]
            try:
                _caller.set(self._tokens.check(metadata, method.role))
            except UserError as error:
                return _refusing(error)
        return method.handler

    def _reader(self, path: str, handler: Handler) -> _Reader | None:
        """Tries the handler's deserializer, then that of the limits. Returns a DataError in place of a request that is
        malformed or too large.
        """
        deserialize, reader = handler.request_deserializer, self._limits.readers.get(path)
        most = self._limits.payload_bytes.get(path, self._limits.request_bytes)
        if deserialize is None:
            return None

        def read(data: bytes) -> object:
            if len(data) > most:
                return SizeError(f"the message has {len(data):,} bytes, at most {most:,} are allowed")
            try:
                return deserialize(data)
            except DecodeError as error:
                with suppress(DecodeError):
                    if reader is not None:
                        return reader(data)
                return DataError(f"the request cannot be decoded, or a text in it is not UTF-8: {error}")

        return read


def _refusing(error: TandemError) -> Handler:
    """A handler that ends any kind of call with the error, and reads no message."""

    async def refuse(_requests: object, context: _Context) -> None:
        await _end(context, error)

    behavior: Any = refuse
    handler: Handler = grpc.stream_stream_rpc_method_handler(behavior)
    return handler


def _wrapped(handler: Handler, reader: _Reader | None, places: _Places, seconds: float | None) -> Handler:
    """The handler with limits and errors. It takes a stream in any case: gRPC would wait for a message forever. Each
    message must arrive within `seconds`.
    """
    replies = "stream" if handler.response_streaming else "unary"
    inner = getattr(handler, f"{'stream' if handler.request_streaming else 'unary'}_{replies}")
    wrap = _streaming if handler.response_streaming else _unary
    call = wrap(inner, partial(_all_messages if handler.request_streaming else _one_message, seconds=seconds), places)
    made: Handler = getattr(grpc, f"stream_{replies}_rpc_method_handler")(call, reader, handler.response_serializer)
    return made


def _unary(inner: _Call, receive: _Receive, places: _Places) -> _Call:
    async def call(requests: AsyncIterator[object], context: _Context) -> object:
        try:
            return await inner(await receive(requests, places.take(context)), context)
        except TandemError as error:
            await _end(context, error)

    return call


def _streaming(inner: _Call, receive: _Receive, places: _Places) -> _Call:
    if not inspect.isasyncgenfunction(inner):  # it writes to the context itself, as some of gRPC's services do
        return _unary(inner, receive, places)

    async def call(requests: AsyncIterator[object], context: _Context) -> AsyncIterator[object]:
        try:
            request = await receive(requests, places.take(context))
            async with aclosing(inner(request, context)) as replies:  # it may hold tasks
                async for reply in replies:
                    yield reply
        except TandemError as error:
            await _end(context, error)

    return call


def _checked(request: object) -> object:
    if isinstance(request, DataError):
        raise request
    return request


async def _one_message(requests: AsyncIterator[object], reading: asyncio.Semaphore, *, seconds: float | None) -> object:
    """The message of a unary call. Raises DataError if it is malformed or missing, DeadlineError if none comes."""
    try:
        async with asyncio.timeout(seconds), reading:
            return _checked(await anext(requests))
    except StopAsyncIteration:  # `anext` with a default fails with gRPC's iterators
        raise DataError("the call ended without a message") from None
    except TimeoutError:
        raise DeadlineError(f"the request did not arrive within {seconds:g} s") from None


async def _all_messages(
    requests: AsyncIterator[object], _reading: asyncio.Semaphore, *, seconds: float | None
) -> AsyncIterator[object]:
    async def checked() -> AsyncIterator[object]:
        while True:
            try:
                async with asyncio.timeout(seconds):
                    request = await anext(requests)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineError(f"no request for {seconds:g} s; begin a new stream") from None
            yield _checked(request)

    return checked()


async def _end(context: _Context, error: TandemError) -> NoReturn:
    context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
    text = str(error).encode(errors="backslashreplace")[:_MAX_DETAIL_BYTES].decode(errors="ignore")
    await context.abort(getattr(grpc.StatusCode, error.grpc_code), text)
