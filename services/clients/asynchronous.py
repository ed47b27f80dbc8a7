"""The reward service's client for programs with an event loop."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Self

import grpc
from google.protobuf.message import Message

from tandem.protos import reward_pb2, reward_pb2_grpc
from tandem.protos.contracts import Score, ScoreItem, Unscored
from tandem.protos.errors import UnavailableError
from tandem.services.addresses import named_addresses, target_of
from tandem.services.clients.item_reader import ItemReader, Items
from tandem.services.clients.messages import (
    EncodedItem,
    Job,
    JobEvent,
    Limits,
    Scorers,
    as_text,
    encode,
    job_from_proto,
    order_by_group,
    scorers_from_proto,
    split,
)
from tandem.services.clients.streams import ScoreStream, StreamRetry, Stub, Submission, batch_scores, watch_job
from tandem.services.rpc.certificates import CERTIFICATES_VARIABLE, channel_credentials
from tandem.services.rpc.client import TokenChannel, connect_async, server_name_of, translated
from tandem.services.rpc.tokens import TOKEN_VARIABLE

DAY_SECONDS = 86_400.0
CHUNK_ITEMS = 256
"""Target size of a chunk of a job. A chunk is stored, leased and scored as a whole."""
REQUEST_ITEMS = 128
"""Target size of a request of `score`."""
REQUESTS_IN_FLIGHT = 4
_LINGER_SECONDS = 0.02  # how long a batch of `score_stream` waits for more items
_SHORT_SECONDS = 10.0  # deadline of calls that score and store nothing


class AsyncRewardClient:
    """The client of the reward service for `async` programs. An async context manager, for one event loop. Raises
    UserError if an address is not host:port, or a certificate cannot be used.

    Args:
        addresses: host:port; several as a list or separated by commas, over which calls are spread. Default: those of
            TANDEM_REWARD_ADDRESS, else 127.0.0.1:50051.
        timeout_seconds: longest time for one request of `score` or `score_stream`.
        retry_seconds: how long submission, watch and `score_stream` try to reach a service that does not answer.
        stall_seconds: how long a submission may make no progress while the service answers, e.g. because too many
            items wait to be scored.
        token: bearer token for the service. Default: that of TANDEM_TOKEN.
        certificates: connect over TLS. A file: the CA of the service. A folder with ca.crt, client.crt and client.key:
            the client shows its certificate, too. Default: that of TANDEM_CERTIFICATES, else no TLS.
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
        path = certificates or os.environ.get(CERTIFICATES_VARIABLE, "")
        self._credentials = channel_credentials(Path(path)) if path else None
        self._token = token or os.environ.get(TOKEN_VARIABLE, "")
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
        """Closes the connections. Calls in progress are cancelled, jobs go on."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def score(
        self, items: Sequence[ScoreItem | Unscored], rubric: str = "", *, timeout_seconds: float | None = None
    ) -> list[Score]:
        """One result for each item, in order. A long list is sent as several requests; a group is never split.

        Args:
            items: an `Unscored` in place of an item is returned as it is.
            rubric: TOML. Empty: the service's own rubric.
            timeout_seconds: for each request. Default: the client's.

        Raises:
            DataError: a group is larger than a request may be.
            ScorerError: the rubric cannot be used.
            TandemError: the service cannot be reached, misses the deadline, or fails.
        """
        limits = await self._limits(REQUEST_ITEMS, rubric)
        encoded = [encode(index, item, limits) for index, item in enumerate(items)]
        results: list[Score | None] = [item.fault for item in encoded]
        sendable = [item for item in encoded if item.fault is None]
        slots = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

        async def send(batch: list[EncodedItem]) -> None:
            request = reward_pb2.ScoreRequest(items=[item.message for item in batch], rubric=rubric)
            async with slots:
                reply = await self._call("Score", request, timeout_seconds or self._timeout)
            for item, score in zip(batch, batch_scores(batch, reply), strict=True):
                results[item.index] = score

        sending = [asyncio.ensure_future(send(batch)) for batch in split(order_by_group(sendable), limits)]
        try:
            await asyncio.gather(*sending)
        finally:
            for task in sending:
                task.cancel()
        return [result for result in results if result is not None]

    async def score_stream(self, items: Items, rubric: str = "") -> AsyncGenerator[Score]:
        """The scores of items that arrive over time, in their order, each soon after its item. The items of a group
        must be adjacent. Raises what `score` and `items` raise.
        """
        async for scores in self.score_batches(items, rubric):
            for score in scores:
                yield score

    async def score_batches(self, items: Items, rubric: str = "") -> AsyncGenerator[list[Score]]:
        """As `score_stream`, with the scores of each reply in one list."""
        limits = await self._limits(REQUEST_ITEMS, rubric)
        reader = ItemReader(items, limits, linger_seconds=_LINGER_SECONDS)
        stream = ScoreStream(reader, rubric, self._timeout, StreamRetry(self._retry_seconds, self._timeout))
        with self._address_named(), closing(stream):
            async with aclosing(stream.run(await self._stub())) as batches:
                async for scores in batches:
                    yield scores

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
        """Stores the items as a job, which is scored even if this client ends. Returns the job once all are stored.

        A broken connection is opened again, and the submission continues after what is stored. The same key always
        means the same job: to continue an interrupted submission, submit the same items again.

        Args:
            items: read once, in another thread if it is a plain iterable. The items of a group must be adjacent.
            rubric: TOML. Empty: the service's own rubric.
            key: at most 200 bytes. Default: a digest of items, rubric and priority for a sequence, else a new key.
            name: shown in lists of jobs.
            priority: -100 to 100; higher is scored first.
            on_progress: called with the job after every reply of the service.
            on_fault: called with the number and the reason of every item that cannot be scored (an `Unscored` in its
                place, a field that is not text, too many bytes). Its result will be `invalid_input`.

        Raises:
            JobExistsError: the key belongs to a job with another rubric or priority.
            JobLimitError: the service stores no more results, of this job or of all. What is stored is still scored.
            DataError: the key belongs to a job with other items, or a group is larger than a request may be.
            ScorerError: the rubric cannot be used.
            TandemError: the service cannot be reached, or the submission makes no progress.
        """
        limits = await self._limits(CHUNK_ITEMS, rubric)
        if not key and isinstance(items, Sequence):
            key = await asyncio.to_thread(job_key, items, rubric, priority)
        key = key or f"once-{uuid.uuid4().hex}"
        header = reward_pb2.SubmitJobRequest.Header(
            idempotency_key=as_text("key", key), rubric=rubric, priority=priority, name=as_text("name", name)
        )
        reader = ItemReader(items, limits, on_fault=on_fault)
        retry = StreamRetry(self._retry_seconds, self._stall_seconds)
        with self._address_named(), closing(reader):
            return await Submission(header, reader, on_progress, retry).run(await self._stub())

    async def get(self, job_id: str) -> Job:
        """The job's current state. Raises UnknownJobError if there is no such job, or TandemError as `score`."""
        return await self._job("GetJob", reward_pb2.GetJobRequest, job_id)

    async def watch(
        self, job_id: str, *, with_results: bool = False, after_cursor: int = 0, timeout_seconds: float = DAY_SECONDS
    ) -> AsyncGenerator[JobEvent]:
        """The job's progress and, if wanted, its results as they come, until it has ended. Broken streams are resumed.

        Raises:
            UnknownJobError: there is no such job.
            JobError: the results are wanted, but were deleted to make room (`expired`).
            DeadlineError: the job has not ended within `timeout_seconds`; it goes on.
            TandemError: the service cannot be reached.
        """
        request = reward_pb2.WatchJobRequest(
            job_id=as_text("job_id", job_id), with_results=with_results, after_cursor=after_cursor
        )
        retry = StreamRetry(self._retry_seconds, stall_seconds=math.inf)
        deadline = time.monotonic() + timeout_seconds
        with self._address_named():
            async with aclosing(watch_job(await self._stub(), request, retry, deadline)) as events:
                async for event in events:
                    yield event

    async def results(self, job_id: str, *, timeout_seconds: float = DAY_SECONDS) -> AsyncGenerator[tuple[int, Score]]:
        """Number and result of every item, as they are scored, until the job has ended. Raises as `watch`."""
        async with aclosing(self.watch(job_id, with_results=True, timeout_seconds=timeout_seconds)) as events:
            async for event in events:
                for number, score in enumerate(event.results, start=event.first_item):
                    yield number, score

    async def wait(self, job_id: str, *, timeout_seconds: float = DAY_SECONDS) -> Job:
        """Waits until the job has ended. Raises as `watch`."""
        async with aclosing(self.watch(job_id, timeout_seconds=timeout_seconds)) as events:
            async for event in events:
                if event.job.ended:
                    return event.job
        return await self.get(job_id)

    async def cancel(self, job_id: str) -> Job:
        """Cancels the job, if it has not ended: items without a result get `cancelled`. Raises as `get`."""
        return await self._job("CancelJob", reward_pb2.CancelJobRequest, job_id)

    async def delete(self, job_id: str) -> Job:
        """Deletes a job with its results and its key; returns its last state. Raises as `get`, and JobError for a job
        that has not ended.
        """
        return await self._job("DeleteJob", reward_pb2.DeleteJobRequest, job_id)

    async def jobs(self, limit: int = 100) -> list[Job]:
        """The newest jobs, newest first; at most 1,000."""
        reply = await self._call("ListJobs", reward_pb2.ListJobsRequest(limit=limit))
        return [job_from_proto(job) for job in reply.jobs]

    async def scorers(self) -> Scorers:
        """The scorers that rubrics may name, the service's limits and its own rubric."""
        self._known = scorers_from_proto(await self._call("ListScorers", reward_pb2.ListScorersRequest()))
        return self._known

    async def _job(self, method: str, request: Callable[..., Message], job_id: str) -> Job:
        return job_from_proto(await self._call(method, request(job_id=as_text("job_id", job_id))))

    async def _limits(self, target_items: int, rubric: str) -> Limits:
        known = self._known or await self.scorers()
        return Limits.of(known.limits, rubric, target_items)

    async def _stub(self) -> Stub:
        if self._channel is None:
            target = await asyncio.to_thread(target_of, self.addresses)  # this may ask a name server
            self._channel = self._channel or connect_async(target, self._credentials, server_name_of(self.addresses))
        channel = TokenChannel(self._channel, self._token) if self._token else self._channel
        return reward_pb2_grpc.RewardServiceStub(channel)

    async def _call(self, method: str, request: Message, timeout_seconds: float = _SHORT_SECONDS) -> Any:
        with self._address_named(), translated():
            return await getattr(await self._stub(), method)(request, timeout=timeout_seconds)

    @contextmanager
    def _address_named(self) -> Iterator[None]:
        """Adds the address to the error of a service that cannot be reached."""
        try:
            yield
        except UnavailableError as error:
            if not str(error).startswith("cannot be reached"):
                raise
            raise UnavailableError(f"the reward service at {', '.join(self.addresses)} {error}") from error.__cause__


def job_key(items: Sequence[ScoreItem | Unscored], rubric: str, priority: int = 0) -> str:
    """The idempotency key of a job: a digest of its items, rubric and priority."""
    digest = hashlib.sha256(f"{priority} {len(rubric)}:{rubric}".encode(errors="replace"))
    no_limits = Limits(1, 1 << 62, 1, 1 << 62)
    for index, item in enumerate(items):
        message = encode(index, item, no_limits).message.SerializeToString(deterministic=True)
        digest.update(len(message).to_bytes(8, "little") + message)
    return f"items-{digest.hexdigest()}"
