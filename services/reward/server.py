"""gRPC `RewardService`: scores, durable jobs, and the list of scorers. Every wait has a deadline."""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar, cast

import grpc

from tandem.protos import reward_pb2, reward_pb2_grpc
from tandem.protos.errors import DataError, DeadlineError, UserError
from tandem.protos.secret_values import masked
from tandem.reward.config import RewardConfig
from tandem.reward.options.tree import toml_of
from tandem.reward.scoring import ScoringCore
from tandem.reward.text.values import MAX_ACCEPTED
from tandem.services.config.recipe import JobsConfig
from tandem.services.reward.jobs.store import EVERYBODY, JobRecord, JobStore
from tandem.services.reward.request_scorer import DEADLINE_MARGIN_SECONDS, MAX_RUBRIC_BYTES, RequestScorer
from tandem.services.reward.shutdown import IDLE_SECONDS, Shutdown, seconds_left
from tandem.services.reward.undecoded_text import READERS
from tandem.services.reward.wire import (
    MAX_CARRIED_BYTES,
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_REQUEST_BYTES,
    check_size,
    ends_with_error,
    error_message,
)
from tandem.services.rpc.limits import RpcLimits, current_caller
from tandem.services.rpc.tokens import Role

SERVICE_NAME = "tandem.v1.RewardService"
RPC_LIMITS = RpcLimits(payload_bytes=dict.fromkeys(READERS, MAX_CARRIED_BYTES), readers=READERS)
"""For the server on which the servicer is registered."""
MAX_KEY_BYTES = 200
MAX_NAME_BYTES = 200
MOST_PRIORITY = 100
"""Priorities go from minus this to this."""
MAX_LISTED_JOBS = 1000
REQUESTS_PER_STREAM = 8
"""Requests of a ScoreStream that are scored at once. It reads no more than these."""

_DEFAULT_LISTED_JOBS = 100
_HEARTBEAT_SECONDS = 10.0
_STORING_THREADS = 16
_EVENT_BYTES = 1 << 20  # results read at once
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 0.5

Result = TypeVar("Result")


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """The service of reward.proto. The server calls `end_streams` when it begins to stop; `close` comes after that."""

    def __init__(self, core: ScoringCore, store: JobStore, reward: RewardConfig) -> None:
        self._core = core
        self._store = store
        self._reward = reward
        self._scorers: reward_pb2.ListScorersReply | None = None
        self._listing = asyncio.Lock()
        self._storing = ThreadPoolExecutor(_STORING_THREADS, "store")
        self._shutdown = Shutdown()
        self._scorer = RequestScorer(core, self._shutdown)

    def end_streams(self) -> None:
        """Ends all streams with UNAVAILABLE. Called on the event loop."""
        self._shutdown.closing.set()

    def close(self) -> None:
        """Starts no more work in threads. Close the core first, which ends calls that hang in it."""
        self._scorer.close()
        self._storing.shutdown(wait=False, cancel_futures=True)

    async def Score(self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext) -> reward_pb2.ScoreReply:
        """Returns one result for each item, in order. An item that cannot be read is unscored (`invalid_input`)."""
        return await self._scorer.score(request, seconds_left(context))

    async def ScoreStream(
        self, request_iterator: AsyncIterator[reward_pb2.ScoreStreamRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[reward_pb2.ScoreStreamReply]:
        """Scores a stream of requests, several at a time. A refused request ends the stream."""
        closing = asyncio.ensure_future(self._shutdown.closing.wait())
        reading: asyncio.Future[Any] | None = asyncio.ensure_future(anext(request_iterator, None))
        scoring: dict[asyncio.Future[Any], int] = {}
        try:
            while reading is not None or scoring:
                may_read = reading is not None and len(scoring) < REQUESTS_PER_STREAM
                pending = {closing, *scoring, *([reading] if reading is not None and may_read else [])}
                timeout = None if scoring else IDLE_SECONDS
                done, _ = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                self._shutdown.check()
                if not done:
                    raise DeadlineError(f"no request for {IDLE_SECONDS:.0f} s; begin a new stream")
                for task in done & scoring.keys():
                    request_id = scoring.pop(task)
                    error = task.exception()
                    if isinstance(error, UserError):
                        error = type(error)(f"request {request_id}: {error}")
                        yield reward_pb2.ScoreStreamReply(request_id=request_id, error=error_message(error))
                        raise error
                    yield reward_pb2.ScoreStreamReply(request_id=request_id, reply=task.result())
                if reading in done:
                    request = reading.result()
                    reading = None
                    if request is not None:
                        score = self._scorer.score(request.request, seconds_left(context))
                        scoring[asyncio.ensure_future(score)] = request.request_id
                        reading = asyncio.ensure_future(anext(request_iterator, None))
        finally:
            for one in (closing, reading, *scoring):
                if one is not None:
                    one.cancel()

    @ends_with_error(reward_pb2.SubmitJobReply)
    async def SubmitJob(
        self, request_iterator: AsyncIterator[reward_pb2.SubmitJobRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[reward_pb2.SubmitJobReply]:
        """Stores header, chunks and seal. Replies after each, and every few seconds while a chunk waits for room."""
        job_id = ""
        ends_at = time.monotonic() + seconds_left(context)
        async with aclosing(self._shutdown.requests(request_iterator, ends_at)) as requests:
            async for request in requests:
                part = request.WhichOneof("part")
                if part is None:
                    raise DataError("a message holds neither header, chunk nor seal")
                if part == "header" and job_id:
                    raise DataError("a submission begins with a header, and has one")
                if part != "header" and not job_id:
                    raise DataError(f"a {part} came before the header")
                if part == "chunk":
                    async with aclosing(self._add(job_id, request.chunk, ends_at)) as progress:
                        async for job in progress:
                            yield reward_pb2.SubmitJobReply(job=job.to_proto(), next_chunk=job.num_chunks)
                    continue
                if part == "header":
                    job = await self._open(request.header)
                    job_id = job.job_id
                else:
                    job = await self._stored(self._store.seal, job_id, request.seal.num_chunks)
                yield reward_pb2.SubmitJobReply(job=job.to_proto(), next_chunk=job.num_chunks)

    async def _open(self, header: reward_pb2.SubmitJobRequest.Header) -> JobRecord:
        key = header.idempotency_key
        if not key:
            raise DataError("header.idempotency_key is empty: choose one, e.g. a UUID; the same key is the same job")
        for name, text, most in (("idempotency_key", key, MAX_KEY_BYTES), ("name", header.name, MAX_NAME_BYTES)):
            if len(text.encode()) > most:
                raise DataError(f"header.{name} has {len(text.encode()):,} bytes, at most {most} are allowed")
        if abs(header.priority) > MOST_PRIORITY:
            raise DataError(f"header.priority {header.priority} is not between -{MOST_PRIORITY} and {MOST_PRIORITY}")
        rubric = await self._scorer.rubric(header.rubric) if header.rubric else self._core.default
        submit = partial(self._store.submit, rubric=header.rubric, priority=header.priority, name=header.name)
        # With a digest, because another service may mean other scorers by the same names.
        return await self._stored(partial(submit, key, digest=rubric.digest, owner=current_caller().name))

    async def _add(
        self, job_id: str, chunk: reward_pb2.SubmitJobRequest.Chunk, ends_at: float
    ) -> AsyncGenerator[JobRecord]:
        """Yields the job once the chunk is stored, and every few seconds while it waits for room."""
        items = chunk.SerializeToString()
        check_size(f"chunk {chunk.index}", len(chunk.items), len(items))
        if not chunk.items:
            raise DataError(f"chunk {chunk.index} has no items")
        replied_at, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        stored, job = await self._stored(self._store.add_chunk, job_id, chunk.index, len(chunk.items), items)
        while not stored:
            await self._shutdown.sleep(pause, ends_at)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            room, job = await self._stored(self._store.has_room, job_id, len(items))
            if room:
                stored, job = await self._stored(self._store.add_chunk, job_id, chunk.index, len(chunk.items), items)
            elif time.monotonic() - replied_at > _HEARTBEAT_SECONDS:
                replied_at = time.monotonic()
                yield job
        yield job

    async def GetJob(self, request: reward_pb2.GetJobRequest, context: grpc.aio.ServicerContext) -> reward_pb2.Job:
        job, _ = await self._stored(self._store.events, request.job_id, 0, 0, _sees())
        return job.to_proto()

    @ends_with_error(reward_pb2.JobEvent)
    async def WatchJob(
        self, request: reward_pb2.WatchJobRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[reward_pb2.JobEvent]:
        """Sends results in the order of their completion, and progress. The last event shows the job that has ended."""
        cursor, num_bytes = request.after_cursor, _EVENT_BYTES if request.with_results else 0
        sent: JobRecord | None = None
        sent_at, pause = 0.0, _FIRST_PAUSE_SECONDS
        ends_at, caller = time.monotonic() + seconds_left(context), _sees()
        while True:
            job, results = await self._stored(self._store.events, request.job_id, cursor, num_bytes, caller)
            if cursor > job.num_results:
                raise DataError(f"after_cursor is {cursor}, and job {job.job_id} has had {job.num_results} events")
            for data in results:
                cursor += 1
                part = reward_pb2.JobEvent.Results.FromString(data)
                yield reward_pb2.JobEvent(job=job.to_proto(), results=part, cursor=cursor)
            cursor = cursor if request.with_results else job.num_results
            if job.ended and cursor == job.num_results:
                yield reward_pb2.JobEvent(job=job.to_proto(), cursor=cursor)
                return
            if job != sent or time.monotonic() - sent_at > _HEARTBEAT_SECONDS:
                if not results:
                    yield reward_pb2.JobEvent(job=job.to_proto(), cursor=cursor)
                pause = _FIRST_PAUSE_SECONDS if job != sent else pause
                sent, sent_at = job, time.monotonic()
            if cursor == job.num_results:
                await self._shutdown.sleep(pause, ends_at)
                pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)

    async def CancelJob(
        self, request: reward_pb2.CancelJobRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.Job:
        return (await self._stored(self._store.cancel, request.job_id, _sees())).to_proto()

    async def DeleteJob(
        self, request: reward_pb2.DeleteJobRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.Job:
        return (await self._stored(self._store.delete, request.job_id, _sees())).to_proto()

    async def ListScorers(
        self, request: reward_pb2.ListScorersRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ListScorersReply:
        async with self._listing:  # it reads source code, which older Pythons cannot do in two threads at once
            if self._scorers is None:
                self._scorers = await self._scorer.look_up(scorer_list, self._core, self._reward, self._store.config)
            return self._scorers

    async def ListJobs(
        self, request: reward_pb2.ListJobsRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ListJobsReply:
        if request.limit > MAX_LISTED_JOBS:
            raise DataError(f"limit is {request.limit}, at most {MAX_LISTED_JOBS} jobs are listed")
        jobs = await self._stored(self._store.list_jobs, request.limit or _DEFAULT_LISTED_JOBS, _sees())
        return reward_pb2.ListJobsReply(jobs=[job.to_proto() for job in jobs])

    async def _stored(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Runs a call of the store in a thread. The store has its own deadlines."""
        return await self._shutdown.run_in(self._storing, call, *arguments)


def _sees() -> str:
    """Whose jobs the caller sees: its own, or with the role `operate` those of everybody."""
    caller = current_caller()
    return EVERYBODY if caller.role.includes(Role.operate) else caller.name


def scorer_list(core: ScoringCore, reward: RewardConfig, jobs: JobsConfig) -> reward_pb2.ListScorersReply:
    """The scorers that a rubric may name, the limits, and the service's own rubric. The same for a service's life."""
    reply = reward_pb2.ListScorersReply
    limits: dict[str, float] = {
        "max_items_per_request": MAX_ITEMS,
        "max_request_bytes": MAX_REQUEST_BYTES,
        "max_rubric_bytes": MAX_RUBRIC_BYTES,
        "max_json_depth": MAX_DEPTH,
        "max_accepted_answers": MAX_ACCEPTED,
        "max_requests_per_stream": REQUESTS_PER_STREAM,
        "max_calls": RPC_LIMITS.max_calls,
        "max_streams": RPC_LIMITS.max_streams,
        "max_listed_jobs": MAX_LISTED_JOBS,
        "max_unscored_bytes": jobs.max_unscored_bytes,
        "max_unscored_bytes_per_job": jobs.max_unscored_bytes // 2,
        "max_result_bytes": jobs.result_bytes,
        "max_result_bytes_per_job": jobs.result_bytes // 2,
        "deadline_margin_seconds": DEADLINE_MARGIN_SECONDS,
        "infrastructure_attempts": reward.infrastructure_attempts,
        "retention_seconds": jobs.retention_seconds,
        "timeout_seconds": reward.timeout_seconds,
        "cpu_seconds": reward.cpu_seconds,
        "memory_bytes": reward.limits.memory_bytes,
        "processes": reward.limits.processes,
        "open_files": reward.limits.open_files,
        "output_bytes": reward.limits.output_bytes,
        "num_workers": reward.num_workers,
    }
    scorers = [reply.ScorerInfo(**asdict(info)) for info in core.scorers()]
    return reply(scorers=scorers, limits=limits, default_rubric=_shown(core.default.text))


def _shown(rubric: str) -> str:
    """The rubric's text; one that holds secrets is written anew with these masked."""
    values = tomllib.loads(rubric)
    shown = cast("dict[str, object]", masked(values))
    return rubric if shown == values else "".join(f"{key} = {toml_of(value)}\n" for key, value in shown.items())
