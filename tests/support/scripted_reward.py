"""A reward service that implements all of protos/reward.proto, keeps its jobs in memory, and fails on demand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import pytest

from tandem.protos import common_pb2, reward_pb2, reward_pb2_grpc
from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored, UnscoredReason
from tandem.protos.errors import JobError, JobExistsError, ScorerError, UnavailableError, UnknownJobError
from tandem.services.reward.wire import read_items, reply_of, with_faults
from tandem.services.rpc.server import ServerThread

Item = reward_pb2.ScoreRequest.Item
Result = reward_pb2.ScoreReply.Item
_NEVER = 1 << 60


@dataclass(slots=True)
class StoredJob:
    header: reward_pb2.SubmitJobRequest.Header
    job_id: str
    chunks: list[list[Item]] = field(default_factory=list)
    sealed: bool = False
    cancelled: bool = False

    @property
    def items(self) -> list[Item]:
        return [item for chunk in self.chunks for item in chunk]


class ScriptedReward(reward_pb2_grpc.RewardServiceServicer):
    """Each solution is its own score: a number, or the name of a reason. The breakdown counts the items of the same
    group in the request.
    """

    def __init__(self) -> None:
        self.limits = {"max_items_per_request": 1000.0, "max_request_bytes": float(1 << 20)}
        self.requests: list[reward_pb2.ScoreRequest] = []
        self.jobs: dict[str, StoredJob] = {}
        self.breaks: list[int] = []
        """Each entry ends one stream with UNAVAILABLE after that many messages; -1 ends it at once."""
        self.num_streams = 0
        self.num_chunks_received = 0
        self.hang = False
        """Whether Score and ScoreStream never answer."""

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreReply:
        if request.rubric == "wrong":
            raise ScorerError("components: there are none")
        if self.hang:
            await asyncio.sleep(600)
        self.requests.append(request)
        return reward_pb2.ScoreReply(items=score(list(request.items)))

    async def ScoreStream(
        self, requests: AsyncIterator[reward_pb2.ScoreStreamRequest], context: Any
    ) -> AsyncIterator[reward_pb2.ScoreStreamReply]:
        left = self._begin()
        held: list[reward_pb2.ScoreStreamReply] = []
        async for request in requests:
            reply = await self.Score(request.request, context)
            held.append(reward_pb2.ScoreStreamReply(request_id=request.request_id, reply=reply))
            if request.request_id % 2 or len(request.request.items) == 1:  # other replies come after the next one
                for one in reversed(held):
                    left = self._count(left)
                    yield one
                held = []
        for one in held:
            yield one

    async def SubmitJob(
        self, requests: AsyncIterator[reward_pb2.SubmitJobRequest], context: Any
    ) -> AsyncIterator[reward_pb2.SubmitJobReply]:
        left = self._begin()
        job: StoredJob | None = None
        async for request in requests:
            if request.HasField("header"):
                job = self._job_of(request.header)
            assert job is not None
            if request.HasField("chunk"):
                self.num_chunks_received += 1
                if request.chunk.index == len(job.chunks):
                    job.chunks.append(list(request.chunk.items))
                left = self._count(left)  # stored, but the reply is lost
            if request.HasField("seal"):
                assert len(job.chunks) == request.seal.num_chunks
                job.sealed = True
            yield reward_pb2.SubmitJobReply(job=self._message(job), next_chunk=len(job.chunks))

    async def GetJob(self, request: reward_pb2.GetJobRequest, context: Any) -> reward_pb2.Job:
        return self._message(self._find(request.job_id))

    async def WatchJob(self, request: reward_pb2.WatchJobRequest, context: Any) -> AsyncIterator[reward_pb2.JobEvent]:
        job = self._find(request.job_id)
        left = self._begin()
        yield reward_pb2.JobEvent(job=self._message(job), cursor=request.after_cursor)
        numbers = range(len(job.chunks))
        order = [*numbers[1::2], *numbers[::2]]  # results arrive out of order
        starts = list(accumulate(map(len, job.chunks), initial=0))
        for cursor, number in enumerate(order, start=1):
            if cursor <= request.after_cursor or (job.cancelled and number == max(order)):
                continue
            left = self._count(left)
            results = reward_pb2.JobEvent.Results(first_item=starts[number], items=score(job.chunks[number]))
            yield reward_pb2.JobEvent(
                job=self._message(job), cursor=cursor, results=results if request.with_results else None
            )

    async def CancelJob(self, request: reward_pb2.CancelJobRequest, context: Any) -> reward_pb2.Job:
        job = self._find(request.job_id)
        job.cancelled = True
        return self._message(job)

    async def DeleteJob(self, request: reward_pb2.DeleteJobRequest, context: Any) -> reward_pb2.Job:
        job = self._find(request.job_id)
        if not (job.sealed or job.cancelled):
            raise JobError(f"job {job.job_id} is OPEN; cancel it first")
        del self.jobs[job.header.idempotency_key]
        return self._message(job)

    async def ListJobs(self, request: reward_pb2.ListJobsRequest, context: Any) -> reward_pb2.ListJobsReply:
        newest = list(reversed(self.jobs.values()))[: request.limit or 100]
        return reward_pb2.ListJobsReply(jobs=[self._message(job) for job in newest])

    async def ListScorers(self, request: reward_pb2.ListScorersRequest, context: Any) -> reward_pb2.ListScorersReply:
        reply = reward_pb2.ListScorersReply
        scale = reply.Parameter(name="scale", type="number", default="1.0", description="What it is multiplied by.")
        texts = {"name": "number", "version": "1", "summary": "The solution itself.", "isolation": "in_process"}
        info = reply.ScorerInfo(**texts, parameters=[scale])
        return reply(scorers=[info], limits=self.limits, default_rubric='[[components]]\nscorer = "number"\n')

    def _begin(self) -> int:
        self.num_streams += 1
        left = self.breaks.pop(0) if self.breaks else _NEVER
        if left < 0:
            raise UnavailableError("scripted")
        return left

    def _count(self, left: int) -> int:
        """Counts down one message of a stream; breaks the stream at zero."""
        if left == 0:
            raise UnavailableError("scripted")
        return left - 1

    def _job_of(self, header: reward_pb2.SubmitJobRequest.Header) -> StoredJob:
        if header.rubric == "wrong":
            raise ScorerError("components: there are none")
        job = self.jobs.setdefault(header.idempotency_key, StoredJob(header, f"job-{len(self.jobs)}"))
        if job.header.rubric != header.rubric:
            raise JobExistsError(f"key {header.idempotency_key} belongs to {job.job_id} with another rubric")
        return job

    def _find(self, job_id: str) -> StoredJob:
        for job in self.jobs.values():
            if job.job_id == job_id:
                return job
        raise UnknownJobError(f"job {job_id}: there is none")

    def _message(self, job: StoredJob) -> reward_pb2.Job:
        states = reward_pb2.Job
        lost = job.chunks[-1] if job.cancelled else []  # the last chunk of a cancelled job never ran
        results = score(job.items[: len(job.items) - len(lost)]) if job.sealed else []
        values = [one.scored.value for one in results if one.HasField("scored")]
        reasons = Counter(one.unscored.reason for one in results if one.HasField("unscored"))
        state = states.CANCELLED if job.cancelled else states.DONE if job.sealed else states.OPEN
        return reward_pb2.Job(
            job_id=job.job_id,
            idempotency_key=job.header.idempotency_key,
            name=job.header.name,
            state=state,
            priority=job.header.priority,
            num_items=len(job.items),
            num_scored=len(values),
            num_unscored={**reasons, **({"cancelled": len(lost)} if lost else {})},
            num_waiting=0 if job.sealed else len(job.items),
            mean_value=sum(values) / len(values) if values else 0.0,
            created_at=1.0,
            finished_at=2.0 if job.sealed else 0.0,
        )


def score(items: list[Item]) -> list[Result]:
    """The service's scores of the items."""
    groups = Counter(item.group for item in items)
    readable, faults = read_items(items)
    scores = [_score_one(item, groups[item.group]) for item in readable]
    return list(reply_of(with_faults(scores, faults)).items)


def _score_one(item: ScoreItem, group_size: int) -> Score:
    try:
        return Scored(float(item.solution), {"group": float(group_size)})
    except ValueError:
        return Unscored(cast(UnscoredReason, item.solution), "scripted")


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ScriptedReward, str]]:
    """A service and its address."""
    servicer = ScriptedReward()
    with serving(servicer) as address:
        yield servicer, address


@pytest.fixture
def service(scripted: tuple[ScriptedReward, str], monkeypatch: pytest.MonkeyPatch) -> ScriptedReward:
    """The service as new, at the address that clients find. They pause shortly before they resume a stream."""
    servicer, address = scripted
    servicer.__init__()  # type: ignore[misc]
    monkeypatch.setenv("TANDEM_REWARD_ADDRESS", address)
    monkeypatch.setattr("tandem.services.clients.streams._FIRST_PAUSE_SECONDS", 0.001)
    return servicer


@contextmanager
def serving(servicer: ScriptedReward, port: int = 0) -> Iterator[str]:
    """The address of the service while the block runs."""
    server = ServerThread(
        "127.0.0.1",
        port,
        info=common_pb2.InfoReply,
        register=lambda s: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, s),
        service_names=["tandem.v1.RewardService"],
    )
    try:
        yield server.address
    finally:
        server.stop(grace_seconds=0.1)


def items_of(*solutions: object, group: str = "") -> list[ScoreItem]:
    return [ScoreItem("test", str(solution), "1", group=group) for solution in solutions]


def values(scores: Iterable[Score]) -> list[float]:
    return [score.value for score in scores if isinstance(score, Scored)]
