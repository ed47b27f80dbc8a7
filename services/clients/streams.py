"""The long calls of a reward client: streams that break and go on where they were. Nothing is lost, nothing is counted
twice.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

import grpc

from tandem.protos import reward_pb2, reward_pb2_grpc
from tandem.protos.contracts import Score
from tandem.protos.errors import DataError, DeadlineError, TandemError
from tandem.services.clients.item_reader import ItemReader
from tandem.services.clients.messages import Job, JobEvent, Packed, event_of, job_of, result_of
from tandem.services.reward.stream_errors import error_of
from tandem.services.rpc.client import from_rpc_error

STREAM_SECONDS = 120.0
"""Deadline of one stream of a job's submission or watch; what is not finished by then goes on in the next."""
WINDOW = 8
"""Messages under way that have no answer yet; they are kept, to be sent again."""
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
# A replica that ends cancels what it cannot finish; a stream's own deadline is no failure.
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)

Request = reward_pb2.SubmitJobRequest
Stub = reward_pb2_grpc.RewardServiceStub


def _passes(error: grpc.RpcError) -> bool:
    """Whether the call may go better when it is begun again."""
    # What gRPC says of its own when a message was being written while the call ended: with which status, the next
    # attempt tells.
    mid_write = error.code() == grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"
    return error.code() in _PASSING or mid_write


class Patience:
    """How long a stream that breaks is begun anew: `retry_seconds` while nobody answers, `stall_seconds` while nothing
    gets on.
    """

    def __init__(self, retry_seconds: float, stall_seconds: float) -> None:
        self._retry_seconds = retry_seconds
        self._stall_seconds = stall_seconds
        self._pause = _FIRST_PAUSE_SECONDS
        self._lost_at: float | None = None
        self._moved_at = time.monotonic()
        self._mark: object = None

    def heard(self, mark: object) -> None:
        """The service answered. It got on if `mark` is another than before."""
        self._lost_at = None
        self._pause = _FIRST_PAUSE_SECONDS
        if mark != self._mark:
            self._mark = mark
            self.moved()

    def moved(self) -> None:
        """Something got on."""
        self._moved_at = time.monotonic()

    async def after(self, error: grpc.RpcError | None) -> None:
        """Returns when the stream may be begun again after this error (None: it ended without one, too early).

        Raises:
            TandemError: the error is not one that passes, or it has lasted too long.
        """
        now = time.monotonic()
        if error is not None and not _passes(error):
            raise from_rpc_error(error) from error
        if now - self._moved_at > self._stall_seconds:
            raise DeadlineError(
                f"the service answers, but nothing has got on for {self._stall_seconds:.0f} s"
            ) from error
        if error is not None and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return
        self._lost_at = now if self._lost_at is None else self._lost_at
        if error is not None and now - self._lost_at > self._retry_seconds:
            raise from_rpc_error(error) from error
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)


async def converse(call: Any, requests: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
    """Sends the requests as they come and yields the replies as they come; ends with the call.

    Raises what `requests` raises, or the RpcError with which the call ended. Closed early, it cancels the call.
    """

    async def send() -> None:
        async with aclosing(requests):
            async for request in requests:
                try:
                    await call.write(request)
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return  # the call has ended; reading tells why
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await call.done_writing()

    sending = asyncio.ensure_future(send())
    reading: asyncio.Future[Any] = asyncio.ensure_future(call.read())
    try:
        while True:
            while not reading.done():
                pending = {reading} if sending.done() else {reading, sending}
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if sending.done() and (failure := sending.exception()) is not None:
                    raise failure
            reply = reading.result()
            if reply is grpc.aio.EOF:
                return
            yield reply
            reading = asyncio.ensure_future(call.read())
    finally:
        call.cancel()
        sending.cancel()
        await asyncio.wait({sending, reading}, timeout=_CLOSE_SECONDS)
        for task in (sending, reading):
            if task.done() and not task.cancelled():
                task.exception()  # asked for, lest asyncio complain that nobody did


class Submission:
    """A job on its way to the service: header, chunks, seal. Holds the chunks that are not known to be stored."""

    def __init__(
        self, header: Request.Header, reader: ItemReader, on_progress: Callable[[Job], None], patience: Patience
    ) -> None:
        self._patience = patience
        self._header = header
        self._reader = reader
        self._on_progress = on_progress
        self._window: dict[int, Request.Chunk] = {}
        self._num_chunks = 0
        """Chunks read so far."""
        self._num_items = 0
        """Items in them."""
        self._known: tuple[int, int] = (0, 0)
        """Chunks and items that the service had before this submission."""
        self._stored = 0
        """Chunks the service has now."""
        self._job_id = ""
        self._changed = asyncio.Event()

    async def run(self, stub: Stub) -> Job:
        """Submits until the job is sealed; a job that is sealed already is returned as it is.

        Raises:
            TandemError: the service refuses the job, cannot be reached, or makes no progress.
            DataError: the job of this key holds other items.
        """
        while True:
            broken: grpc.RpcError | None = None
            answered = asyncio.Event()
            call = stub.SubmitJob(timeout=STREAM_SECONDS)
            try:
                async with aclosing(converse(call, self._requests(answered))) as replies:
                    async for reply in replies:
                        job = self._take(reply)
                        answered.set()
                        if job.state != "open":
                            return job
            except grpc.RpcError as error:
                broken = error
            await self._patience.after(broken)

    def _take(self, reply: reward_pb2.SubmitJobReply) -> Job:
        if reply.WhichOneof("outcome") == "error":
            raise error_of(reply.error)
        job = job_of(reply.job)
        if not self._job_id:
            self._job_id = job.job_id
            self._known = (reply.next_chunk, job.num_items)
        self._patience.heard((reply.next_chunk, job.num_settled, job.state))
        self._stored = max(self._stored, reply.next_chunk)
        for index in [one for one in self._window if one < self._stored]:
            del self._window[index]
        self._changed.set()
        self._on_progress(job)
        return job

    async def _requests(self, answered: asyncio.Event) -> AsyncGenerator[Request]:
        yield Request(header=self._header)
        await answered.wait()  # it says what is stored
        for index in sorted(self._window):
            if index in self._window:  # it may have been stored meanwhile
                yield Request(chunk=self._window[index])
        while True:
            while len(self._window) >= WINDOW:
                self._changed.clear()
                await self._changed.wait()
            chunk = await self._next_chunk()
            if chunk is None:
                break
            yield Request(chunk=chunk)
        yield Request(seal=Request.Seal(num_chunks=self._num_chunks))

    async def _next_chunk(self) -> Request.Chunk | None:
        """The next chunk the service lacks; None after the last."""
        while True:
            message = await self._reader.next()
            self._patience.moved()
            known_chunks, known_items = self._known
            if message is None:
                if self._num_chunks < known_chunks:
                    raise self._other_items()
                return None
            index = self._num_chunks
            self._num_chunks += 1
            self._num_items += len(message)
            if self._num_chunks == known_chunks and self._num_items != known_items:
                raise self._other_items()
            if index >= self._stored:
                chunk = Request.Chunk(index=index, items=[item.message for item in message])
                self._window[index] = chunk
                return chunk

    def _other_items(self) -> DataError:
        chunks, items = self._known
        return DataError(
            f"job {self._job_id} of key {self._header.idempotency_key!r} already holds {items} items in "
            f"{chunks} chunks, here they are {self._num_items} in {self._num_chunks}: it "
            "was submitted from other items; choose another key"
        )


async def watch_job(
    stub: Stub, request: reward_pb2.WatchJobRequest, patience: Patience, deadline: float
) -> AsyncGenerator[JobEvent]:
    """A job's events after a cursor until it has ended and, if wanted, all its results are told. `deadline` is of
    time.monotonic.

    Raises:
        TandemError: there is no such job, the service cannot be reached, or the deadline has passed.
    """
    cursor, ended = request.after_cursor, False
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"job {request.job_id} has not ended within the time given; it goes on, watch it again")
        broken: grpc.RpcError | None = None
        resumed = reward_pb2.WatchJobRequest(
            job_id=request.job_id, with_results=request.with_results, after_cursor=cursor
        )
        call = stub.WatchJob(resumed, timeout=min(left, STREAM_SECONDS))
        try:
            async for message in call:
                if message.WhichOneof("event") == "error":
                    raise error_of(message.error)
                event = event_of(message)
                cursor, ended = max(cursor, event.cursor), event.job.ended
                patience.heard(cursor)
                yield event
            if ended:
                return
        except grpc.RpcError as error:
            broken = error
        finally:
            call.cancel()
        await patience.after(broken)


class ScoreConversation:
    """Batches of items that are scored as they come; scores come out in the order of the items.

    New batches are sent for `timeout_seconds` of a stream; it stays open as long again, so that each has that time to
    be answered.
    """

    def __init__(self, reader: ItemReader, rubric: str, timeout_seconds: float, patience: Patience) -> None:
        self._reader = reader
        self._rubric = rubric
        self._timeout = timeout_seconds
        self._patience = patience
        self._fetching: asyncio.Future[list[Packed] | None] | None = None
        self._ended = False
        self._num_batches = 0
        self._window: dict[int, list[Packed]] = {}
        """Batches without an answer, by request id."""
        self._answers: dict[int, list[Score]] = {}
        """Answers that wait for earlier ones."""
        self._room = asyncio.Event()

    async def run(self, stub: Stub) -> AsyncGenerator[list[Score]]:
        """The scores, some at a time.

        Raises:
            TandemError: the service refuses a batch, cannot be reached, or leaves a batch without an answer for too
                long.
        """
        next_id = 0
        while not self._ended or self._window:
            broken: grpc.RpcError | None = None
            call = stub.ScoreStream(timeout=2 * self._timeout)
            try:
                async with aclosing(converse(call, self._requests())) as replies:
                    async for reply in replies:
                        self._take(reply)
                        while next_id in self._answers:
                            yield self._answers.pop(next_id)
                            next_id += 1
                            self._room.set()
                            self._patience.moved()  # the time the caller took is not the service's
            except grpc.RpcError as error:
                broken = error
            if broken is not None or self._window:
                await self._patience.after(broken)

    def close(self) -> None:
        """Reads no further."""
        if self._fetching is not None:
            self._fetching.cancel()
        self._reader.close()

    def _take(self, reply: reward_pb2.ScoreStreamReply) -> None:
        batch = self._window.pop(reply.request_id, None)
        if batch is None:
            raise TandemError(
                f"the service answered request {reply.request_id}, which was not asked or answered before"
            )
        if reply.WhichOneof("outcome") == "error":
            raise error_of(reply.error)
        self._answers[reply.request_id] = scores_of(batch, reply.reply)
        self._patience.heard(reply.request_id)

    async def _requests(self) -> AsyncGenerator[reward_pb2.ScoreStreamRequest]:
        until = time.monotonic() + self._timeout
        for request_id in list(self._window):
            if request_id in self._window:
                yield self._request(request_id)
        while not self._ended:
            while len(self._window) + len(self._answers) >= WINDOW:
                self._room.clear()
                await self._room.wait()
            if self._fetching is None:
                self._fetching = asyncio.ensure_future(self._reader.next())
                self._patience.moved()  # the time before was the caller's
            done, _ = await asyncio.wait({self._fetching}, timeout=max(0.0, until - time.monotonic()))
            if not done:
                return  # the next stream goes on
            batch, self._fetching = self._fetching.result(), None
            if batch is None:
                self._ended = True
                return
            self._window[self._num_batches] = batch
            self._num_batches += 1
            yield self._request(self._num_batches - 1)

    def _request(self, request_id: int) -> reward_pb2.ScoreStreamRequest:
        items = [item.message for item in self._window[request_id]]
        return reward_pb2.ScoreStreamRequest(
            request_id=request_id, request=reward_pb2.ScoreRequest(items=items, rubric=self._rubric)
        )


def scores_of(batch: list[Packed], reply: reward_pb2.ScoreReply) -> list[Score]:
    """The scores of a batch, in its order; placeholders keep the reason they had.

    Raises:
        TandemError: the reply has another number of results.
    """
    if len(reply.items) != len(batch):
        raise TandemError(f"the service sent {len(reply.items)} results for {len(batch)} items")
    return [item.fault or result_of(one) for item, one in zip(batch, reply.items, strict=True)]
