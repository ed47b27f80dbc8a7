"""The dashboard on a free port of this machine, and a browser's requests to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from tandem.services.dashboard.app import dashboard
from tandem.services.dashboard.run_source import RunSource
from tandem.services.dashboard.server import Impatient, listen
from tandem.services.rpc.tokens import Role, run_token
from tests.support.waiting import eventually

HEADERS = {"Content-Type": "application/json"}


@contextmanager
def serving(sources: Sequence[RunSource], *, tls: bool = False) -> Iterator[str]:
    """Serves these runs in a thread; yields the page's address."""
    with listen("127.0.0.1", 0) as listening:
        app = dashboard(sources, tls=tls)
        config = uvicorn.Config(app, log_level="warning", lifespan="off", http=Impatient, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            eventually(lambda: server.started)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
            for source in sources:
                source.close()


class Browser:
    """A browser's client: it keeps cookies, and names its origin in every POST."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.http = httpx.Client(base_url=address, timeout=20.0)

    def post(self, path: str, body: object = None, **headers: str) -> httpx.Response:
        sent = HEADERS | {"Origin": self.address} | headers
        return self.http.post(path, content=json.dumps(body or {}), headers={k: v for k, v in sent.items() if v})

    def login(self, secret: str, role: Role = Role.read) -> httpx.Response:
        return self.post("/api/login", {"token": run_token(secret, role)})

    def states(self, key: str, until: Callable[[dict[str, Any]], bool], most: int = 20) -> list[dict[str, Any]]:
        """The states of the stream up to the first that fulfils the condition; fails if the first `most` do not."""
        seen = []
        with self.http.stream("GET", f"/api/runs/{key}/stream") as stream:
            assert stream.status_code == 200, stream.read()
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line.removeprefix("data: ")))
                    if until(seen[-1]):
                        return seen
                    assert len(seen) < most, f"after {most} states: {seen[-1]}"
        raise AssertionError("the stream has ended")
