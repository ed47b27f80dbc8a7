"""The parts `calls` and `security` of benchmarks/reward.py: throughput and latency of `RewardService.Score`."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc

from benchmarks.service_process import listening, reward_service
from tandem.protos import reward_pb2, reward_pb2_grpc
from tandem.services.commands.certs import write_certificates
from tandem.services.rpc.certificates import CA_FILE, channel_credentials
from tandem.services.rpc.client import TokenChannel, connect_async
from tandem.services.rpc.tokens import Role, add_token

SCORER = 'scorer = "exact"\narguments = { last_line = true }'
BATCH, IN_FLIGHT = 64, 8
ROUNDS, CALLS = 25, 500
PAIRS, PAIR_CALLS = 3, 200
WINDOWS, WINDOW_CALLS = 45, 800

ECHO = """
import asyncio, sys
import grpc
from tandem.protos import reward_pb2

async def echo(request, context):
    return request

async def main():
    server = grpc.aio.server()
    kind = reward_pb2.ScoreRequest
    handler = grpc.unary_unary_rpc_method_handler(echo, kind.FromString, kind.SerializeToString)
    service = grpc.method_handlers_generic_handler("tandem.v1.RewardService", {"Score": handler})
    server.add_generic_rpc_handlers([service])
    print("reward: listens on 127.0.0.1:%d" % server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


def measure_calls() -> dict[str, Any]:
    """Medians of rates (items per second) and of their ratios over rounds in which echo and service alternate, and
    medians of latencies over windows. A short stall of the machine affects only one window.
    """
    batch = _batch()
    single = reward_pb2.ScoreRequest(items=batch.items[:1])
    with (
        reward_service(2, SCORER) as (address, _),
        listening([sys.executable, "-c", ECHO]) as (echo_address, _),
    ):
        rounds = asyncio.run(_rates(address, echo_address, batch, single))
        rate = statistics.median(one["score"] for one in rounds)
        windows = [sorted(one) for one in asyncio.run(_half_load(address, batch, rate / BATCH / 2))]
    return {
        "batch_bytes": batch.ByteSize(),
        "items_per_second": rate,
        "share_of_echo": statistics.median(one["score"] / one["echo"] for one in rounds),
        "times_single_calls": statistics.median(one["score"] / one["single"] for one in rounds),
        "p50_ms": 1e3 * statistics.median(one[len(one) // 2] for one in windows),
        "p99_ms": 1e3 * statistics.median(one[int(0.99 * len(one))] for one in windows),
        "p99_times_p50": statistics.median(one[int(0.99 * len(one))] / one[len(one) // 2] for one in windows),
    }


def measure_security() -> dict[str, Any]:
    """Medians over rounds in which services with TLS and tokens and services without either alternate. Several of each
    kind, because two equal processes differ by up to a tenth.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-reward-") as folder, ExitStack() as stack:
        certificates, tokens = Path(folder) / "certificates", Path(folder) / "tokens.toml"
        write_certificates(certificates, [], 1)
        token = add_token(tokens, "bench", Role.score)
        options = ["--certificates", str(certificates), "--token-file", str(tokens)]
        kinds = ([], options) * PAIRS
        addresses = [stack.enter_context(reward_service(2, SCORER, kind))[0] for kind in kinds]
        credentials = channel_credentials(certificates / CA_FILE)
        rounds = asyncio.run(_pair_rates(addresses[::2], addresses[1::2], credentials, token))
    return {
        "calls_per_second": statistics.median(secure for _, secure in rounds),
        "share_of_plain": statistics.median(secure / plain for plain, secure in rounds),
    }


async def _pair_rates(
    plain: Sequence[str], secure: Sequence[str], credentials: grpc.ChannelCredentials, token: str
) -> list[tuple[float, float]]:
    """Calls per second of all plain and of all secure services, by round."""
    batch = _batch()
    async with AsyncExitStack() as stack:
        calls = []
        for plain_address, secure_address in zip(plain, secure, strict=True):
            channel = await stack.enter_async_context(connect_async(plain_address))
            calls.append((reward_pb2_grpc.RewardServiceStub(channel).Score, 0))
            channel = await stack.enter_async_context(connect_async(secure_address, credentials))
            calls.append((reward_pb2_grpc.RewardServiceStub(TokenChannel(channel, token)).Score, 1))
        rounds = []
        for number in range(ROUNDS + 1):
            seconds = [0.0, 0.0]
            for call, kind in calls if number % 2 else calls[::-1]:
                seconds[kind] += await _seconds(call, batch, PAIR_CALLS)
            rounds.append((PAIRS * PAIR_CALLS / seconds[0], PAIRS * PAIR_CALLS / seconds[1]))
        return rounds[1:]  # the first one warms up


def _batch() -> reward_pb2.ScoreRequest:
    rng = random.Random(0)
    texts = [" ".join(f"word{rng.randrange(1000)}" for _ in range(60)) + f"\n{n}" for n in range(BATCH)]
    items = [
        reward_pb2.ScoreRequest.Item(data_source="bench", solution=text, ground_truth=json.dumps(str(n)))
        for n, text in enumerate(texts)
    ]
    return reward_pb2.ScoreRequest(items=items)


async def _rates(
    address: str, echo_address: str, batch: reward_pb2.ScoreRequest, single: reward_pb2.ScoreRequest
) -> dict[str, float]:
    async with connect_async(address) as channel, connect_async(echo_address) as echo_channel:
        kind = reward_pb2.ScoreRequest
        score = reward_pb2_grpc.RewardServiceStub(channel).Score
        echo = echo_channel.unary_unary("/tandem.v1.RewardService/Score", kind.SerializeToString, kind.FromString)
        reply = await score(batch, timeout=10.0)
        assert all(item.scored.value == 1.0 for item in reply.items), "every answer is right"
        calls: dict[str, tuple[Callable[..., Awaitable[Any]], Any, int]] = {
            "echo": (echo, batch, CALLS),
            "score": (score, batch, CALLS),
            "single": (score, single, CALLS),
        }
        rounds: list[dict[str, float]] = []
        for _ in range(ROUNDS + 1):
            rounds.append({})
            for name, (call, request, number) in calls.items():
                rounds[-1][name] = len(request.items) * number / await _seconds(call, request, number)
        return rounds[1:]  # the first one warms up


async def _seconds(call: Callable[..., Awaitable[Any]], request: Any, number: int) -> float:
    left = iter(range(number))

    async def caller() -> None:
        for _ in left:
            await call(request, timeout=30.0)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
    return time.perf_counter() - began


async def _half_load(address: str, batch: reward_pb2.ScoreRequest, rate: float) -> list[list[float]]:
    """Latencies in seconds, by window without the first, of calls that start at a fixed rate without waiting for
    earlier ones.
    """
    windows: list[list[float]] = [[] for _ in range(WINDOWS + 1)]
    async with connect_async(address) as channel:
        score = reward_pb2_grpc.RewardServiceStub(channel).Score

        async def one(number: int) -> None:
            began = time.perf_counter()
            await score(batch, timeout=30.0)
            windows[number // WINDOW_CALLS].append(time.perf_counter() - began)

        under_way: set[asyncio.Task[None]] = set()
        gc.freeze()  # keeps garbage collection of imported modules out of the latencies
        began = time.perf_counter()
        for number in range(len(windows) * WINDOW_CALLS):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            task = asyncio.create_task(one(number))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)
    return windows[1:]
