"""`RewardService` as a process: alone with its own Redis, as one of several replicas, and beside a run's groups."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.protos import common_pb2, common_pb2_grpc, reward_pb2
from tandem.protos.errors import (
    EnvironmentLackError,
)
from tandem.services.config import dump_recipe, parse_recipe
from tandem.services.config.jobs import ServiceConfig
from tandem.services.reward.server import SERVICE_NAME
from tandem.services.reward.standalone import main as serve_alone
from tandem.services.rpc.client import connect
from tests.support.reward_ring import answers as ring_answers
from tests.support.reward_ring import collect, generate, run_of
from tests.support.reward_server import (
    EXACT,
    ROOT,
    Replica,
    Request,
    Stub,
    answers,
    submission,
    summary,
    until,
)


def test_replicas_on_one_redis_share_their_jobs(redis_url: str, tmp_path: Path) -> None:
    overrides = ("jobs.namespace=replicas", "reward.num_workers=1")
    one = Replica(tmp_path, *overrides, redis_url=redis_url, name="one")
    two = Replica(tmp_path, *overrides, redis_url=redis_url, name="two")
    try:
        with connect(f"{one.address},{two.address}") as channel:
            stub = Stub(channel)
            (*_, reply) = stub.SubmitJob(submission(*[answers("1", "2")] * 20, key="shared"), timeout=20)
            info = common_pb2_grpc.InfoServiceStub(channel)

            def answered() -> set[float]:
                """The replicas that answer four calls in sequence."""
                return {info.Info(common_pb2.InfoRequest(), timeout=20).started_at for _ in range(4)}

            until(lambda: len(answered()) == 2)
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
    replica = Replica(tmp_path)
    try:
        with connect(replica.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", SERVICE_NAME):
                reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME)
            assert next(reflection.ServerReflectionInfo(iter([asked]), timeout=20)).HasField("file_descriptor_response")
            stub = Stub(channel)
            (*_, reply) = stub.SubmitJob(submission(answers("1", "2"), key="kept"), timeout=20)
            list(stub.WatchJob(reward_pb2.WatchJobRequest(job_id=reply.job.job_id), timeout=20))
            info = common_pb2_grpc.InfoServiceStub(channel).Info(common_pb2.InfoRequest(), timeout=20)
            assert (info.service, info.figures["items_ended"], info.figures["jobs"]) == ("reward", 2, 1)
    finally:
        assert replica.terminate() == 0
    replica = Replica(tmp_path)
    try:
        with connect(replica.address) as channel:
            header = Request(header=Request.Header(idempotency_key="kept"))
            (again,) = Stub(channel).SubmitJob(iter([header]), timeout=20)
            assert (again.job.job_id, again.job.state) == (reply.job.job_id, reward_pb2.Job.DONE)
            assert (again.job.num_scored, again.next_chunk) == (2, 1)
    finally:
        replica.process.send_signal(signal.SIGINT)
        assert replica.process.wait(timeout=20) == 0


RUN = """
import sys
from tandem.services.config import load_resolved
from tandem.services.process import die_with_parent, run_service
from tandem.services.reward.service import main
die_with_parent()
run_service(lambda: main(load_resolved(sys.argv[1]), sys.argv[2]))
"""


def test_a_run_serves_calls_and_jobs_beside_its_groups(redis_url: str, tmp_path: Path) -> None:
    buffer = run_of(redis_url)
    sections = {"run": {"run_id": buffer.run_id}, "model": {"path": "x"}, "data": {"train_file": "x"}}
    (tmp_path / "config.json").write_text(dump_recipe(parse_recipe(sections)))
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path / "config.json"), redis_url], cwd=ROOT)
    try:
        until(lambda: "reward" in buffer.services())
        with connect(buffer.services()["reward"]) as channel:
            stub = Stub(channel)
            (*_, reply) = stub.SubmitJob(submission(answers("1", "2"), rubric=EXACT), timeout=20)
            (group_id,) = generate(buffer, [ring_answers("1", "2")])
            assert [row.reward for row in collect(buffer, 1)[group_id].scored_rows] == [1.0, 0.0]
            events = list(stub.WatchJob(reward_pb2.WatchJobRequest(job_id=reply.job.job_id), timeout=20))
            assert (events[-1].job.num_scored, events[-1].job.mean_value) == (2, 0.5)
            assert summary(stub.Score(reward_pb2.ScoreRequest(items=answers("1")), timeout=20).items) == [1.0]
            info = common_pb2_grpc.InfoServiceStub(channel).Info(common_pb2.InfoRequest(), timeout=20)
            assert (info.figures["groups_completed"], info.figures["jobs:items_scored"]) == (1, 2)
        process.terminate()
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
    assert buffer.verify() == []
