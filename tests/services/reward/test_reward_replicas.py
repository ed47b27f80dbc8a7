"""`RewardService` as a process: alone with its own Redis, and as one of several replicas."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.protos import common_pb2, common_pb2_grpc, reward_pb2
from tandem.protos.errors import EnvironmentLackError
from tandem.services.config.jobs import ServiceConfig
from tandem.services.reward.server import SERVICE_NAME
from tandem.services.reward.standalone import main as serve_alone
from tandem.services.rpc.client import connect
from tests.support.reward_process import RewardProcess, running_reward
from tests.support.reward_server import Request, Stub, answers, submission, summary
from tests.support.service_wire import ask_info, health_of
from tests.support.waiting import eventually


def test_replicas_on_one_redis_share_their_jobs(redis_url: str, tmp_path: Path) -> None:
    overrides = ("jobs.namespace=replicas", "reward.num_workers=1")
    one = RewardProcess(tmp_path, *overrides, redis_url=redis_url, name="one")
    two = RewardProcess(tmp_path, *overrides, redis_url=redis_url, name="two")
    try:
        with connect(f"{one.address},{two.address}") as channel:
            stub = Stub(channel)
            (*_, reply) = stub.SubmitJob(submission(*[answers("1", "2")] * 20, key="shared"), timeout=20)
            info = common_pb2_grpc.InfoServiceStub(channel)

            def answered() -> set[float]:
                """The replicas that answer four calls in sequence."""
                return {info.Info(common_pb2.InfoRequest(), timeout=20).started_at for _ in range(4)}

            eventually(lambda: len(answered()) == 2)
            for _ in range(4):  # calls rotate, and each replica knows the job
                assert stub.GetJob(reward_pb2.GetJobRequest(job_id=reply.job.job_id), timeout=20).num_items == 40
            assert len(answered()) == 2
            two.kill()
            for _ in range(10):  # a call to the dead replica is retried at the other
                assert summary(stub.Score(reward_pb2.ScoreRequest(items=answers("1")), timeout=20).items) == [1.0]
            request = reward_pb2.WatchJobRequest(job_id=reply.job.job_id)
            assert list(stub.WatchJob(request, timeout=30))[-1].job.num_scored == 40
    finally:
        two.kill()
        assert one.terminate() == 0


def test_info_answers_before_the_service_is_ready(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[common_pb2.InfoReply] = []

    def too_early(*_: Any, info: Any, **__: Any) -> None:
        told.append(info())
        raise EnvironmentLackError("that was all")

    monkeypatch.setattr("tandem.services.reward.standalone.stop_event", threading.Event)
    monkeypatch.setattr("tandem.services.reward.standalone.ServerThread", too_early)
    with pytest.raises(EnvironmentLackError, match="that was all"):
        serve_alone(ServiceConfig(), host="127.0.0.1", redis_url=redis_url, folder=tmp_path)
    (reply,) = told
    assert (reply.service, reply.activity, reply.figures["workers_replaced"]) == ("reward", "starting", 0)


def test_a_service_runs_alone_with_its_own_redis(tmp_path: Path) -> None:
    with running_reward(tmp_path) as address, connect(address) as channel:
        for name in ("", SERVICE_NAME):
            assert health_of(address, name) == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME)
        assert next(reflection.ServerReflectionInfo(iter([asked]), timeout=20)).HasField("file_descriptor_response")
        stub = Stub(channel)
        (*_, reply) = stub.SubmitJob(submission(answers("1", "2"), key="kept"), timeout=20)
        list(stub.WatchJob(reward_pb2.WatchJobRequest(job_id=reply.job.job_id), timeout=20))
        info = ask_info(address)
        assert (info.service, info.figures["items_ended"], info.figures["jobs"]) == ("reward", 2, 1)
    service = RewardProcess(tmp_path)
    try:
        with connect(service.address) as channel:
            header = Request(header=Request.Header(idempotency_key="kept"))
            (again,) = Stub(channel).SubmitJob(iter([header]), timeout=20)
            assert (again.job.job_id, again.job.state) == (reply.job.job_id, reward_pb2.Job.DONE)
            assert (again.job.num_scored, again.next_chunk) == (2, 1)
    finally:
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(timeout=20) == 0
