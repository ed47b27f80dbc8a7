"""The base class of scorers behind an HTTP endpoint: event loop, connections, concurrent requests, figures."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import Field, PrivateAttr

from tandem.protos.contracts import Score, ScoreItem
from tandem.reward.contracts import Scorer
from tandem.reward.endpoints.http_client import Fault, HttpClient, open_client, read_key, wait_in_queue
from tandem.reward.scheduling.admission_queue import PrioritySemaphore
from tandem.reward.scheduling.cancellation import CLOSING, current_token
from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority

T = TypeVar("T")


class EndpointSession(NamedTuple):
    """What the coroutines of one `judge_batch` share."""

    client: HttpClient
    priority: Priority


class ClosedError(Exception):
    """The portal was closed or the caller's token cancelled before the work was done."""


class ClientPortal:
    """Runs coroutines with one client on the event loop of a thread (anyio's blocking portal), which the first `run`
    starts. Thread-safe.
    """

    def __init__(self, name: str, open_client: Callable[[], AbstractAsyncContextManager[HttpClient]]) -> None:
        self.client: HttpClient | None = None
        """None before the first call. It belongs to the loop: others may only read plain numbers in it."""
        self._name = name
        self._open_client = open_client
        self._lock = threading.Lock()
        self._closed = False
        self._portal: BlockingPortal | None = None
        self._running: set[Future[Any]] = set()
        self._finalizer: Callable[[], object] = lambda: None

    def run(self, work: Callable[[HttpClient], Coroutine[Any, Any, T]]) -> T:
        """Runs the coroutine, which bounds its own waits; blocks the caller.

        Raises ClosedError if the caller's token was cancelled, and so the coroutine, or `close` was called.
        """
        with self._lock:  # so that `close` finds every future, and no work reaches a loop that is ending
            if self._closed:
                raise ClosedError
            self._portal = self._portal or self._start()
            assert self.client is not None, "it was opened by `_start`"
            future: Future[T] = self._portal.start_task_soon(work, self.client)
            self._running.add(future)
        try:
            with current_token().on_cancel(future.cancel):
                return future.result()
        except CancelledError:
            raise ClosedError from None
        finally:
            self._running.discard(future)

    def close(self) -> None:
        """Cancels running coroutines, closes the client and ends the thread. May be called again."""
        with self._lock:
            self._closed = True
        self._finalizer()

    def _start(self) -> BlockingPortal:
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(name=self._name))
            self.client = stack.enter_context(portal.wrap_async_context_manager(self._open_client()))
            stack.callback(_cancel_all, self._lock, self._running)
            # Also before the interpreter exits: anyio would wait for a thread that no longer runs.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)
        return portal


def _cancel_all(lock: threading.Lock, running: set[Future[Any]]) -> None:
    with lock:  # a thread that has begun something may not have added it yet
        for future in list(running):
            future.cancel()


class Endpoint(Scorer):
    """Base class of scorers that ask an HTTP endpoint. Owns limits and connections: build it once and share it."""

    ISOLATION = "remote"
    KIND: ClassVar[str]
    """Name of its thread, and prefix of its figures."""

    api_key_env: str = ""
    """Name of the environment variable that holds the API key, sent as bearer token; empty: none is sent."""
    max_concurrent: Annotated[int, Field(ge=1)] = 16
    """Maximum number of concurrent requests."""
    max_attempts: Annotated[int, Field(ge=1)] = 4
    """Requests that one question or batch may cost: connection errors, 429, 5xx, time-outs and (of a judge, above
    temperature 0) unreadable verdicts are tried again.
    """
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Longest wait for one attempt."""
    _slots: PrioritySemaphore = PrivateAttr()
    _portal: ClientPortal = PrivateAttr()

    def model_post_init(self, context: object, /) -> None:
        key = read_key(self.api_key_env)
        self._slots = PrioritySemaphore(self.max_concurrent)
        self._portal = ClientPortal(
            self.KIND, lambda: open_client(self._url, key, self.max_concurrent, self.timeout_seconds)
        )

    @property
    def _url(self) -> str:
        raise NotImplementedError("every endpoint defines this")

    def judge_batch(self, items: Sequence[ScoreItem], *, priority: Priority = "calls") -> list[Score]:
        """One result per item, in order. Thread-safe; blocks its caller."""
        scores: list[Score] = [CLOSING] * len(items)
        if items:
            with suppress(ClosedError):
                self._portal.run(lambda client: self._judge_all(EndpointSession(client, priority), items, scores))
        return scores

    async def _judge_all(self, session: EndpointSession, items: Sequence[ScoreItem], scores: list[Score]) -> None:
        """Stores each item's result in `scores` once it is known. If the portal closes first, the rest is unchanged."""
        raise NotImplementedError("every endpoint defines this")

    async def _in_slot(self, priority: Priority, ask: Callable[[], Awaitable[T | Fault]]) -> T | Fault:
        """Waits by priority for one of the `max_concurrent` slots and asks."""
        if fault := await wait_in_queue("one of max_concurrent places", self._slots.acquire(priority)):
            return fault
        try:
            return await ask()
        finally:
            self._slots.release()

    def close(self) -> None:
        """Ends running questions. They and all later ones are unscored (`infrastructure`)."""
        self._portal.close()

    def figures(self) -> dict[str, float]:
        client = self._portal.client
        waiting = {f"{self.KIND}_waiting_{priority}": float(self._waiting(priority)) for priority in PRIORITIES}
        return {f"{self.KIND}_requests": 0.0 if client is None else float(client.num_requests), **waiting}

    def _waiting(self, priority: Priority) -> int:
        return self._slots.waiting(priority)
