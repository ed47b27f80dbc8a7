"""The streaming calls of a reward client. A broken stream is resumed, so no item is lost or scored twice."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import TypeVar, cast

import grpc

from tandem.protos import reward_pb2, reward_pb2_grpc
from tandem.protos.contracts import Score
from tandem.protos.errors import DataError, DeadlineError, TandemError, UserError
from tandem.services.clients.item_reader import ItemReader
from tandem.services.clients.messages import EncodedItem, Job, JobEvent, job_from_proto, score_from_proto
from tandem.services.reward.wire import error_of
from tandem.services.rpc.client import from_rpc_error

STREAM_SECONDS = 120.0
"""Deadline of one stream of a submission or a watch. The next stream continues with the rest."""
WINDOW = 8
"""Maximum number of unanswered messages. They are kept so that they can be sent again."""
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
# A replica that shuts down cancels the calls that it cannot finish. A stream that reaches its own deadline is resumed.
_RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)

SubmitRequest = reward_pb2.SubmitJobRequest
Stub = reward_pb2_grpc.RewardServiceStub
Request = TypeVar("Request")
Reply = TypeVar("Reply")


class StreamRetry:
    """Decides whether a stream that broke is started again: for `retry_seconds` while the service does not answer, and
    for `stall_seconds` while it answers without progress.
    """

    def __init__(self, retry_seconds: float, stall_seconds: float) -> None:
        self._retry_seconds = retry_seconds
        self._stall_seconds = stall_seconds
        self._pause = _FIRST_PAUSE_SECONDS
        self._lost_at: float | None = None
        self._progress_at = time.monotonic()
        self._state: object = None

    def answered(self, state: object) -> None:
        """The service answered. A `state` that differs from the last one is progress."""
        self._lost_at = None
        self._pause = _FIRST_PAUSE_SECONDS
        if state != self._state:
            self._state = state
            self.progressed()

    def progressed(self) -> None:
        """Starts the time of `stall_seconds` again."""
        self._progress_at = time.monotonic()

    async def wait(self, error: grpc.RpcError | None) -> None:
        """Returns when the stream may be started again. `error` is None for a stream that ended early without one.
        Raises TandemError if the error is permanent, or the time is over.
        """
        now = time.monotonic()
        if error is not None and not _is_retryable(error):
            raise from_rpc_error(error) from error
        if now - self._progress_at > self._stall_seconds:
            raise DeadlineError(f"the service answers, but made no progress for {self._stall_seconds:.0f} s") from error
        if error is not None and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return
        self._lost_at = now if self._lost_at is None else self._lost_at
        if error is not None and error.code() in _RETRYABLE and now - self._lost_at > self._retry_seconds:
            raise from_rpc_error(error) from error
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)


def _is_retryable(error: grpc.RpcError) -> bool:
    if isinstance(from_rpc_error(error), UserError):
        return False  # a certificate that is refused, for instance, which gRPC calls UNAVAILABLE
    # gRPC reports a write that was interrupted by the end of the call like this; the next attempt gets the status.
    interrupted_write = error.code() == grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"
    return error.code() in _RETRYABLE or interrupted_write


async def exchange(
    call: grpc.aio.StreamStreamCall[Request, Reply], requests: AsyncGenerator[Request]
) -> AsyncGenerator[Reply]:
    """Sends the requests as they come and yields the replies as they come, until the call ends.

    Raises what `requests` raises, or the RpcError with which the call ended. Closing the generator cancels the call.
    When it ends, `requests` has ended too, so the next call may go on with what they read (gRPC's own sending may
    outlive its call).
    """

    async def send() -> None:
        async with aclosing(requests):
            async for request in requests:
                try:
                    await call.write(request)
                except (grpc.RpcError, asyncio.InvalidStateError):
                    return  # the call has ended, and reading it raises the error
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await call.done_writing()

    async def read() -> Reply | None:
        reply = await call.read()
        return None if reply is grpc.aio.EOF else cast(Reply, reply)

    sending = asyncio.ensure_future(send())
    reading = asyncio.ensure_future(read())
    try:
        while True:
            while not reading.done():
                pending = {reading} if sending.done() else {reading, sending}
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if sending.done() and (failure := sending.exception()) is not None:
                    raise failure
            reply = reading.result()
            if reply is None:
                return
            yield reply
            reading = asyncio.ensure_future(read())
    finally:
        call.cancel()
        sending.cancel()
        await asyncio.wait({sending, reading}, timeout=_CLOSE_SECONDS)
        for task in (sending, reading):
            if task.done() and not task.cancelled():
                task.exception()  # retrieved, because asyncio logs exceptions that nobody retrieves


class Submission:
    """A job being sent: header, chunks, seal. Keeps the chunks that the service has not confirmed."""

    def __init__(
        self, header: SubmitRequest.Header, reader: ItemReader, on_progress: Callable[[Job], None], retry: StreamRetry
    ) -> None:
        self._retry = retry
        self._header = header
        self._reader = reader
        self._on_progress = on_progress
        self._window: dict[int, SubmitRequest.Chunk] = {}
        self._num_chunks = 0  # chunks read so far
        self._num_items = 0  # items in them
        self._known = (0, 0)  # chunks and items that the service had before this submission
        self._stored = 0  # chunks that the service has now
        self._job_id = ""
        self._changed = asyncio.Event()

    async def run(self, stub: Stub) -> Job:
        """Submits until the job is sealed, and returns it. Raises as `AsyncRewardClient.submit`."""
        while True:
            failure: grpc.RpcError | None = None
            answered = asyncio.Event()
            call = stub.SubmitJob(timeout=STREAM_SECONDS)
            try:
                async with aclosing(exchange(call, self._requests(answered))) as replies:
                    async for reply in replies:
                        job = self._take(reply)
                        answered.set()
                        if job.state != "open":
                            return job
            except grpc.RpcError as error:
                failure = error
            await self._retry.wait(failure)

    def _take(self, reply: reward_pb2.SubmitJobReply) -> Job:
        if reply.WhichOneof("outcome") == "error":
            raise error_of(reply.error)
        job = job_from_proto(reply.job)
        if not self._job_id:
            self._job_id = job.job_id
            self._known = (reply.next_chunk, job.num_items)
        self._retry.answered((reply.next_chunk, job.num_settled, job.state))
        self._stored = max(self._stored, reply.next_chunk)
        self._window = {index: chunk for index, chunk in self._window.items() if index >= self._stored}
        self._changed.set()
        self._on_progress(job)
        return job

    async def _requests(self, answered: asyncio.Event) -> AsyncGenerator[SubmitRequest]:
        yield SubmitRequest(header=self._header)
        await answered.wait()  # the answer tells what is stored
        for index in sorted(self._window):
            if index in self._window:  # it may have been stored in the meantime
                yield SubmitRequest(chunk=self._window[index])
        while True:
            while len(self._window) >= WINDOW:
                self._changed.clear()
                await self._changed.wait()
            chunk = await self._next_chunk()
            if chunk is None:
                break
            yield SubmitRequest(chunk=chunk)
        yield SubmitRequest(seal=SubmitRequest.Seal(num_chunks=self._num_chunks))

    async def _next_chunk(self) -> SubmitRequest.Chunk | None:
        """The next chunk the service lacks; None after the last."""
        while True:
            batch = await self._reader.next()
            self._retry.progressed()
            known_chunks, known_items = self._known
            if batch is not None:
                self._num_chunks += 1
                self._num_items += len(batch)
            too_few = batch is None and self._num_chunks < known_chunks
            if too_few or (self._num_chunks == known_chunks and self._num_items != known_items):
                raise DataError(
                    f"job {self._job_id} of key {self._header.idempotency_key!r} already holds {known_items} items in "
                    f"{known_chunks} chunks, but here are {self._num_items} items in {self._num_chunks}: the key "
                    "belongs to other items; choose another key"
                )
            if batch is None:
                return None
            if self._num_chunks > self._stored:
                index = self._num_chunks - 1
                self._window[index] = SubmitRequest.Chunk(index=index, items=[item.message for item in batch])
                return self._window[index]


async def watch_job(
    stub: Stub, request: reward_pb2.WatchJobRequest, retry: StreamRetry, deadline: float
) -> AsyncGenerator[JobEvent]:
    """A job's events after the request's cursor, which it moves. `deadline` is monotonic. Raises as
    `AsyncRewardClient.watch`.
    """
    ended = False
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"job {request.job_id} has not ended within the time given; it goes on, watch it again")
        failure: grpc.RpcError | None = None
        call = stub.WatchJob(request, timeout=min(left, STREAM_SECONDS))
        try:
            async for message in call:
                if message.WhichOneof("event") == "error":
                    raise error_of(message.error)
                results = tuple(score_from_proto(item) for item in message.results.items)
                job = job_from_proto(message.job)
                request.after_cursor, ended = max(request.after_cursor, message.cursor), job.ended
                retry.answered(request.after_cursor)
                yield JobEvent(job, message.cursor, message.results.first_item, results)
            if ended:
                return
        except grpc.RpcError as error:
            failure = error
        finally:
            call.cancel()
        await retry.wait(failure)


class ScoreStream:
    """Scores batches of items as they come. Scores are yielded in the order of the items.

    A stream takes new batches for `timeout_seconds` and stays open as long again, so that each batch can be answered.
    """

    def __init__(self, reader: ItemReader, rubric: str, timeout_seconds: float, retry: StreamRetry) -> None:
        self._reader = reader
        self._rubric = rubric
        self._timeout = timeout_seconds
        self._retry = retry
        self._fetching: asyncio.Future[list[EncodedItem] | None] | None = None
        self._ended = False
        self._num_batches = 0
        self._window: dict[int, list[EncodedItem]] = {}  # batches without an answer, by request id
        self._answers: dict[int, list[Score]] = {}  # answers that wait for earlier ones
        self._room = asyncio.Event()

    async def run(self, stub: Stub) -> AsyncGenerator[list[Score]]:
        """The scores, some at a time. Raises as `AsyncRewardClient.score_stream`."""
        next_id = 0
        while not self._ended or self._window:
            failure: grpc.RpcError | None = None
            call = stub.ScoreStream(timeout=2 * self._timeout)
            try:
                async with aclosing(exchange(call, self._requests())) as replies:
                    async for reply in replies:
                        self._take(reply)
                        while next_id in self._answers:
                            yield self._answers.pop(next_id)
                            next_id += 1
                            self._room.set()
                            self._retry.progressed()  # the caller's time does not count as a stall of the service
            except grpc.RpcError as error:
                failure = error
            if failure is not None or self._window:
                await self._retry.wait(failure)

    def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
        self._reader.close()

    def _take(self, reply: reward_pb2.ScoreStreamReply) -> None:
        batch = self._window.pop(reply.request_id, None)
        if batch is None:
            raise TandemError(f"the service answered request {reply.request_id}, which was never sent or is answered")
        if reply.WhichOneof("outcome") == "error":
            raise error_of(reply.error)
        self._answers[reply.request_id] = batch_scores(batch, reply.reply)
        self._retry.answered(reply.request_id)

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
                self._retry.progressed()  # the time before was the caller's
            done, _ = await asyncio.wait({self._fetching}, timeout=max(0.0, until - time.monotonic()))
            if not done:
                return  # the next stream continues
            batch, self._fetching = self._fetching.result(), None
            if batch is None:
                self._ended = True
                return
            self._window[self._num_batches] = batch
            self._num_batches += 1
            yield self._request(self._num_batches - 1)

    def _request(self, request_id: int) -> reward_pb2.ScoreStreamRequest:
        items = [item.message for item in self._window[request_id]]
        request = reward_pb2.ScoreRequest(items=items, rubric=self._rubric)
        return reward_pb2.ScoreStreamRequest(request_id=request_id, request=request)


def batch_scores(batch: list[EncodedItem], reply: reward_pb2.ScoreReply) -> list[Score]:
    """The scores of a batch, in its order. Raises TandemError if the reply has another number of results."""
    if len(reply.items) != len(batch):
        raise TandemError(f"the service sent {len(reply.items)} results for {len(batch)} items")
    return [item.fault or score_from_proto(one) for item, one in zip(batch, reply.items, strict=True)]
