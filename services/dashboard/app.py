"""The routes of the dashboard: its page, what the page asks for, and the orders that it gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial

from anyio import to_thread
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tandem.protos import control_pb2
from tandem.protos.errors import AccessError, TandemError, UserError
from tandem.services.dashboard import access, charts
from tandem.services.dashboard.files import file_response, files, index
from tandem.services.dashboard.guard import Guard
from tandem.services.dashboard.hub import Watch
from tandem.services.dashboard.run_source import RunSource
from tandem.services.dashboard.server import REQUEST_SECONDS
from tandem.services.rpc.tokens import Role

_MOST_BODY_BYTES = 16 << 10
_PING_SECONDS = 10
_MOST_REPLICAS = 10_000
_MOST_NAME = 100
_MOST_WORDS = 300

Handler = Callable[[Request], Awaitable[Response]]


def dashboard(sources: Sequence[RunSource], names: Collection[str] = (), *, tls: bool = False) -> Starlette:
    """The application that shows these runs. `names`: further host names under which browsers reach it."""
    pages = Pages(sources, tls=tls)
    routes = [
        Route("/", index),
        *(Route(f"/static/{name}", partial(file_response, name)) for name in files() if name != "index.html"),
        Route("/api/login", pages.login, methods=["POST"]),
        Route("/api/logout", pages.logout, methods=["POST"]),
        Route("/api/session", pages.session),
        Route("/api/runs/{key}/stream", pages.stream),
        Route("/api/charts", pages.charts),
        Route("/api/curves", pages.curves),
        Route("/api/runs/{key}/samples", pages.samples),
        Route("/api/runs/{key}/samples/{version:int}/{group}/{number:int}", pages.sample),
        Route("/api/runs/{key}/events", pages.events),
        Route("/api/runs/{key}/jobs", pages.jobs),
        Route("/api/runs/{key}/orders/{order}", pages.order, methods=["POST"]),
    ]
    middleware = [Middleware(Guard, names=access.known_names(names)), Middleware(GZipMiddleware, compresslevel=6)]
    return Starlette(
        routes=routes, middleware=middleware, exception_handlers={TandemError: _refused, HTTPException: _failed}
    )


class Pages:
    """The handlers. Every one but `login` and `session` asks for a session of the run that it is about."""

    def __init__(self, sources: Sequence[RunSource], *, tls: bool) -> None:
        self._watches = {source.key: Watch(source) for source in sources}
        self._limit = access.LoginLimit()
        self._tls = tls

    # ---- sessions ----

    async def login(self, request: Request) -> Response:
        """Opens a session of every run that accepts the token."""
        address = request.client.host if request.client else ""
        if seconds := self._limit.seconds_to_wait(address):
            text = f"too many failed logins; wait {seconds:.0f} s"
            return JSONResponse({"error": text}, 429, {"Retry-After": str(int(seconds) + 1)})
        token = str((await _body(request)).get("token", "")).strip()
        response = JSONResponse({})
        opened = False
        for key, watch in self._watches.items():
            secret = await to_thread.run_sync(watch.source.secret)
            role = access.role_of_token(secret, token) if secret else None
            if role is not None:
                opened = True
                value = access.new_session(secret, key, role)
                self._set_cookie(response, key, value, access.SESSION_SECONDS)
        if opened:
            return response
        self._limit.failed(address)
        return JSONResponse({"error": "no run here accepts this token; `tandem token RUN --role read` prints one"}, 401)

    async def logout(self, request: Request) -> Response:
        response = JSONResponse({})
        for key in self._watches:
            self._set_cookie(response, key, "", 0)
        return response

    async def session(self, request: Request) -> Response:
        """The runs that the caller may see, and their roles."""
        roles = {key: await self._role(request, key) for key in self._watches}
        seen = [
            {"key": key, "name": self._watches[key].source.name, "folder": str(self._watches[key].source.folder)}
            | {"role": role}
            for key, role in roles.items()
            if role is not None
        ]
        return JSONResponse({"runs": seen})

    def _set_cookie(self, response: Response, key: str, value: str, seconds: int) -> None:
        name = access.cookie_name(key)
        response.set_cookie(name, value, max_age=seconds, httponly=True, samesite="strict", secure=self._tls)

    async def _role(self, request: Request, key: str) -> Role | None:
        cookie = request.cookies.get(access.cookie_name(key), "")
        if not cookie:
            return None
        secret = await to_thread.run_sync(self._watches[key].source.secret)
        return access.role_of_session(secret, key, cookie) if secret else None

    async def _watch(self, request: Request, key: str, needed: Role = Role.read) -> Watch:
        """The run, if the caller's session has the role. Raises HTTPException 401 also for a run that is not here."""
        role = await self._role(request, key) if key in self._watches else None
        if role is None:
            raise HTTPException(401, "log in")
        if not role.includes(needed):
            raise AccessError(f"this session may only look; log in with a token of the role {needed}")
        return self._watches[key]

    # ---- what the page shows ----

    async def stream(self, request: Request) -> Response:
        """The state of a run, as server-sent events."""
        watch = await self._watch(request, request.path_params["key"])
        return EventSourceResponse(({"data": state} async for state in watch.states()), ping=_PING_SECONDS)

    async def charts(self, request: Request) -> Response:
        """The charts of some runs, as Bokeh's document."""
        runs = [(await self._watch(request, key)).source for key in request.query_params.getlist("run")]
        theme = "dark_minimal" if request.query_params.get("theme") == "dark" else None
        return JSONResponse(await to_thread.run_sync(charts.document, [run.figures for run in runs], theme))

    async def curves(self, request: Request) -> Response:
        """The data of the charts."""
        runs = [(await self._watch(request, key)).source for key in request.query_params.getlist("run")]
        return JSONResponse(await to_thread.run_sync(charts.data, [run.figures for run in runs]))

    async def samples(self, request: Request) -> Response:
        """A page of the answers that the run trained on, by full-text search."""
        source, asked = (await self._watch(request, request.path_params["key"])).source, request.query_params
        version, offset = _number(asked.get("version", "")), _number(asked.get("offset", "")) or 0
        words, fate = asked.get("words", "")[:_MOST_WORDS], asked.get("fate", "")
        return JSONResponse(await to_thread.run_sync(source.samples.search, words, fate, version, offset))

    async def sample(self, request: Request) -> Response:
        """One answer with its tokens."""
        place = request.path_params
        samples = (await self._watch(request, place["key"])).source.samples
        found = await to_thread.run_sync(samples.answer, place["version"], place["group"], place["number"])
        return JSONResponse(found)

    async def events(self, request: Request) -> Response:
        """What happened in the run, the newest first."""
        source = (await self._watch(request, request.path_params["key"])).source
        return JSONResponse({"events": [event._asdict() for event in source.events.listed]})

    async def jobs(self, request: Request) -> Response:
        """The reward jobs of the run's service."""
        source = (await self._watch(request, request.path_params["key"])).source
        return JSONResponse({"jobs": await to_thread.run_sync(source.jobs)})

    # ---- orders ----

    async def order(self, request: Request) -> Response:
        """Has the controller scale, drain, pause, resume or stop."""
        watch = await self._watch(request, request.path_params["key"], Role.operate)
        method, message = _order(request.path_params["order"], await _body(request))
        await to_thread.run_sync(watch.source.order, Role.operate, method, message)
        watch.look_soon()
        return JSONResponse({})


def _order(order: str, body: Mapping[str, object]) -> tuple[str, object]:
    """The method of ControlService and its request. Raises UserError for an order that is none."""
    name, replicas = body.get("name", ""), body.get("replicas")
    if not isinstance(name, str) or len(name) > _MOST_NAME:
        raise UserError("the name of a sampler is a short text")
    if order == "scale":
        if not isinstance(replicas, int) or isinstance(replicas, bool) or not 0 <= replicas <= _MOST_REPLICAS:
            raise UserError(f"a number of replicas is an integer from 0 to {_MOST_REPLICAS}")
        return "Scale", control_pb2.ScaleRequest(service=name, replicas=replicas)
    if order == "drain":
        return "Drain", control_pb2.DrainSamplerRequest(name=name)
    if order == "pause":
        return "Pause", control_pb2.PauseSamplersRequest(name=name)
    if order == "resume":
        return "Resume", control_pb2.ResumeSamplersRequest(name=name)
    if order == "stop":
        return "Stop", control_pb2.StopRequest()
    raise UserError("an order is scale, drain, pause, resume or stop")


def _number(text: str) -> int | None:
    """A number of a query, None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


async def _body(request: Request) -> Mapping[str, object]:
    """The JSON object of a small request. Raises UserError for anything else."""
    received = b""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            async for part in request.stream():
                received += part
                if len(received) > _MOST_BODY_BYTES:
                    raise UserError("the request is too large")
    except TimeoutError:
        raise HTTPException(408, "the request does not arrive") from None
    try:
        found = json.loads(received)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError("the request is no JSON object")
    return found


async def _refused(request: Request, error: Exception) -> Response:
    """The reply to an order that a service refuses: its one line."""
    if isinstance(error, AccessError):
        status = 403
    else:
        status = 400 if isinstance(error, UserError) else 503
    return JSONResponse({"error": str(error)}, status)


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)
