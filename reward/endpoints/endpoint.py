"""The base class of scorers behind an HTTP endpoint: connections, concurrent requests, figures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Annotated, ClassVar, NamedTuple, TypeVar

from pydantic import Field, PrivateAttr

from tandem.protos.contracts import Score, ScoreItem
from tandem.reward.contracts import Scorer
from tandem.reward.endpoints.http_client import Fault, HttpClient, open_client, read_key, wait_in_queue
from tandem.reward.endpoints.session_portal import ClosedError, SessionPortal
from tandem.reward.scheduling.admission_queue import PrioritySemaphore
from tandem.reward.scheduling.cancellation import CLOSING
from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority

T = TypeVar("T")


class EndpointSession(NamedTuple):
    """What the coroutines of one `judge_batch` share."""

    client: HttpClient
    priority: Priority


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
    _portal: SessionPortal[HttpClient] = PrivateAttr()

    def model_post_init(self, context: object, /) -> None:
        key = read_key(self.api_key_env)
        self._slots = PrioritySemaphore(self.max_concurrent)
        self._portal = SessionPortal(
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
        """Requests sent since the start, and those that wait now."""
        client = self._portal.session
        waiting = {f"{self.KIND}_waiting_{priority}": float(self._waiting(priority)) for priority in PRIORITIES}
        return {f"{self.KIND}_requests": 0.0 if client is None else float(client.num_requests), **waiting}

    def _waiting(self, priority: Priority) -> int:
        return self._slots.waiting(priority)
