"""`/metrics` over real sockets: who gets the page, who is refused, and what callers cannot hold up."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tandem.protos.errors import EnvironmentLackError, UnavailableError
from tandem.services.commands.certs import write_certificates
from tandem.services.metrics import server as metrics_server
from tandem.services.metrics.server import MetricsServer
from tandem.services.rpc.certificates import http_context
from tandem.services.rpc.tokens import Role, Tokens, run_token

SECRET = "secret"
TOKENS = Tokens.of_run(SECRET)
HOST = "127.0.0.1"
OFTEN = 40
"""More connections than may wait at once."""


def bearer(role: Role = Role.read) -> dict[str, str]:
    return {"Authorization": f"Bearer {run_token(SECRET, role)}"}


@contextmanager
def serving(page: Callable[[], bytes] = lambda: b"up 1\n", tls: ssl.SSLContext | None = None) -> Iterator[str]:
    with MetricsServer(HOST, 0, page, tokens=TOKENS, tls=tls) as server:
        yield f"http{'s' if tls else ''}://{HOST}:{server.port}/metrics"


@pytest.mark.parametrize("role", Role)
def test_any_role_may_read_the_page(role: Role) -> None:
    with serving() as url:
        reply = httpx.get(url, headers=bearer(role))
    assert (reply.status_code, reply.content) == (200, b"up 1\n")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer x"}, {"Authorization": run_token(SECRET, Role.read)}]
)
def test_without_a_valid_token_the_page_is_not_made(headers: dict[str, str]) -> None:
    made: list[int] = []
    with serving(lambda: b"%d" % len(made.append(1) or made)) as url:  # type: ignore[func-returns-value]
        reply = httpx.get(url, headers=headers)
    assert (reply.status_code, reply.headers["www-authenticate"], made) == (401, "Bearer", [])
    assert b"token" in reply.content


def test_other_paths_and_methods_are_refused() -> None:
    with serving() as url:
        assert httpx.get(f"{url}/x", headers=bearer()).status_code == 404
        assert httpx.post(url, headers=bearer(), content=b"x" * 100).status_code == 405


@pytest.mark.parametrize("text", [b"GET\r\n\r\n", b"\xff\xfe\r\n\r\n", b"GET /metrics HTTP/1.1\r\n" + b"a:b\r\n" * 900])
def test_what_is_no_request_is_refused_or_closed(text: bytes) -> None:
    with serving() as url, socket.create_connection((HOST, httpx.URL(url).port or 0), timeout=10) as one:
        one.sendall(text)
        reply = b""
        with suppress(ConnectionResetError):
            reply = one.recv(100)
        assert reply == b"" or reply.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401"))
        assert httpx.get(url, headers=bearer()).status_code == 200


def test_callers_that_send_nothing_keep_nobody_out() -> None:
    with serving() as url:
        place = HOST, httpx.URL(url).port or 0
        silent = [socket.create_connection(place) for _ in range(OFTEN)]
        assert httpx.get(url, headers=bearer()).status_code == 200
        for one in silent:
            one.settimeout(10)
        assert silent[0].recv(1) == b"", "the oldest was closed"
        for one in silent:
            one.close()


def test_a_caller_that_drips_its_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_READ_SECONDS", 0.3)
    with (
        serving() as url,
        socket.create_connection((HOST, httpx.URL(url).port or 0), timeout=10) as one,
        pytest.raises(OSError),
    ):
        while True:
            one.sendall(b"G")
            time.sleep(0.05)


def test_callers_that_ask_together_get_one_page_and_a_page_that_hangs_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_PAGE_SECONDS", 0.5)
    goes_on, made = threading.Event(), 0

    def page() -> bytes:
        nonlocal made
        made += 1
        assert goes_on.wait(60)
        return b"up 1\n"

    with serving(page) as url:
        assert [httpx.get(url, headers=bearer()).status_code for _ in range(3)] == [503, 503, 503]
        assert made == 1, "no second thread while the first one hangs"
        assert [thread.name for thread in threading.enumerate()].count("metrics-page") == 1
        goes_on.set()
        assert httpx.get(url, headers=bearer()).status_code == 200


def test_figures_that_cannot_be_read_are_503_with_the_reason() -> None:
    def page() -> bytes:
        raise UnavailableError("Redis at here does not answer")

    with serving(page) as url:
        reply = httpx.get(url, headers=bearer())
    assert (reply.status_code, reply.text) == (503, "Redis at here does not answer")


def test_a_port_in_use_is_one_line() -> None:
    with serving() as url, pytest.raises(EnvironmentLackError, match="/metrics: the port is in use"):
        MetricsServer(HOST, httpx.URL(url).port or 0, lambda: b"", tokens=None, tls=None).__enter__()


def test_with_certificates_only_a_client_of_the_same_ca_is_answered(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        write_certificates(folder, [], 30)

    def client(folder: Path | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=ours / "ca.crt")
        if folder is not None:
            context.load_cert_chain(folder / "client.crt", folder / "client.key")
        return context

    with serving(tls=http_context(ours, HOST, client_certificates=True)) as url:
        assert httpx.get(url, headers=bearer(), verify=client(ours)).text == "up 1\n"
        for strange in (client(None), client(other)):
            with pytest.raises(httpx.TransportError):
                httpx.get(url, headers=bearer(), verify=strange)
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http"), headers=bearer())
        assert httpx.get(url, verify=client(ours)).status_code == 401


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    for _ in range(3):
        with serving() as url:
            httpx.get(url, headers=bearer())
    assert threading.active_count() <= before
