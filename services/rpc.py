"""gRPC for every service: health, reflection, Info, and the error tree mapped to status codes and back, once, here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import common_pb2, common_pb2_grpc
from protos.errors import DeadlineError, EnvironmentLackError, TandemError, UnavailableError, error_class

MAX_MESSAGE_BYTES = 256 << 20
_ERROR_KEY = "tandem-error"
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a second listener
]
INFO_SERVICE = "tandem.v1.InfoService"

Info = Callable[[], common_pb2.InfoReply]
Register = Callable[[grpc.aio.Server], None]


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call whose handler raised a TandemError with that class's status code and name."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        inner = handler.unary_unary

        async def call(
            request: Any, context: Any
        ) -> Any:  # typed as grpc.ServicerContext by the stubs, an aio one in truth
            try:
                return await inner(request, context)
            except TandemError as error:
                context.set_trailing_metadata(((_ERROR_KEY, type(error).__name__),))
                await context.abort(getattr(grpc.StatusCode, error.grpc_code), str(error))

        return grpc.unary_unary_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)


class _InfoServicer(common_pb2_grpc.InfoServiceServicer):
    def __init__(self, info: Info) -> None:
        self._info = info

    async def Info(self, request: common_pb2.InfoRequest, context: grpc.aio.ServicerContext) -> common_pb2.InfoReply:
        return await asyncio.to_thread(self._info)  # it may ask Redis for queue figures


class RpcServer:
    """A listening server. `address` is `host:port` with the port really bound."""

    def __init__(self, server: grpc.aio.Server, address: str, health_servicer: health.aio.HealthServicer) -> None:
        self._server = server
        self._health = health_servicer
        self.address = address

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Turns health to NOT_SERVING, refuses new calls, and cancels running ones after the grace."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)


async def start_server(
    host: str, port: int, *, info: Info, register: Register, service_names: Sequence[str]
) -> RpcServer:
    """Starts a server with the given services besides health, reflection and Info; port 0 picks a free one.

    Raises:
        EnvironmentLackError: the port is in use or the address is not this machine's.
    """
    server = grpc.aio.server(interceptors=[_ErrorInterceptor()], options=_OPTIONS)
    common_pb2_grpc.add_InfoServiceServicer_to_server(_InfoServicer(info), server)
    register(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = [*service_names, INFO_SERVICE]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise EnvironmentLackError(
            f"cannot listen on {host}:{port}: the port is in use or not this machine's; choose another port"
        )
    await server.start()
    for name in ("", *names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return RpcServer(server, f"{host}:{bound}", health_servicer)


class ServerThread:
    """The same server on an event loop of its own, for services whose main thread is not asynchronous."""

    def __init__(self, host: str, port: int, *, info: Info, register: Register, service_names: Sequence[str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpc", daemon=True)
        self._thread.start()
        starting = start_server(host, port, info=info, register=register, service_names=service_names)
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


def connect(address: str) -> grpc.Channel:
    """A channel to `host:port` that connects with the first call."""
    return grpc.insecure_channel(address, options=_OPTIONS)


def connect_async(address: str) -> grpc.aio.Channel:
    """The same for `grpc.aio`."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


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
    return TandemError(f"{code.name}: {detail}")
