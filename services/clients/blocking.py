"""The client of the reward service for programs without an event loop."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import wraps
from os import PathLike
from typing import Concatenate, ParamSpec, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from tandem.protos.contracts import Score
from tandem.protos.errors import UserError
from tandem.services.clients.asynchronous import DAY_SECONDS, AsyncRewardClient
from tandem.services.clients.item_reader import Items

T = TypeVar("T")
P = ParamSpec("P")


def _waiting(
    method: Callable[Concatenate[AsyncRewardClient, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[RewardClient, P], T]:
    """The method with the same arguments that waits for the result of this one."""

    @wraps(method)
    def call(self: RewardClient, /, *arguments: P.args, **options: P.kwargs) -> T:
        return self._run(method(self._client, *arguments, **options))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncRewardClient, P], AsyncGenerator[T]],
) -> Callable[Concatenate[RewardClient, P], Iterator[T]]:
    """The method with the same arguments that yields what this one yields."""

    @wraps(method)
    def call(self: RewardClient, /, *arguments: P.args, **options: P.kwargs) -> Iterator[T]:
        generator = method(self._client, *arguments, **options)
        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield self._run(anext(generator))
        finally:
            self._run(generator.aclose())

    return call


class RewardClient:
    """The client of the reward service. Every method waits for its result; arguments and errors are those of
    `AsyncRewardClient`.

    A context manager that several threads may use. Its connections live on an event loop in a thread of its own. Items
    are read, `on_progress` and `on_fault` called, in other threads.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = "",
        *,
        timeout_seconds: float = 120.0,
        retry_seconds: float = 60.0,
        stall_seconds: float = 1800.0,
        token: str = "",
        certificates: str | PathLike[str] = "",
    ) -> None:
        self._client = AsyncRewardClient(
            addresses,
            timeout_seconds=timeout_seconds,
            retry_seconds=retry_seconds,
            stall_seconds=stall_seconds,
            token=token,
            certificates=certificates,
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

    score = _waiting(AsyncRewardClient.score)
    submit = _waiting(AsyncRewardClient.submit)
    get = _waiting(AsyncRewardClient.get)
    wait = _waiting(AsyncRewardClient.wait)
    cancel = _waiting(AsyncRewardClient.cancel)
    delete = _waiting(AsyncRewardClient.delete)
    jobs = _waiting(AsyncRewardClient.jobs)
    scorers = _waiting(AsyncRewardClient.scorers)
    watch = _iterating(AsyncRewardClient.watch)
    _score_batches = _iterating(AsyncRewardClient.score_batches)

    # The event loop is asked once for the scores of a reply, not for each score.

    def score_stream(self, items: Items, rubric: str = "") -> Iterator[Score]:
        """See `AsyncRewardClient.score_stream`."""
        for scores in self._score_batches(items, rubric):
            yield from scores

    def results(self, job_id: str, *, timeout_seconds: float = DAY_SECONDS) -> Iterator[tuple[int, Score]]:
        """See `AsyncRewardClient.results`."""
        for event in self.watch(job_id, with_results=True, timeout_seconds=timeout_seconds):
            yield from enumerate(event.results, start=event.first_item)

    def _run(self, work: Coroutine[object, object, T]) -> T:
        """Waits for the result. Every call inside has a deadline. Raises UserError if the client is closed."""
        if not self._finalizer.alive:
            work.close()
            raise UserError("this client is closed; make another one")

        async def run() -> T:
            return await work

        future = self._portal.start_task_soon(run)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
