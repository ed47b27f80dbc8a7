"""Evaluation over gRPC with samplers and a scorer that fail on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import grpc
import numpy as np
import pytest

from tandem.protos import common_pb2, reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import UnavailableError
from tandem.protos.types import Prompt, SamplingParameters
from tandem.services.rpc.server import ServerThread
from tandem.services.trainer.evaluation import EvaluationEndpoints, evaluate

VERSION = 3


class Answers(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers every prompt with its first token id, labelled with the given version."""

    def __init__(self, version: int = VERSION, failures: int = 0) -> None:
        self.version = version
        self.failures = failures
        self.requests: list[rollout_pb2.GenerateRequest] = []

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.GenerateReply:
        self.requests.append(request)
        if self.failures > 0:
            self.failures -= 1
            raise UnavailableError("scripted")
        span = common_pb2.VersionSpan(first_token=0, incarnation=1, policy_version=self.version)
        reply = rollout_pb2.GenerateReply()
        for item in request.items:
            reply.items.add().samples.add(text=str(np.frombuffer(item.prompt_ids, "<i4")[0]), spans=[span])
        return reply


class Judge(reward_pb2_grpc.RewardServiceServicer):
    """Scores 1 for an even answer, 0 for an odd one, a time-out for multiples of 10."""

    async def Score(self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext) -> reward_pb2.ScoreReply:
        reply = reward_pb2.ScoreReply()
        for number in (int(item.solution) for item in request.items):
            if number % 10 == 0:
                reply.items.add().unscored.reason = "timeout"
            else:
                reply.items.add().scored.value = float(number % 2 == 0)
        return reply


@contextmanager
def serving(*samplers: Answers) -> Iterator[EvaluationEndpoints]:
    with ExitStack() as stack:

        def serve(add: Callable[..., None], servicer: object) -> str:
            server = ServerThread("127.0.0.1", 0, info=common_pb2.InfoReply, register=partial(add, servicer))
            stack.callback(server.stop, grace_seconds=0.0)
            return server.address

        addresses = [serve(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, sampler) for sampler in samplers]
        judge = serve(reward_pb2_grpc.add_RewardServiceServicer_to_server, Judge())
        yield EvaluationEndpoints(addresses, judge, token="", credentials=None, max_tokens=8)


def prompts(count: int) -> list[Prompt]:
    sampling = SamplingParameters(temperature=0.0)
    return [Prompt(0, index, np.array([index + 1], np.int32), 1, sampling, ground_truth="?") for index in range(count)]


def test_rows_without_a_score_are_counted_and_not_averaged_in() -> None:
    one, two = Answers(), Answers()
    with serving(one, two) as endpoints:
        result = evaluate(VERSION, prompts(200), endpoints)
    assert (result.num_rows, result.num_scored, result.unscored) == (200, 180, {"timeout": 20})
    assert result.accuracy == pytest.approx(80 / 180)
    assert result.mean_reward == pytest.approx(80 / 180)
    requests = one.requests + two.requests
    assert one.requests and two.requests, "both samplers were asked"
    assert sum(len(request.items) for request in requests) == 200
    assert {(request.sampling.temperature, request.required_version) for request in requests} == {(0.0, VERSION)}


def test_a_failed_chunk_is_retried_on_another_sampler() -> None:
    broken = Answers(failures=1000)
    with serving(broken, Answers()) as endpoints:
        result = evaluate(VERSION, prompts(100), endpoints)
    assert (result.num_scored, result.unscored) == (90, {"timeout": 10})


def test_answers_of_another_version_are_refused() -> None:
    with serving(Answers(version=VERSION + 1)) as endpoints:
        result = evaluate(VERSION, prompts(10), endpoints)
        assert (result.accuracy, result.num_scored, result.unscored) == (None, 0, {"NotAdmittedError": 10})
        assert evaluate(None, prompts(10), endpoints).num_scored == 9, "no version asked for: any will do"


def test_without_samplers_nothing_is_scored() -> None:
    with serving() as endpoints:
        result = evaluate(VERSION, prompts(3), endpoints)
    assert (result.mean_reward, result.unscored) == (None, {"no_sampler": 3})
