"""The files of the page, compressed once: its own, and Bokeh's library as the package ships it."""

from __future__ import annotations

import gzip
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from pathlib import Path

import bokeh
from starlette.requests import Request
from starlette.responses import Response

from tandem.services.dashboard.guard import POLICY

BOKEH = "bokeh.min.js"
_NONCE = b"{{ nonce }}"  # in index.html
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class PageFile:
    text: bytes
    compressed: bytes
    media_type: str
    etag: str


@cache
def files() -> Mapping[str, PageFile]:
    """By name."""
    own = {entry.name: entry.read_bytes() for entry in resources(__package__).joinpath("static").iterdir()}
    library = Path(bokeh.__file__).parent / "server" / "static" / "js" / BOKEH
    return {name: _packed(name, text) for name, text in (own | {BOKEH: library.read_bytes()}).items()}


def _packed(name: str, text: bytes) -> PageFile:
    digest = hashlib.sha256(text).hexdigest()[:32]
    return PageFile(text, gzip.compress(text, 9, mtime=0), _TYPES[Path(name).suffix], f'"{digest}"')


async def file_response(name: str, request: Request) -> Response:
    """The file, or 304 if the browser has it."""
    file = files()[name]
    headers = {"ETag": file.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if request.headers.get("if-none-match", "").removeprefix("W/") == file.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(file.compressed, headers=headers, media_type=file.media_type)
    return Response(file.text, headers=headers, media_type=file.media_type)


async def index(request: Request) -> Response:
    """The page, with a nonce of its own for the style elements that Bokeh makes."""
    nonce = secrets.token_urlsafe(16)
    text = files()["index.html"].text.replace(_NONCE, nonce.encode())
    headers = {"Content-Security-Policy": POLICY.format(nonce=f" 'nonce-{nonce}'")}
    return Response(text, headers=headers, media_type="text/html")
