"""One peer cannot keep others out: neither with calls, nor with streams, connections or large messages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.protos import common_pb2, reward_pb2, reward_pb2_grpc
from tandem.protos.errors import DeadlineError, SizeError, UnavailableError
from tandem.services.reward.server import RPC_LIMITS
from tandem.services.rpc.client import connect, from_rpc_error, translated
from tandem.services.rpc.limits import RpcLimits
from tandem.services.rpc.server import ServerThread
from tandem.services.rpc.tokens import Role, Tokens, bearer, run_token
from tests.support.raw_http2 import GOAWAY, PING, RawConnection, frame
from tests.support.service_wire import ask_info, health_of
from tests.support.waiting import eventually

SERVICE = "tandem.v1.RewardService"
SECRET = "a secret of the test"
ONE, OTHER = run_token(SECRET, Role.score), run_token(SECRET, Role.operate)


class Reward(reward_pb2_grpc.RewardServiceServicer):
    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreReply:
        return reward_pb2.ScoreReply()

    async def GetJob(self, request: reward_pb2.GetJobRequest, context: Any) -> reward_pb2.Job:
        return reward_pb2.Job()

    async def ScoreStream(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            yield reward_pb2.ScoreStreamReply(request_id=request.request_id)


@contextmanager
def serving(tokens: Tokens | None = None, **limits: Any) -> Iterator[str]:
    server = ServerThread(
        "127.0.0.1",
        0,
        info=common_pb2.InfoReply,
        register=lambda one: reward_pb2_grpc.add_RewardServiceServicer_to_server(Reward(), one),
        service_names=[SERVICE],
        limits=RpcLimits(**limits),
        tokens=tokens,
    )
    try:
        yield server.address
    finally:
        server.stop(0.1)


class Slow:
    """Calls of one peer that send headers, and then nothing until the end of the block."""

    def __init__(self, address: str, token: str = "") -> None:
        self._channel = grpc.insecure_channel(address)
        self._metadata = [bearer(token)] if token else []
        self._never = threading.Event()
        self.calls: list[Any] = []

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._never.set()
        for call in self.calls:
            call.cancel()
        self._channel.close()

    def begin(self, method: str, number: int) -> None:
        def nothing() -> Iterator[bytes]:
            self._never.wait(60.0)
            yield b""

        begin = self._channel.stream_stream(method)
        self.calls += [begin(nothing(), metadata=self._metadata, timeout=60.0) for _ in range(number)]


def score(address: str, token: str = "") -> None:
    options = [("grpc.enable_retries", 0)]
    metadata = [bearer(token)] if token else []
    with grpc.insecure_channel(address, options) as channel, translated():
        reward_pb2_grpc.RewardServiceStub(channel).Score(reward_pb2.ScoreRequest(), metadata=metadata, timeout=20.0)


def stream(address: str, token: str = "") -> None:
    options = [("grpc.enable_retries", 0)]
    metadata = [bearer(token)] if token else []
    with grpc.insecure_channel(address, options) as channel, translated():
        call = reward_pb2_grpc.RewardServiceStub(channel).ScoreStream(iter(()), metadata=metadata, timeout=20.0)
        assert list(call) == []


def is_refused(call: Callable[[], None]) -> bool:
    try:
        call()
    except UnavailableError as error:
        assert "of this caller are being served" in str(error)
        return True
    return False


@pytest.mark.parametrize(("method", "call"), [("Score", score), ("ScoreStream", stream)])
def test_a_peer_that_takes_all_it_can_leaves_places_for_others(method: str, call: Callable[[str, str], None]) -> None:
    with serving(Tokens.of_run(SECRET), max_calls=64) as address, Slow(address, ONE) as slow:
        slow.begin(f"/{SERVICE}/{method}", 60)
        eventually(lambda: is_refused(lambda: call(address, ONE)))
        call(address, OTHER)
        # The streams have places of their own.
        score(address, ONE if method == "ScoreStream" else OTHER)
        with Slow(address, OTHER) as second:
            second.begin(f"/{SERVICE}/{method}", 60)
            eventually(lambda: is_refused(lambda: call(address, OTHER)))
            call(address, run_token(SECRET, Role.internal))


def test_a_peer_alone_may_hold_three_quarters_of_the_places() -> None:
    with serving(max_calls=16) as address, Slow(address) as slow:
        slow.begin(f"/{SERVICE}/Score", 11)
        score(address)
        slow.begin(f"/{SERVICE}/Score", 1)
        eventually(lambda: is_refused(lambda: score(address)))
        with pytest.raises(UnavailableError, match="12 calls of this caller are being served, 4 of 16 places are free"):
            score(address)


def test_callers_of_health_and_reflection_take_no_place_of_others_and_leave_some() -> None:
    """They need no token, so that anybody can begin such calls."""
    with serving(Tokens.of_run(SECRET), max_calls=16) as address, Slow(address) as slow:
        with grpc.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch
            watches = [watch(health_pb2.HealthCheckRequest(), timeout=60.0) for _ in range(16)]
            slow.begin("/grpc.health.v1.Health/Check", 16)
            eventually(lambda: is_refused(lambda: _check(address)))
            score(address, ONE)
            for one in watches:
                one.cancel()
        ask_info(address, ONE)


def _check(address: str) -> None:
    with translated():
        health_of(address, "")


def test_a_stream_of_questions_that_says_nothing_ends() -> None:
    with serving(read_seconds=1.0) as address, grpc.insecure_channel(address) as channel:
        never = threading.Event()

        def nothing() -> Iterator[reflection_pb2.ServerReflectionRequest]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            never.wait(30.0)

        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(nothing(), timeout=30.0)
        assert next(call).HasField("list_services_response")
        with pytest.raises(grpc.RpcError) as ended:
            next(call)
        assert isinstance(from_rpc_error(ended.value), DeadlineError) and "no request for 1 s" in str(ended.value)
        never.set()


def test_a_peer_whose_messages_do_not_arrive_waits_only_for_itself() -> None:
    """So many requests of a peer are read at once that their unread bytes stay below a limit: here, a single one."""
    path = f"/{SERVICE}/Score"
    with (
        serving(Tokens.of_run(SECRET), payload_bytes={path: 256 << 20}) as address,
        connect(address, ONE) as channel,
    ):
        with Slow(address, ONE) as slow:
            slow.begin(path, 1)
            begin = reward_pb2_grpc.RewardServiceStub(channel).Score.future
            calls: list[Any] = []

            def waits() -> bool:
                calls[:] = [begin(reward_pb2.ScoreRequest(), timeout=60.0)]
                for _ in range(20):
                    score(address, OTHER)
                return not calls[0].done()

            eventually(waits)
            for _ in range(100):
                score(address, OTHER)
            assert not calls[0].done()
        assert calls[0].result() == reward_pb2.ScoreReply()


# ---- sizes ----


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(payload_bytes=RPC_LIMITS.payload_bytes) as one:
        yield one


@pytest.mark.parametrize("num_bytes", [(64 << 10) + 1, 1 << 20])
def test_only_methods_with_payloads_take_large_messages(address: str, num_bytes: int) -> None:
    text = "x" * num_bytes
    with connect(address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        item = reward_pb2.ScoreRequest.Item(solution=text)
        stub.Score(reward_pb2.ScoreRequest(items=[item]), timeout=20.0)
        with pytest.raises(SizeError, match="at most 65,536"), translated():
            stub.GetJob(reward_pb2.GetJobRequest(job_id=text), timeout=20.0)
        with pytest.raises(SizeError, match="at most 65,536"), translated():
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=text), timeout=20.0)


def test_a_server_without_payloads_refuses_large_messages_before_it_reads_them() -> None:
    with serving() as address, connect(address) as channel, pytest.raises(SizeError, match="65,536"), translated():
        reward_pb2_grpc.RewardServiceStub(channel).GetJob(
            reward_pb2.GetJobRequest(job_id="x" * (1 << 20)), timeout=20.0
        )


# ---- connections ----


def test_a_reply_that_is_not_read_keeps_its_place_and_no_others() -> None:
    with (
        serving(Tokens.of_run(SECRET), max_calls=16) as address,
        RawConnection(address, window=0) as deaf,
    ):
        for _ in range(40):
            deaf.call(f"/{SERVICE}/Score", ONE)
        eventually(lambda: is_refused(lambda: score(address, ONE)))
        score(address, OTHER)
        deaf.socket.close()
        eventually(lambda: not is_refused(lambda: score(address, ONE)))


def test_a_connection_that_says_nothing_is_closed() -> None:
    with serving(read_seconds=1.0) as address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20.0) as silent:
            while silent.recv(1 << 16):
                pass


def test_a_connection_without_calls_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.rpc.server._IDLE_CONNECTION_SECONDS", 1)
    with serving() as address, RawConnection(address) as idle:
        assert GOAWAY in idle.frames_until_end()


def test_a_connection_that_only_sends_pings_is_closed() -> None:
    with serving() as address, RawConnection(address) as busy:
        busy.socket.sendall(frame(PING, payload=bytes(8)) * 100)
        assert GOAWAY in busy.frames_until_end()


def test_calls_that_are_reset_at_once_take_no_place() -> None:
    with serving(max_calls=16) as address, RawConnection(address) as hasty:
        for _ in range(2000):
            hasty.call(f"/{SERVICE}/Score")
            hasty.reset()
        eventually(lambda: not is_refused(lambda: score(address)))


def test_a_server_has_at_most_half_as_many_connections_as_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.services.rpc.server.resource.getrlimit", lambda _kind: (8, 8))
    with serving() as address:
        with ExitStack() as stack:
            kept = [stack.enter_context(RawConnection(address)) for _ in range(4)]
            assert all(one.socket.recv(9) for one in kept), "they get the server's settings"
            with RawConnection(address) as fifth:
                assert fifth.frames_until_end() == []
        eventually(lambda: not _is_down(address))


def _is_down(address: str) -> bool:
    try:
        score(address)
    except UnavailableError:
        return True
    return False
