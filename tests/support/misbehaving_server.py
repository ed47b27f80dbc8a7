"""A real HTTP server on loopback in the test's process that answers correctly, late, wrongly or never."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG_SECONDS = 60.0


@dataclass(frozen=True)
class Asked:
    """One received request. `number` counts from 0 in order of arrival."""

    number: int
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """The server's reply to a request. `body` is sent as JSON unless it is bytes already."""

    body: Any = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    hangs: bool = False
    """Does not answer until the server is closed."""
    trickles: bool = False
    """Sends a byte at intervals, without end."""
    cut: bool = False
    """Promises more bytes than it sends, and closes the connection."""


Behaviour = Callable[[Asked], Answer] | Answer


class MisbehavingServer:
    """Serves on a free port of 127.0.0.1 while the `with` block runs."""

    def __init__(self, answer: Behaviour) -> None:
        self.answer = answer if callable(answer) else lambda asked: answer
        self.asked: list[Asked] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self.ended = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else the kernel holds a body back for 40 ms after its headers

            def do_POST(self) -> None:
                owner._serve(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # else the kernel drops some of many connections, which are tried again after 1 s

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda request, address: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> MisbehavingServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        data = handler.rfile.read(int(handler.headers["Content-Length"]))
        with self._lock:
            headers = {name.lower(): value for name, value in handler.headers.items()}
            asked = Asked(len(self.asked), handler.path, headers, json.loads(data))
            self.asked.append(asked)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self._send(handler, self.answer(asked))
        finally:
            with self._lock:
                self._at_once -= 1

    def _send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        if answer.hangs:
            self.ended.wait(HANG_SECONDS)
            handler.close_connection = True
            return
        data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data) + (1000 if answer.cut or answer.trickles else 0)))
        handler.end_headers()
        handler.wfile.write(data)
        handler.wfile.flush()
        while answer.trickles and not self.ended.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()
        if answer.cut:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def chat(content: str | None, prompt_tokens: int = 10, completion_tokens: int = 5, **more: Any) -> Answer:
    """A chat completion with this text; `more` are fields of the choice."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop", **more}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return Answer({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage})
