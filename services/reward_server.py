"""gRPC `RewardService`: scores for whoever asks, jobs that outlive everybody, and what there is to ask for.

Every wait is bounded: by the caller's deadline, by one of ours, or by a sign of life every few seconds.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from protos import reward_pb2, reward_pb2_grpc
from protos.contracts import Unscored
from protos.errors import DataError, DeadlineError, ScorerError, UnavailableError
from reward.config import RewardConfig
from reward.scoring import CompiledRubric, ScoringCore
from services.job_wire import job_message, submit_reply
from services.jobs.config import JobsConfig
from services.jobs.store import JobRecord, JobStore
from services.score_inline import is_quick
from services.score_slices import score_in_slices
from services.score_wire import check_size, read_items, reply_of, with_faults
from services.scorer_list import (
    MAX_KEY_BYTES,
    MAX_LISTED_JOBS,
    MAX_NAME_BYTES,
    MAX_RUBRIC_BYTES,
    MOST_PRIORITY,
    REQUESTS_PER_STREAM,
    scorer_list,
)

SERVICE_NAME = "tandem.v1.RewardService"

_DEFAULT_LISTED_JOBS = 100

_LONGEST_CALL_SECONDS = 3600.0  # for a caller without a deadline, or with a later one
_IDLE_SECONDS = 600.0  # a stream on which nothing comes and nothing is under way
_HEARTBEAT_SECONDS = 10.0
_GRACE_SECONDS = 0.5  # for what is under way when the service stops
_MOST_BYTES_IN_FLIGHT = 256 << 20
_RUBRICS_KEPT = 64
_SCORING_THREADS = 64  # they wait for workers and for the network
_STORING_THREADS = 16
_EVENT_BYTES = 1 << 20  # results read at once
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5
_SHUTTING_DOWN = "the service is shutting down; another one, or this one once it is back, goes on"

Result = TypeVar("Result")


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """The whole of reward.proto. `end_streams` is for the server to call as it begins to stop, `close` once it has stopped."""

    def __init__(self, core: ScoringCore, store: JobStore, reward: RewardConfig, jobs: JobsConfig) -> None:
        self._core = core
        self._store = store
        self._reward = reward
        self._jobs = jobs
        self._scorers: reward_pb2.ListScorersReply | None = None
        self._listing = asyncio.Lock()
        self._scoring = ThreadPoolExecutor(_SCORING_THREADS, "score")
        self._storing = ThreadPoolExecutor(_STORING_THREADS, "store")
        self._closing = asyncio.Event()
        self._rubrics: OrderedDict[str, CompiledRubric] = OrderedDict()
        self._bytes_in_flight = 0

    def end_streams(self) -> None:
        """Streams end as UNAVAILABLE from now on. Called on the event loop."""
        self._closing.set()

    def close(self) -> None:
        """Starts no more threads' work. The core must be closed by then, so that what hangs in it comes back."""
        self._scoring.shutdown(wait=False, cancel_futures=True)
        self._storing.shutdown(wait=False, cancel_futures=True)

    # ---- scores at once ----

    async def Score(self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext) -> reward_pb2.ScoreReply:
        """One result an item, in order; an item whose JSON cannot be read is unscored (`invalid_input`)."""
        return await self._scored(request, context)

    async def ScoreStream(
        self, request_iterator: AsyncIterator[reward_pb2.ScoreStreamRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[reward_pb2.ScoreStreamReply]:
        """The same for a stream of requests, some of them at a time; a request that is refused ends the stream."""
        closing = asyncio.ensure_future(self._closing.wait())
        reading: asyncio.Future[Any] | None = asyncio.ensure_future(anext(request_iterator, None))
        scoring: set[asyncio.Future[Any]] = set()
        try:
            while reading is not None or scoring:
                open_to_more = reading is not None and len(scoring) < REQUESTS_PER_STREAM
                waited_for = {closing, *scoring, *([reading] if reading is not None and open_to_more else [])}
                timeout = None if scoring else _IDLE_SECONDS
                done, _ = await asyncio.wait(waited_for, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                self._check_open()
                if not done:
                    raise DeadlineError(f"no request for {_IDLE_SECONDS:.0f} s; begin a new stream")
                for task in done & scoring:
                    scoring.discard(task)
                    yield task.result()
                if reading in done:
                    request = reading.result()
                    reading = None
                    if request is not None:
                        scoring.add(asyncio.ensure_future(self._answer(request, context)))
                        reading = asyncio.ensure_future(anext(request_iterator, None))
        finally:
            for one in (closing, reading, *scoring):
                if one is not None:
                    one.cancel()

    async def _answer(
        self, request: reward_pb2.ScoreStreamRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ScoreStreamReply:
        try:
            reply = await self._scored(request.request, context)
        except (DataError, ScorerError) as error:
            raise type(error)(f"request {request.request_id}: {error}") from None
        return reward_pb2.ScoreStreamReply(request_id=request.request_id, reply=reply)

    async def _scored(
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ScoreReply:
        num_bytes = request.ByteSize()
        check_size("the request", len(request.items), num_bytes)
        rubric = await self._rubric(request.rubric) if request.rubric else self._core.default
        if is_quick(rubric, len(request.items), num_bytes):
            return self._score(rubric, request, None)
        if self._bytes_in_flight + num_bytes > _MOST_BYTES_IN_FLIGHT:
            raise UnavailableError(f"{self._bytes_in_flight >> 20} MiB of requests are being scored; try again")
        unwanted = threading.Event()
        self._bytes_in_flight += num_bytes
        try:
            left = _seconds_left(context)
            return await self._in_thread(self._scoring, self._score, rubric, request, unwanted, seconds=left)
        finally:
            unwanted.set()  # the caller has gone: the rest of it is not scored
            self._bytes_in_flight -= num_bytes

    def _score(
        self, rubric: CompiledRubric, request: reward_pb2.ScoreRequest, unwanted: threading.Event | None
    ) -> reward_pb2.ScoreReply:
        items, faults = read_items(request.items)
        if unwanted is None:
            scores = self._core.score(rubric, items, "calls")
        else:
            scores = score_in_slices(self._core, rubric, items, "calls", unwanted)
        if self._core.closing and any(one.reason == "infrastructure" for one in scores if isinstance(one, Unscored)):
            raise UnavailableError(_SHUTTING_DOWN)  # and not of the items' own accord
        return reply_of(with_faults(scores, faults) if faults else scores)

    async def _rubric(self, text: str) -> CompiledRubric:
        """Raises ScorerError for a text that is none."""
        known = self._rubrics.get(text)
        if known is not None:
            self._rubrics.move_to_end(text)
            return known
        if len(text.encode()) > MAX_RUBRIC_BYTES:
            raise ScorerError(f"the rubric has {len(text.encode()):,} bytes, at most {MAX_RUBRIC_BYTES:,} are allowed")
        compiled = await self._in_thread(self._scoring, self._core.compile, text, seconds=_LONGEST_CALL_SECONDS)
        self._rubrics[text] = compiled
        if len(self._rubrics) > _RUBRICS_KEPT:
            self._rubrics.popitem(last=False)
        return compiled

    # ---- jobs ----

    async def SubmitJob(
        self, request_iterator: AsyncIterator[reward_pb2.SubmitJobRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[reward_pb2.SubmitJobReply]:
        """Header, chunks, seal; a reply to each once it is stored, and one now and then while a chunk waits for room."""
        job_id = ""
        ends_at = time.monotonic() + _seconds_left(context)
        async with aclosing(self._incoming(request_iterator, ends_at)) as requests:
            async for request in requests:
                part = request.WhichOneof("part")
                if part is None:
                    raise DataError("a message holds neither header, chunk nor seal")
                if (part == "header") != (job_id == ""):
                    raise DataError(
                        "a submission begins with a header, and has one"
                        if job_id
                        else f"a {part} came before the header"
                    )
                if part == "header":
                    job = await self._opened(request.header)
                    job_id = job.job_id
                elif part == "seal":
                    job = await self._stored(self._store.seal, job_id, request.seal.num_chunks)
                else:
                    async with aclosing(self._added(job_id, request.chunk, ends_at)) as progress:
                        async for job in progress:
                            yield submit_reply(job)
                    continue
                yield submit_reply(job)

    async def _opened(self, header: reward_pb2.SubmitJobRequest.Header) -> JobRecord:
        key = header.idempotency_key
        if not key:
            raise DataError(
                "header.idempotency_key is empty: choose one, e.g. a UUID; the same key always means the same job"
            )
        for name, text, most in (("idempotency_key", key, MAX_KEY_BYTES), ("name", header.name, MAX_NAME_BYTES)):
            if len(text.encode()) > most:
                raise DataError(f"header.{name} has {len(text.encode()):,} bytes, at most {most} are allowed")
        if abs(header.priority) > MOST_PRIORITY:
            raise DataError(f"header.priority {header.priority} is not between -{MOST_PRIORITY} and {MOST_PRIORITY}")
        rubric = await self._rubric(header.rubric) if header.rubric else self._core.default
        submit = self._store.submit
        return await self._stored(
            lambda: submit(
                key,
                rubric=header.rubric,
                priority=header.priority,
                name=header.name,
                digest=rubric.digest,  # another service may mean other scorers by the same names
            )
        )

    async def _added(
        self, job_id: str, chunk: reward_pb2.SubmitJobRequest.Chunk, ends_at: float
    ) -> AsyncGenerator[JobRecord]:
        """The job once the chunk is stored; before that, the job now and then."""
        items = chunk.SerializeToString()
        check_size(f"chunk {chunk.index}", len(chunk.items), len(items))
        if not chunk.items:
            raise DataError(f"chunk {chunk.index} has no items")
        heard_at, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        stored, job = await self._stored(self._store.add_chunk, job_id, chunk.index, len(chunk.items), items)
        while not stored:
            await self._sleep(pause, ends_at)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            room, job = await self._stored(self._store.has_room, job_id, len(items))
            if room:
                stored, job = await self._stored(self._store.add_chunk, job_id, chunk.index, len(chunk.items), items)
            elif time.monotonic() - heard_at > _HEARTBEAT_SECONDS:
                heard_at = time.monotonic()
                yield job
        yield job

    async def GetJob(self, request: reward_pb2.GetJobRequest, context: grpc.aio.ServicerContext) -> reward_pb2.Job:
        """The job as it is now."""
        job, _ = await self._stored(self._store.events, request.job_id, 0, 0)
        return job_message(job)

    async def WatchJob(
        self, request: reward_pb2.WatchJobRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[reward_pb2.JobEvent]:
        """Results in the order of their completion, and progress; the last event is that of a job that has ended."""
        cursor, num_bytes = request.after_cursor, _EVENT_BYTES if request.with_results else 0
        told: JobRecord | None = None
        told_at, pause = 0.0, _FIRST_PAUSE_SECONDS
        ends_at = time.monotonic() + _seconds_left(context)
        while True:
            job, results = await self._stored(self._store.events, request.job_id, cursor, num_bytes)
            if cursor > job.num_results:
                raise DataError(f"after_cursor is {cursor}, and job {job.job_id} has had {job.num_results} events")
            for data in results:
                cursor += 1
                part = reward_pb2.JobEvent.Results.FromString(data)
                yield reward_pb2.JobEvent(job=job_message(job), results=part, cursor=cursor)
            if not request.with_results:
                cursor = job.num_results
            if job.ended and cursor == job.num_results:
                yield reward_pb2.JobEvent(job=job_message(job), cursor=cursor)
                return
            if job != told or time.monotonic() - told_at > _HEARTBEAT_SECONDS:
                if not results:
                    yield reward_pb2.JobEvent(job=job_message(job), cursor=cursor)
                pause = _FIRST_PAUSE_SECONDS if job != told else pause
                told, told_at = job, time.monotonic()
            if cursor == job.num_results:
                await self._sleep(pause, ends_at)
                pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)

    async def CancelJob(
        self, request: reward_pb2.CancelJobRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.Job:
        """Results there are stay; the other items are counted as cancelled. A job that has ended stays as it is."""
        return job_message(await self._stored(self._store.cancel, request.job_id))

    async def ListScorers(
        self, request: reward_pb2.ListScorersRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ListScorersReply:
        """What a rubric may name, within which limits, and the rubric of whoever names none."""
        async with self._listing:  # it reads source code, for which older Pythons have no two threads at once
            if self._scorers is None:
                self._scorers = await self._in_thread(
                    self._scoring, scorer_list, self._core, self._reward, self._jobs, seconds=_LONGEST_CALL_SECONDS
                )
            return self._scorers

    async def ListJobs(
        self, request: reward_pb2.ListJobsRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ListJobsReply:
        """The newest jobs, newest first."""
        if request.limit > MAX_LISTED_JOBS:
            raise DataError(f"limit is {request.limit}, at most {MAX_LISTED_JOBS} jobs are listed")
        jobs = await self._stored(self._store.list_jobs, request.limit or _DEFAULT_LISTED_JOBS)
        return reward_pb2.ListJobsReply(jobs=[job_message(job) for job in jobs])

    # ---- waiting ----

    async def _incoming(self, requests: AsyncIterator[Result], ends_at: float) -> AsyncGenerator[Result]:
        """The requests of a stream; ends the wait for one when the server stops, its time is over or nothing has come for long."""
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            while True:
                reading = asyncio.ensure_future(anext(requests, None))
                try:
                    patience = min(_IDLE_SECONDS, max(0.0, ends_at - time.monotonic()))
                    done, _ = await asyncio.wait(
                        {closing, reading}, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                    )
                    self._check_open()
                    _check_time(ends_at)
                    if not done:
                        raise DeadlineError(f"nothing came for {_IDLE_SECONDS:.0f} s; send the header again to go on")
                    request = reading.result()
                finally:
                    reading.cancel()
                if request is None:
                    return
                yield request
        finally:
            closing.cancel()

    async def _sleep(self, seconds: float, ends_at: float) -> None:
        _check_time(ends_at)
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            return
        self._check_open()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise UnavailableError(_SHUTTING_DOWN)

    async def _stored(self, verb: Callable[..., Result], *arguments: Any) -> Result:
        """A verb of the store, which waits for Redis no longer than its own deadlines."""
        return await self._in_thread(self._storing, verb, *arguments, seconds=_LONGEST_CALL_SECONDS)

    async def _in_thread(
        self, threads: ThreadPoolExecutor, call: Callable[..., Result], *arguments: Any, seconds: float
    ) -> Result:
        """The call's result. A service that stops waits for it a little longer."""
        self._check_open()
        future = asyncio.get_running_loop().run_in_executor(threads, call, *arguments)
        closing: asyncio.Future[Any] = asyncio.ensure_future(self._closing.wait())
        either: set[asyncio.Future[Any]] = {future, closing}
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await asyncio.wait({future}, timeout=_GRACE_SECONDS)
            if future.done():
                return future.result()
        finally:
            closing.cancel()
            future.cancel()
        self._check_open()
        raise DeadlineError(f"not done within {seconds:.0f} s")


def _check_time(ends_at: float) -> None:
    if time.monotonic() > ends_at:
        raise DeadlineError("the call has lasted as long as one may; the same call again goes on where this one ends")


def _seconds_left(context: grpc.aio.ServicerContext) -> float:
    left = context.time_remaining()
    return _LONGEST_CALL_SECONDS if left is None else min(left, _LONGEST_CALL_SECONDS)
