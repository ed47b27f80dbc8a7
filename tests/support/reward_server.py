"""Shared by the gRPC tests of the reward service: a core that fails on demand, a server, and short calls for jobs."""

from __future__ import annotations

import json
import queue
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import grpc

from tandem.protos import common_pb2, reward_pb2, reward_pb2_grpc
from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.config import RewardConfig
from tandem.reward.scheduling.cancellation import CANCELLED, CancellationToken
from tandem.reward.scoring import CompiledRubric, Priority, ScoringCore
from tandem.services.config.recipe import JobsConfig
from tandem.services.reward.jobs.store import JobStore
from tandem.services.reward.jobs.worker import JobWorker
from tandem.services.reward.server import RPC_LIMITS, SERVICE_NAME, RewardServicer
from tandem.services.rpc.client import connect
from tandem.services.rpc.limits import RpcLimits
from tandem.services.rpc.server import ServerThread
from tandem.services.rpc.tokens import Tokens
from tests.support.waiting import eventually

EXACT = '[[components]]\nscorer = "exact"\nname = "same"\n'

Request = reward_pb2.SubmitJobRequest
Item = reward_pb2.ScoreRequest.Item
Stub = reward_pb2_grpc.RewardServiceStub


class ScriptedCore(ScoringCore):
    """Scores by text: `wait` blocks until the test continues or the core is closed, `slow` takes a while, `reason*k`
    fails k times with that reason and then scores 1, `bug` raises.

    Other texts are compared with the ground truth; the breakdown holds the number of items scored together. `grouped`:
    every rubric compares the items of a group.
    """

    def __init__(
        self,
        config: RewardConfig | None = None,
        *,
        in_process: bool = False,
        grouped: bool = False,
        num_callers: int | None = None,
    ) -> None:
        super().__init__(config or RewardConfig())
        self._changes = {} if in_process else {"in_process": False, "grouped": grouped, "sole": None}
        self.asked: list[str] = []
        self.batches: list[tuple[Priority, list[ScoreItem]]] = []
        self.go_on = threading.Event()
        self.default = replace(self.default, **self._changes, num_callers=num_callers or self.default.num_callers)

    def compile(self, text: str) -> CompiledRubric:
        return replace(super().compile(text), **self._changes)

    def score(
        self,
        rubric: CompiledRubric,
        items: Sequence[ScoreItem],
        priority: Priority,
        cancellation: CancellationToken | None = None,
        *,
        at_once: bool = False,
        settled: Sequence[ScoreItem] | None = None,
    ) -> list[Score]:
        self.batches.append((priority, list(items)))
        return [self._answer_to(item, len(items), cancellation or CancellationToken()) for item in items]

    def _answer_to(self, item: ScoreItem, together: int, cancellation: CancellationToken) -> Score:
        if cancellation.cancelled:
            return CANCELLED
        self.asked.append(item.solution)
        if item.solution == "slow":
            self.go_on.wait(0.2)
        if item.solution == "wait":
            eventually(lambda: cancellation.cancelled or self.go_on.is_set())
            if cancellation.cancelled:
                return CANCELLED
        if item.solution == "bug":
            raise ZeroDivisionError("a bug of ours")
        if self.closing and item.solution == "wait":
            return Unscored("infrastructure", "closing")
        reason, star, times = item.solution.partition("*")
        if star and self.asked.count(item.solution) <= int(times):
            return Unscored(reason, f"scripted {reason}")  # type: ignore[arg-type]
        return Scored(float(bool(star) or item.solution == item.ground_truth), {"together": float(together)})

    def close(self) -> None:
        super().close()
        if hasattr(self, "go_on"):
            self.go_on.set()


class Calls:
    """Short calls to the reward service at an address. A context manager."""

    def __init__(self, address: str, token: str = "") -> None:
        self.channel = connect(address, token)
        self.stub = Stub(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.channel.close()

    def score(self, items: Sequence[Item], rubric: str = "") -> list[reward_pb2.ScoreReply.Item]:
        reply = self.stub.Score(reward_pb2.ScoreRequest(items=items, rubric=rubric), timeout=20)
        assert len(reply.items) == len(items)
        return list(reply.items)

    def submit(
        self, *chunks: Sequence[Item], key: str = "", rubric: str = "", priority: int = 0
    ) -> reward_pb2.SubmitJobReply:
        """Submits a whole job and returns the last reply."""
        return self.send(submission(*chunks, key=key, rubric=rubric, priority=priority))[-1]

    def send(self, requests: Iterable[Request]) -> list[reward_pb2.SubmitJobReply]:
        """The replies to the messages of a submission."""
        return list(self.stub.SubmitJob(iter(requests), timeout=60))

    def open(self, key: str) -> reward_pb2.SubmitJobReply:
        """The reply to the header of a submission alone."""
        (reply,) = self.send([Request(header=Request.Header(idempotency_key=key))])
        return reply

    def job(self, job_id: str) -> reward_pb2.Job:
        return self.stub.GetJob(reward_pb2.GetJobRequest(job_id=job_id), timeout=60)

    def cancel(self, job_id: str) -> reward_pb2.Job:
        return self.stub.CancelJob(reward_pb2.CancelJobRequest(job_id=job_id), timeout=20)

    def watch(self, job_id: str, *, after_cursor: int = 0, with_results: bool = True) -> list[reward_pb2.JobEvent]:
        request = reward_pb2.WatchJobRequest(job_id=job_id, with_results=with_results, after_cursor=after_cursor)
        return list(self.stub.WatchJob(request, timeout=60))

    def results(self, job_id: str) -> list[reward_pb2.ScoreReply.Item]:
        """The results of a job, in the order of its items, after it has ended; every item has one."""
        found: dict[int, reward_pb2.ScoreReply.Item] = {}
        for event in self.watch(job_id):
            for number, item in enumerate(event.results.items, event.results.first_item):
                assert number not in found, "a result is told once"
                found[number] = item
        assert sorted(found) == list(range(len(found)))
        return [found[number] for number in range(len(found))]


class Service(Calls):
    """A server on its own port with a job worker, and a stub that calls it."""

    def __init__(
        self,
        url: str,
        core: ScoringCore | None = None,
        *,
        reward: RewardConfig | None = None,
        jobs: JobsConfig | None = None,
        with_jobs: bool = True,
        limits: RpcLimits = RPC_LIMITS,
        tokens: Tokens | None = None,
    ) -> None:
        reward = reward or RewardConfig()
        self.core = core = core or ScoringCore(reward)
        self.jobs = (jobs or JobsConfig()).in_namespace(f"test-{uuid.uuid4().hex[:12]}")
        self.store = JobStore(url, self.jobs)
        self.servicer = RewardServicer(core, self.store, reward)
        self.stop = threading.Event()
        self.server = ServerThread(
            "127.0.0.1",
            0,
            info=common_pb2.InfoReply,
            register=lambda one: reward_pb2_grpc.add_RewardServiceServicer_to_server(self.servicer, one),
            service_names=[SERVICE_NAME],
            on_stop=self.servicer.end_streams,
            limits=limits,
            tokens=tokens,
        )
        self.job_worker = JobWorker(self.store, core, worker="one", reward=reward, stop=self.stop)
        self._with_jobs = with_jobs
        if with_jobs:
            self.job_worker.__enter__()
        super().__init__(self.server.address)

    def end(self) -> None:
        self.server.stop(1.0)
        self.core.close()
        try:
            if self._with_jobs:
                self.job_worker.__exit__(None, None, None)
        finally:
            self.servicer.close()
            self.channel.close()
            self.store.close()


@contextmanager
def serving(url: str, core: ScoringCore | None = None, **options: Any) -> Iterator[Service]:
    """A running service; an error of its job worker is raised at the end."""
    service = Service(url, core, **options)
    try:
        yield service
    finally:
        service.end()


class Feed:
    """Requests of a stream, provided one by one."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, *requests: Any) -> None:
        for request in requests:
            self._waiting.put(request)

    def close(self) -> None:
        self._waiting.put(None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._waiting.get, None)


def submission(
    *chunks: Sequence[Item], key: str = "", rubric: str = "", priority: int = 0, first: int = 0
) -> Iterator[Request]:
    """The messages of a job whose first chunk has the number `first`."""
    header = Request.Header(idempotency_key=key or uuid.uuid4().hex, rubric=rubric, priority=priority)
    yield Request(header=header)
    for index, items in enumerate(chunks, first):
        yield Request(chunk=Request.Chunk(index=index, items=items))
    yield Request(seal=Request.Seal(num_chunks=first + len(chunks)))


def answers(*texts: str, truth: str = "1", group: str = "") -> list[Item]:
    return [Item(solution=text, ground_truth=json.dumps(truth), group=group) for text in texts]


def summary(items: Sequence[reward_pb2.ScoreReply.Item]) -> list[float | str]:
    """The value or the reason of each item."""
    return [one.scored.value if one.WhichOneof("result") == "scored" else one.unscored.reason for one in items]


def raw_call(channel: grpc.Channel, method: str, messages: Iterable[bytes], seconds: float = 20.0) -> list[bytes]:
    """The replies to encoded messages."""
    path, parts = f"/{SERVICE_NAME}/{method}", list(messages)
    if method in ("SubmitJob", "ScoreStream"):
        return list(channel.stream_stream(path)(iter(parts), timeout=seconds))
    if method == "WatchJob":
        return list(channel.unary_stream(path)(b"".join(parts), timeout=seconds))
    return [channel.unary_unary(path)(b"".join(parts), timeout=seconds)]


def code_of(error: grpc.RpcError) -> str:
    return str(error.code().name)
