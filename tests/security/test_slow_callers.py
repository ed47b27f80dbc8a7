"""Callers that send headers and then nothing do not keep others out."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from tandem.protos import common_pb2, reward_pb2, reward_pb2_grpc
from tandem.protos.errors import UnavailableError
from tandem.services.rpc.client import translated
from tandem.services.rpc.limits import RpcLimits
from tandem.services.rpc.server import ServerThread

SERVICE = "tandem.v1.RewardService"
MAX_CALLS = 4
HELD_CALLS = 3  # what one caller can hold of them
READ_SECONDS = 1.0


class Reward(reward_pb2_grpc.RewardServiceServicer):
    async def Score(self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext) -> reward_pb2.ScoreReply:
        return reward_pb2.ScoreReply()


@pytest.fixture
def server() -> Iterator[ServerThread]:
    running = ServerThread(
        "127.0.0.1",
        0,
        info=common_pb2.InfoReply,
        register=lambda one: reward_pb2_grpc.add_RewardServiceServicer_to_server(Reward(), one),
        service_names=[SERVICE],
        limits=RpcLimits(max_calls=MAX_CALLS, read_seconds=READ_SECONDS),
    )
    yield running
    running.stop()


def test_calls_without_a_message_end_and_give_their_places_back(server: ServerThread) -> None:
    never = threading.Event()

    def nothing() -> Iterator[bytes]:
        never.wait(30.0)
        yield b""

    no_retries = [("grpc.enable_retries", 0)]
    with grpc.insecure_channel(server.address) as slow, grpc.insecure_channel(server.address, no_retries) as channel:
        score = reward_pb2_grpc.RewardServiceStub(channel).Score
        assert score(reward_pb2.ScoreRequest(), timeout=5.0) == reward_pb2.ScoreReply()
        calls = [slow.stream_unary(f"/{SERVICE}/Score").future(nothing(), timeout=20.0) for _ in range(HELD_CALLS)]
        with pytest.raises(UnavailableError, match=f"{HELD_CALLS} calls of this caller"), translated():
            while True:  # until the server has seen all headers
                score(reward_pb2.ScoreRequest(), timeout=5.0)
        assert [call.code() for call in calls] == [grpc.StatusCode.DEADLINE_EXCEEDED] * len(calls)
        assert [call.details() for call in calls] == ["the request did not arrive within 1 s"] * len(calls)
        assert score(reward_pb2.ScoreRequest(), timeout=5.0) == reward_pb2.ScoreReply()
        never.set()
