"""The reward service's client for programs with an event loop. `tandem.services.clients` has it beside the one for all
others.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self

import grpc

from tandem.protos import reward_pb2, reward_pb2_grpc
from tandem.protos.contracts import Score, ScoreItem, Unscored
from tandem.protos.errors import TandemError, UnavailableError
from tandem.services.addresses import named_addresses, target_of
from tandem.services.clients.item_reader import ItemReader, Items
from tandem.services.clients.messages import (
    Job,
    JobEvent,
    Limits,
    Packed,
    Scorers,
    as_text,
    cut,
    groups_together,
    job_of,
    pack,
    scorers_of,
)
from tandem.services.clients.streams import Patience, ScoreConversation, Stub, Submission, scores_of, watch_job
from tandem.services.rpc.client import connect_target, from_rpc_error

DAY_SECONDS = 86_400.0
CHUNK_ITEMS = 256
"""Items aimed at in one chunk of a job: the unit that is stored, leased and scored."""
CHUNK_BYTES = 1 << 20
REQUEST_ITEMS = 128
"""Items aimed at in one request to score at once."""
REQUESTS_IN_FLIGHT = 4
_LINGER_SECONDS = 0.02  # how long a stream's batch waits for more items
_SHORT_SECONDS = 10.0  # deadline of calls that only ask
_NO_STALL = float("inf")


class AsyncRewardClient:
    """Everything the reward service does, for `async` programs. An async context manager; used on one event loop.

    Args:
        addresses: host:port, several with commas or as a list: calls go round among them. Default: those of
            TANDEM_REWARD_ADDRESS, else 127.0.0.1:50051.
        timeout_seconds: longest time one request of `score` or `score_stream` may take.
        retry_seconds: how long streams (submission, watch, `score_stream`) look for a service that has gone.
        stall_seconds: how long a submission may stand still while the service answers, e.g. because too much waits to
            be scored.

    Raises:
        UserError: an address is not host:port.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = "",
        *,
        timeout_seconds: float = 120.0,
        retry_seconds: float = 60.0,
        stall_seconds: float = 1800.0,
    ) -> None:
        self.addresses = named_addresses(addresses)
        self._timeout = timeout_seconds
        self._retry_seconds = retry_seconds
        self._stall_seconds = stall_seconds
        self._channel: grpc.aio.Channel | None = None
        self._known: Scorers | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connections; what is under way is cancelled, jobs go on."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def score(
        self, items: Sequence[ScoreItem | Unscored], rubric: str = "", *, timeout_seconds: float | None = None
    ) -> list[Score]:
        """One result an item, in order. Long lists travel as several requests; items of one group always in the same.

        Args:
            items: an `Unscored` in an item's place is returned as it is.
            rubric: TOML; empty: what the service was started with.
            timeout_seconds: of each request; default: the client's.

        Raises:
            DataError: a group is larger than a request may be.
            ScorerError: the rubric cannot be used.
            TandemError: the service cannot be reached, is late, or failed.
        """
        limits = (await self._limits(REQUEST_ITEMS, CHUNK_BYTES)).beside(rubric)
        packed = [pack(index, item, limits) for index, item in enumerate(items)]
        results: list[Score | None] = [item.fault for item in packed]
        sendable = [item for item in packed if item.fault is None]
        gate = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

        async def ask(batch: list[Packed]) -> None:
            request = reward_pb2.ScoreRequest(items=[item.message for item in batch], rubric=rubric)
            async with gate:
                reply = await self._call("Score", request, timeout_seconds or self._timeout)
            for item, score in zip(batch, scores_of(batch, reply), strict=True):
                results[item.index] = score

        asking = [asyncio.ensure_future(ask(batch)) for batch in cut(groups_together(sendable), limits)]
        try:
            await asyncio.gather(*asking)
        finally:
            for one in asking:
                one.cancel()
        return [result for result in results if result is not None]

    async def score_stream(self, items: Items, rubric: str = "") -> AsyncGenerator[Score]:
        """The scores of items that come one after another, in their order and soon after they have come.

        The items of a group must follow one another. Raises as `score`, and what `items` raises.
        """
        async for scores in self.score_batches(items, rubric):
            for score in scores:
                yield score

    async def score_batches(self, items: Items, rubric: str = "") -> AsyncGenerator[list[Score]]:
        """The same, as many at a time as came together."""
        limits = (await self._limits(REQUEST_ITEMS, CHUNK_BYTES)).beside(rubric)
        reader = ItemReader(items, limits, linger_seconds=_LINGER_SECONDS)
        patience = Patience(self._retry_seconds, self._timeout)
        conversation = ScoreConversation(reader, rubric, self._timeout, patience)
        try:
            async with aclosing(conversation.run(await self._stub())) as batches:
                async for scores in batches:
                    yield scores
        except UnavailableError as error:
            raise self._located(error) from error
        finally:
            conversation.close()

    async def submit(
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
        """Stores the items as a job that is scored whatever happens to this client, and returns it when the last is
        stored.

        A connection that breaks is made again, and the submission goes on with what is not stored yet. The same key
        always means the same job: a submission that was interrupted goes on from the same items where it stopped, one
        that was complete returns its job at once.

        Args:
            items: read once, in another thread if it is a plain iterable; the items of a group must follow one another.
            rubric: TOML; empty: what the service was started with.
            key: at most 200 bytes. Default: of a sequence, a digest of items, rubric and priority; of an iterator, one
                that is never
                used again.
            name: shown in lists of jobs.
            priority: -100 to 100; higher is scored first.
            on_progress: told the job whenever the service tells of it.
            on_fault: told the number of every item that cannot be judged (an `Unscored` in its place, a field that is
                not text, too
                many bytes), and why; it is stored in its place, and its result will be `invalid_input`.

        Raises:
            JobExistsError: the key belongs to a job with another rubric or priority.
            JobLimitError: the service keeps no more results, of this job or of all; what is stored of it is scored all
                the same.
            DataError: it belongs to a job with other items; a group is larger than a request may be.
            ScorerError: the rubric cannot be used.
            TandemError: the service cannot be reached, or nothing gets on.
        """
        limits = (await self._limits(CHUNK_ITEMS, CHUNK_BYTES)).beside(rubric)
        if not key:
            key = (
                await asyncio.to_thread(key_of, items, rubric, priority)
                if isinstance(items, Sequence)
                else f"once-{uuid.uuid4().hex}"
            )
        header = reward_pb2.SubmitJobRequest.Header(
            idempotency_key=as_text("key", key), rubric=rubric, priority=priority, name=as_text("name", name)
        )
        reader = ItemReader(items, limits, on_fault=on_fault)
        patience = Patience(self._retry_seconds, self._stall_seconds)
        try:
            return await Submission(header, reader, on_progress, patience).run(await self._stub())
        except UnavailableError as error:
            raise self._located(error) from error
        finally:
            reader.close()

    async def get(self, job_id: str) -> Job:
        """The job as it is now. Raises UnknownJobError if there is none, or TandemError as `score`."""
        return job_of(await self._call("GetJob", reward_pb2.GetJobRequest(job_id=as_text("job_id", job_id))))

    async def watch(
        self,
        job_id: str,
        *,
        with_results: bool = False,
        after_cursor: int = 0,
        timeout_seconds: float = DAY_SECONDS,
    ) -> AsyncGenerator[JobEvent]:
        """The job's progress and, if wanted, its results as they come, until it has ended. A stream that breaks goes on
        where it was.

        Raises:
            UnknownJobError: there is no such job.
            JobError: its results are wanted and were given up (`expired`).
            DeadlineError: it has not ended within `timeout_seconds`; it goes on.
            TandemError: the service cannot be reached.
        """
        request = reward_pb2.WatchJobRequest(
            job_id=as_text("job_id", job_id), with_results=with_results, after_cursor=after_cursor
        )
        patience = Patience(self._retry_seconds, _NO_STALL)
        try:
            deadline = time.monotonic() + timeout_seconds
            async with aclosing(watch_job(await self._stub(), request, patience, deadline)) as events:
                async for event in events:
                    yield event
        except UnavailableError as error:
            raise self._located(error) from error

    async def results(self, job_id: str, *, timeout_seconds: float = DAY_SECONDS) -> AsyncGenerator[tuple[int, Score]]:
        """Every item's number and result, in the order in which they were scored; waits until the job has ended. Raises
        as `watch`.
        """
        async with aclosing(self.watch(job_id, with_results=True, timeout_seconds=timeout_seconds)) as events:
            async for event in events:
                for number, score in enumerate(event.results, start=event.first_item):
                    yield number, score

    async def wait(self, job_id: str, *, timeout_seconds: float = DAY_SECONDS) -> Job:
        """The job once it has ended. Raises as `watch`."""
        async with aclosing(self.watch(job_id, timeout_seconds=timeout_seconds)) as events:
            async for event in events:
                if event.job.ended:
                    return event.job
        return await self.get(job_id)

    async def cancel(self, job_id: str) -> Job:
        """Cancels the job: what is scored stays, what waits is `cancelled`. A job that has ended stays as it is. Raises
        as `get`.
        """
        return job_of(await self._call("CancelJob", reward_pb2.CancelJobRequest(job_id=as_text("job_id", job_id))))

    async def delete(self, job_id: str) -> Job:
        """Makes the service forget a job that has ended, its results and its key; returns it as it was.

        Raises as `get`, and JobError for a job that has not ended.
        """
        return job_of(await self._call("DeleteJob", reward_pb2.DeleteJobRequest(job_id=as_text("job_id", job_id))))

    async def jobs(self, limit: int = 100) -> list[Job]:
        """The newest jobs, newest first; at most 1,000."""
        reply = await self._call("ListJobs", reward_pb2.ListJobsRequest(limit=limit))
        return [job_of(job) for job in reply.jobs]

    async def scorers(self) -> Scorers:
        """What rubrics may name, the service's limits and its own rubric."""
        self._known = scorers_of(await self._call("ListScorers", reward_pb2.ListScorersRequest()))
        return self._known

    async def _limits(self, aim_items: int, aim_bytes: int) -> Limits:
        known = self._known or await self.scorers()
        return Limits.of(known.limits, aim_items=aim_items, aim_bytes=aim_bytes)

    async def _stub(self) -> Stub:
        if self._channel is None:
            target = await asyncio.to_thread(target_of, self.addresses)  # it may ask a name server
            self._channel = self._channel or connect_target(target)
        return reward_pb2_grpc.RewardServiceStub(self._channel)

    async def _call(self, method: str, request: Any, timeout_seconds: float = _SHORT_SECONDS) -> Any:
        try:
            return await getattr(await self._stub(), method)(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise self._located(from_rpc_error(error)) from error

    def _located(self, error: TandemError) -> TandemError:
        """The error, with the address where nobody answers."""
        text = str(error)
        if not isinstance(error, UnavailableError) or not text.startswith("cannot be reached"):
            return error
        return UnavailableError(f"the reward service at {', '.join(self.addresses)} {text}")


def key_of(items: Sequence[ScoreItem | Unscored], rubric: str, priority: int = 0) -> str:
    """The idempotency key of a job: the same items, rubric and priority always have the same."""
    digest = hashlib.sha256(f"{priority} {len(rubric)}:{rubric}".encode(errors="replace"))
    no_limits = Limits(1, 1 << 62, 1, 1 << 62)
    for index, item in enumerate(items):
        message = pack(index, item, no_limits).message.SerializeToString(deterministic=True)
        digest.update(len(message).to_bytes(8, "little") + message)
    return f"items-{digest.hexdigest()}"
