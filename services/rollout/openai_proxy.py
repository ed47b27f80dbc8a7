"""OpenAI's and Anthropic's APIs for the agents of one sampler, on a port of this machine: `/sessions/<id>/v1`.

A session is an agent's run. Its key is random and known to that agent alone. A session that has ended is unknown, as
are those of other samplers and runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.protos.contracts import JsonObject
from tandem.rollout.environments.agent_calls import RefusedCallError
from tandem.rollout.environments.agent_session import AgentSession
from tandem.rollout.environments.agent_tokens import read_token_call, token_response
from tandem.rollout.environments.api_forms import chat_completions, messages, responses
from tandem.rollout.environments.api_forms.form import MODEL, ApiForm, openai_error

Answer = TypeVar("Answer")
_FORMS = (chat_completions.FORM, responses.FORM, messages.FORM)
_HOST = "127.0.0.1"
_MAX_BODY_BYTES = 16 << 20
_BODY_SECONDS = 10.0
_IDLE_CONNECTION_SECONDS = 60  # longer than clients keep theirs, so that none sends to a connection that is closing
_STOP_SECONDS = 1
_CLIENT_CLOSED = 499  # nginx's status; nobody reads it


class _Server(uvicorn.Server):
    """Leaves signals to the sampler, in whose event loop it runs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class OpenAIProxy:
    """Serves `sessions`, by id, which may change meanwhile."""

    def __init__(self, sessions: Mapping[str, AgentSession]) -> None:
        self._sessions = sessions
        session = "/sessions/{session}/v1"
        forms = [(f"{session}/{path}", form) for form in _FORMS for path in form.paths]
        self.app = Starlette(
            routes=[
                *(Route(path, partial(self._call, form), methods=["POST"]) for path, form in forms),
                Route("/sessions/{session}/inference/v1/generate", self._generate, methods=["POST"]),
                Route(f"{session}/models", self._models, methods=["GET"]),
                Route("/{path:path}", self._unknown_path, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
            ],
            exception_handlers={RefusedCallError: _refusal, ClientDisconnect: _client_closed},
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serves on a free port; yields the address."""
        with socket.create_server((_HOST, 0)) as listening:
            # Else an answer waits 40 ms for the acknowledgement of its head; asyncio sets it for other sockets only.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            config = uvicorn.Config(
                self.app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=_IDLE_CONNECTION_SECONDS,
                timeout_graceful_shutdown=_STOP_SECONDS,
            )
            server = _Server(config)
            serving = asyncio.create_task(server.serve([listening]))
            try:
                yield f"http://{_HOST}:{listening.getsockname()[1]}"
            finally:
                server.should_exit = True
                await serving

    async def _call(self, form: ApiForm, request: Request) -> Response:
        try:
            return await self._answer(form, request)
        except RefusedCallError as error:
            return _json(form.error(error), error.status)

    async def _answer(self, form: ApiForm, request: Request) -> Response:
        session = self._session(request)  # no body of an unknown caller is read
        name = request.path_params["session"]
        with _noted(session):
            body = await _json_body(request)
            call = form.read(body, lambda answer_name: session.said(answer_name.removeprefix(f"{name}-")))
            answering = self._session(request).answering(call)  # it may have ended meanwhile
            answer = await _result(request, answering)
        answer_name = f"{name}-{answer.turn}"
        if body.get("stream") is True:
            return Response(form.events(body, answer, answer_name), media_type="text/event-stream")
        return _json(form.answer(body, answer, answer_name))

    async def _generate(self, request: Request) -> Response:
        with _noted(self._session(request)):
            call = read_token_call(await _json_body(request))
            answering = self._session(request).answering_tokens(call)
            return _json(token_response(request.path_params["session"], await _result(request, answering)))

    async def _models(self, request: Request) -> Response:
        session = self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tandem", "root": session.model_path}
        return _json({"object": "list", "data": [model]})

    async def _unknown_path(self, request: Request) -> Response:
        paths = [*(f"v1/{path}" for form in _FORMS for path in form.paths), "inference/v1/generate"]
        calls = ", ".join(f"POST {path}" for path in paths)
        told = f"{request.method} {request.url.path:.200} is not served; below /sessions/<id> there are {calls}"
        raise RefusedCallError(f"{told} and GET v1/models", status=404)

    def _session(self, request: Request) -> AgentSession:
        session = self._sessions.get(request.path_params["session"])
        if session is None:
            raise _unknown_session()
        if not hmac.compare_digest(_key(request).encode(), session.api_key.encode()):
            told = "the API key is not that of this session; use the `api_key` that `run` was called with"
            raise RefusedCallError(told, status=401, code="invalid_api_key")
        return session


async def _result(request: Request, answering: asyncio.Task[Answer]) -> Answer:
    """The answer to a call. Raises RefusedCallError if there is none, ClientDisconnect if nobody waits for it."""
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect  # the turn is not recorded
        if answering.cancelled():
            raise _unknown_session()
        return answering.result()
    finally:
        gone.cancel()
        answering.cancel()


@contextlib.contextmanager
def _noted(session: AgentSession) -> Iterator[None]:
    """Tells the session of a call that is refused."""
    try:
        yield
    except RefusedCallError as error:
        session.note_refusal(error)
        raise


def _key(request: Request) -> str:
    """As Anthropic's clients or as OpenAI's send it."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (key.strip() if scheme.lower() == "bearer" else "")


def _unknown_session() -> RefusedCallError:
    told = "this sampler has no such session: it has ended, or is one of another run; use the `base_url` of `run`"
    return RefusedCallError(told, status=404, code="session_not_found")


async def _refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedCallError), "the handler of this class"
    return _json(openai_error(error), error.status)


async def _client_closed(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


def _json(value: JsonObject, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")  # it may repeat NaN of the request


async def _json_body(request: Request) -> JsonObject:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > _MAX_BODY_BYTES:
                    raise RefusedCallError(f"the request has more than {_MAX_BODY_BYTES >> 20} MiB", status=413)
        value: object = json.loads(bytes(body))
    except TimeoutError:
        raise RefusedCallError("the request did not arrive in time", status=408) from None
    except (ValueError, RecursionError) as error:
        raise RefusedCallError(f"the request is not JSON: {error}"[:200]) from None
    if not isinstance(value, dict):
        raise RefusedCallError("the request is no JSON object")
    return value


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
