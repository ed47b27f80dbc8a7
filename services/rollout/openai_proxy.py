"""OpenAI's API for the agents of one sampler, on a port of this machine: `/sessions/<id>/v1/chat/completions`.

A session is an agent's run. Its key is random and known to that agent alone. A session that has ended is unknown, as
are those of other samplers and runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tandem.protos.contracts import JsonObject
from tandem.rollout.environments.agent_calls import ChatAnswer, ChatCall, RefusedCallError, read_call
from tandem.rollout.environments.agent_session import AgentSession
from tandem.rollout.environments.agent_tokens import read_token_call, token_response

Answer = TypeVar("Answer")
_HOST = "127.0.0.1"
_MODEL = "policy"
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
        path = "/sessions/{session}/v1"
        self.app = Starlette(
            routes=[
                Route(f"{path}/chat/completions", self._chat_completions, methods=["POST"]),
                Route("/sessions/{session}/inference/v1/generate", self._generate, methods=["POST"]),
                Route(f"{path}/models", self._models, methods=["GET"]),
                Route("/{path:path}", self._unknown_path, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
            ],
            exception_handlers={RefusedCallError: _refusal, ClientDisconnect: _client_closed},
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serves on a free port; yields the address."""
        with socket.create_server((_HOST, 0)) as listening:
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

    async def _chat_completions(self, request: Request) -> Response:
        self._session(request)  # no body of an unknown caller is read
        call = read_call(await _json_body(request))
        answering = self._session(request).answering(call)  # it may have ended meanwhile
        return _completion(request.path_params["session"], call, await _result(request, answering))

    async def _generate(self, request: Request) -> Response:
        self._session(request)
        call = read_token_call(await _json_body(request))
        answering = self._session(request).answering_tokens(call)
        return JSONResponse(token_response(request.path_params["session"], await _result(request, answering)))

    async def _models(self, request: Request) -> Response:
        session = self._session(request)
        return JSONResponse({"object": "list", "data": [{**_model(), "root": session.model_path}]})

    async def _unknown_path(self, request: Request) -> Response:
        offered = "POST v1/chat/completions, POST inference/v1/generate and GET v1/models below /sessions/<id>"
        raise RefusedCallError(
            f"{request.method} {request.url.path:.200} is not served; there are {offered}", status=404
        )

    def _session(self, request: Request) -> AgentSession:
        session = self._sessions.get(request.path_params["session"])
        if session is None:
            raise _unknown_session()
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), session.api_key.encode()):
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


def _unknown_session() -> RefusedCallError:
    told = "this sampler has no such session: it has ended, or is one of another run; use the `base_url` of `run`"
    return RefusedCallError(told, status=404, code="session_not_found")


async def _refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedCallError), "the handler of this class"
    return JSONResponse(error.body, error.status)


async def _client_closed(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


async def _json_body(request: Request) -> object:
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
    return value


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _model() -> JsonObject:
    return {"id": _MODEL, "object": "model", "created": 0, "owned_by": "tandem"}


def _completion(session: str, call: ChatCall, answer: ChatAnswer) -> Response:
    message = dict(answer.message)
    if message.get("tool_calls"):
        message["content"] = message["content"] or None
    num_prompt, num_sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}
    common = {"id": f"chatcmpl-{session}-{answer.turn}", "created": int(time.time()), "model": call.model or _MODEL}
    if not call.stream:
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        return JSONResponse({**common, "object": "chat.completion", "choices": [choice], "usage": usage})
    return Response(
        _events(common, message, answer, usage if call.stream_usage else None), media_type="text/event-stream"
    )


def _events(common: JsonObject, message: JsonObject, answer: ChatAnswer, usage: JsonObject | None) -> str:
    """The answer as server-sent events: the whole message, why it ended, and the usage if it is wanted."""
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    choices: list[list[JsonObject]] = [
        [{"index": 0, "delta": delta, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}],
    ]
    chunks = [{**common, "object": "chat.completion.chunk", "choices": choice} for choice in choices]
    if usage is not None:
        chunks.append({**common, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
