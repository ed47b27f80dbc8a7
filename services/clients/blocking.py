"""The client of the reward service for programs without an event loop."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Self, TypeVar

from anyio.from_thread import start_blocking_portal

from tandem.protos.contracts import Score, ScoreItem, Unscored
from tandem.services.clients.asynchronous import DAY_SECONDS, AsyncRewardClient
from tandem.services.clients.item_reader import Items
from tandem.services.clients.messages import Job, JobEvent, Scorers

T = TypeVar("T")


class RewardClient:
    """The client of the reward service. Every method waits for its result; arguments and errors are those of
    `AsyncRewardClient`.

    A context manager that several threads may use. Its connections live on an event loop in a thread of its own.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = "",
        *,
        timeout_seconds: float = 120.0,
        retry_seconds: float = 60.0,
        stall_seconds: float = 1800.0,
    ) -> None:
        self._client = AsyncRewardClient(
            addresses, timeout_seconds=timeout_seconds, retry_seconds=retry_seconds, stall_seconds=stall_seconds
        )
        self.addresses = self._client.addresses
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            stack.callback(self._portal.call, self._portal.stop, True)
            stack.callback(self._portal.call, self._client.close)
            # Also before the interpreter exits: anyio would wait for a thread that no longer runs.
            self._finalizer = weakref.finalize(self, stack.pop_all().close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections. Calls in progress are cancelled, jobs go on."""
        self._finalizer()

    def score(
        self, items: Sequence[ScoreItem | Unscored], rubric: str = "", *, timeout_seconds: float | None = None
    ) -> list[Score]:
        """See `AsyncRewardClient.score`."""
        return self._run(self._client.score(items, rubric, timeout_seconds=timeout_seconds))

    def score_stream(self, items: Items, rubric: str = "") -> Iterator[Score]:
        """See `AsyncRewardClient.score_stream`. The items are read in another thread."""
        for scores in self._iterate(self._client.score_batches(items, rubric)):
            yield from scores

    def submit(
        self,
        items: Items,
        rubric: str = "",
        *,
        key: str = "",
        name: str = "",
        priority: int = 0,
        on_progress: Callable[[Job], None] = lambda job: None,
        on_fault: Callable[[int, Unscored], None] = lambda index, fault: None,
    ) -> Job:
        """See `AsyncRewardClient.submit`. Items are read, `on_progress` and `on_fault` called, in other threads."""
        return self._run(
            self._client.submit(
                items, rubric, key=key, name=name, priority=priority, on_progress=on_progress, on_fault=on_fault
            )
        )

    def get(self, job_id: str) -> Job:
        """See `AsyncRewardClient.get`."""
        return self._run(self._client.get(job_id))

    def watch(
        self,
        job_id: str,
        *,
        with_results: bool = False,
        after_cursor: int = 0,
        timeout_seconds: float = DAY_SECONDS,
    ) -> Iterator[JobEvent]:
        """See `AsyncRewardClient.watch`."""
        return self._iterate(
            self._client.watch(
                job_id, with_results=with_results, after_cursor=after_cursor, timeout_seconds=timeout_seconds
            )
        )

    def results(self, job_id: str, *, timeout_seconds: float = DAY_SECONDS) -> Iterator[tuple[int, Score]]:
        """See `AsyncRewardClient.results`."""
        for event in self.watch(job_id, with_results=True, timeout_seconds=timeout_seconds):
            yield from enumerate(event.results, start=event.first_item)

    def wait(self, job_id: str, *, timeout_seconds: float = DAY_SECONDS) -> Job:
        """See `AsyncRewardClient.wait`."""
        return self._run(self._client.wait(job_id, timeout_seconds=timeout_seconds))

    def cancel(self, job_id: str) -> Job:
        """See `AsyncRewardClient.cancel`."""
        return self._run(self._client.cancel(job_id))

    def delete(self, job_id: str) -> Job:
        """See `AsyncRewardClient.delete`."""
        return self._run(self._client.delete(job_id))

    def jobs(self, limit: int = 100) -> list[Job]:
        """See `AsyncRewardClient.jobs`."""
        return self._run(self._client.jobs(limit))

    def scorers(self) -> Scorers:
        """See `AsyncRewardClient.scorers`."""
        return self._run(self._client.scorers())

    def _run(self, work: Coroutine[object, object, T]) -> T:
        """Waits for the result. Every call inside has a deadline."""

        async def run() -> T:
            return await work

        future = self._portal.start_task_soon(run)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, generator: AsyncGenerator[T]) -> Iterator[T]:
        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield self._run(anext(generator))
        finally:
            self._run(generator.aclose())
