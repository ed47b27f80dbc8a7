"""What holds for every request to the dashboard: known host names, orders only from the page itself, strict headers."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.services.dashboard.access import is_known_host, is_own_origin

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'{nonce}; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy. Only the page itself has a nonce: Bokeh makes style elements (static/curves.js)."""
HEADERS = {
    "Content-Security-Policy": POLICY.format(nonce=""),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_READS = ("GET", "HEAD")


class Guard:
    """ASGI middleware. `names`: the host names under which browsers may ask."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        fault = self._fault(scope["method"], Headers(scope=scope))
        answer = self._app if fault is None else JSONResponse({"error": fault[1]}, fault[0])
        await answer(scope, receive, send_with_headers)

    def _fault(self, method: str, headers: Headers) -> tuple[int, str] | None:
        """Status and reason of a refusal."""
        host = headers.get("host", "")
        if not is_known_host(host, self._names):
            return 421, "this server has another name; start it with --name to allow this one"
        if method in _READS:
            return None
        if not is_own_origin(headers.get("origin", ""), host):
            return 403, "the request does not come from the page of this server"
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return 415, "the request is not JSON"
        return None
