"""gRPC for every service: health, reflection, Info, and the error tree mapped to status codes and back, once, here."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import socket
import threading
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from protos import common_pb2, common_pb2_grpc
from protos.errors import (
    DataError,
    DeadlineError,
    EnvironmentLackError,
    SizeError,
    TandemError,
    UnavailableError,
    error_class,
)
from services.replicas import named_addresses, target_of

MAX_MESSAGE_BYTES = 256 << 20
MAX_CALLS = 256
"""Under way at one server. Each may hold a message that nothing else has counted yet: of the largest, 16 MiB, so many take 4 GiB."""
_ERROR_KEY = "tandem-error"
_MAX_DETAIL_BYTES = 4000  # a status travels in headers, for which clients accept 8 KiB
_TOO_LARGE = re.compile(r"larger than max(?: \((\d+) vs\. (\d+)\))?")  # in gRPC's words; no sizes if it was compressed
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{"service": "tandem.v1.RewardService"}],
            # Every call may be repeated: scoring changes nothing, jobs are named by their keys. About 2 s in all.
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
    ("grpc.per_rpc_retry_buffer_size", 32 << 20),  # what does not fit is not repeated; gRPC's default is 256 KiB
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
]
INFO_SERVICE = "tandem.v1.InfoService"

Info = Callable[[], common_pb2.InfoReply]
Register = Callable[[grpc.aio.Server], None]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class Intake:
    """What a server takes from its callers."""

    max_request_bytes: int = MAX_MESSAGE_BYTES
    """Of one message; a larger one ends its call before it is read."""
    max_calls: int = MAX_CALLS
    """Calls under way at a time, those of health, reflection and Info not among them: one more is UNAVAILABLE, for clients to try again."""
    readers: Mapping[str, Callable[[bytes], Any]] = field(default_factory=dict)
    """By the path of a method: what else to read bytes with that are no request of it. Raises DecodeError."""


USUAL_INTAKE = Intake()


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands where a request would, whose bytes are none."""

    fault: str


class _Door:
    """Where services are registered in place of the server: each of their calls comes in through here.

    A handler that raises a TandemError ends its call with that class's status code and name, whatever kind of call it is. Bytes that
    are no request of the method (a string that is not UTF-8 among them) end as a DataError: gRPC would call that its own failure.
    Past `max_calls` of the counted services a call is refused before its message is read.

    An interceptor would do the same for half as much again as an empty call costs (a coroutine and a queue a call).
    """

    def __init__(self, server: grpc.aio.Server, intake: Intake, counted: Sequence[str]) -> None:
        self._server = server
        self._intake = intake
        self._counted = frozenset(counted)
        self._num_calls = 0
        refuse: Any = self._refuse
        # For any kind of call, since it reads nothing.
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(refuse)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """As a server does it."""
        self._server.add_generic_rpc_handlers([_Entrance(handler, self._wrapped) for handler in handlers])

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


class _Entrance(grpc.GenericRpcHandler):
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
    context.set_trailing_metadata(((_ERROR_KEY, type(error).__name__),))
    text = str(error).encode(errors="backslashreplace")[:_MAX_DETAIL_BYTES].decode(errors="ignore")
    await context.abort(getattr(grpc.StatusCode, error.grpc_code), text)


class _InfoServicer(common_pb2_grpc.InfoServiceServicer):
    def __init__(self, info: Info) -> None:
        self._info = info

    async def Info(self, request: common_pb2.InfoRequest, context: grpc.aio.ServicerContext) -> common_pb2.InfoReply:
        return await asyncio.to_thread(self._info)  # it may ask Redis for queue figures


class RpcServer:
    """A listening server. `address` is `host:port` with the port really bound."""

    def __init__(
        self,
        server: grpc.aio.Server,
        address: str,
        health_servicer: health.aio.HealthServicer,
        on_stop: Callable[[], None],
    ) -> None:
        self._server = server
        self._health = health_servicer
        self._on_stop = on_stop
        self.address = address

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Turns health to NOT_SERVING, refuses new calls, and cancels running ones after the grace."""
        await self._health.enter_graceful_shutdown()
        self._on_stop()
        await self._server.stop(grace_seconds)


async def start_server(
    host: str,
    port: int,
    *,
    info: Info,
    register: Register,
    service_names: Sequence[str],
    on_stop: Callable[[], None] = lambda: None,
    intake: Intake = USUAL_INTAKE,
) -> RpcServer:
    """Starts a server with the given services besides health, reflection and Info; port 0 picks a free one.

    `on_stop` is called on the event loop as the server begins to stop, so that long calls can end in words of their own.

    Raises:
        EnvironmentLackError: the port is in use or the address is not this machine's.
    """
    options = [
        ("grpc.max_receive_message_length", intake.max_request_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),  # a port in use must be an error, not a second listener
    ]
    server = grpc.aio.server(options=options)
    door = cast("grpc.aio.Server", _Door(server, intake, service_names))  # which is all that registering needs of one
    common_pb2_grpc.add_InfoServiceServicer_to_server(_InfoServicer(info), door)
    register(door)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, door)
    names = [*service_names, INFO_SERVICE]
    shown = [*names, health.SERVICE_NAME, reflection.SERVICE_NAME]
    add_reflection: Callable[[Any, Any], None] = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
    add_reflection(reflection.aio.ReflectionServicer(shown), door)
    try:
        bound = server.add_insecure_port(f"{host}:{port}") if _can_listen(host, port) else 0
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise EnvironmentLackError(
            f"cannot listen on {host}:{port}: the port is in use or not this machine's; choose another port"
        )
    await server.start()
    for name in ("", *names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return RpcServer(server, f"{host}:{bound}", health_servicer, on_stop)


def _can_listen(host: str, port: int) -> bool:
    """Asked before gRPC is, which says in a line of its own on standard error that it cannot."""
    try:
        places = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    for family, kind, protocol, _, place in places:
        with suppress(OSError), socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(place)
            return True
    return False


class ServerThread:
    """The same server on an event loop of its own, for services whose main thread is not asynchronous."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        info: Info,
        register: Register,
        service_names: Sequence[str],
        on_stop: Callable[[], None] = lambda: None,
        intake: Intake = USUAL_INTAKE,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpc", daemon=True)
        self._thread.start()
        starting = start_server(
            host,
            port,
            info=info,
            register=register,
            service_names=service_names,
            on_stop=on_stop,
            intake=intake,
        )
        try:
            self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(timeout=10.0)
        except BaseException:
            self._end_loop()
            raise
        self.address = self._server.address

    def stop(self, grace_seconds: float = 1.0) -> None:
        """Stops the server and its thread."""
        stopping = asyncio.run_coroutine_threadsafe(self._server.stop(grace_seconds), self._loop)
        stopping.result(timeout=grace_seconds + 5.0)
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)


def connect(addresses: str) -> grpc.Channel:
    """A channel to `host:port` that connects with the first call; of several, with commas between them, the calls go round.

    Raises:
        UserError: an address is none, or there are several and one of them is not known to this machine.
    """
    return grpc.insecure_channel(target_of(named_addresses(addresses)), options=_CLIENT_OPTIONS)


def connect_async(addresses: str) -> grpc.aio.Channel:
    """The same for `grpc.aio`."""
    return connect_target(target_of(named_addresses(addresses)))


def connect_target(target: str) -> grpc.aio.Channel:
    """The same for what `services.replicas.target_of` made of addresses."""
    return grpc.aio.insecure_channel(target, options=_CLIENT_OPTIONS)


@contextmanager
def translated() -> Iterator[None]:
    """Raises the TandemError that the other side raised, in place of grpc's own error."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def from_rpc_error(error: grpc.RpcError) -> TandemError:
    """The TandemError a failed call stands for: the class the server named, else one by status code."""
    detail = error.details() or "no detail"
    metadata = cast("Iterable[tuple[str, str]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == _ERROR_KEY:
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
