"""Measures what the proxy of agents adds to a call of the policy, and writes JSON.

    python benchmarks/proxy.py [--rounds 3] [--output benchmarks/records/proxy.json]

A process serves sessions of agents, as a sampler does, in front of an engine that takes half a second for each turn,
whatever is asked of it. This process plays conversations of six turns in all sessions at once, each begun at a time of
its own, over connections of their own. What is added to a call is the time from its first byte to the last one of its
answer, less the engine's half second: reading and checking the call, encoding what is new, recording the tokens,
writing the answer, and the wait for other calls. The mean may be at most 5 ms, with 64 sessions, too. The record has
the medians of the rounds' means and percentiles. Run it on an otherwise idle machine. The exit code is 1 if the bound
is missed; the last line says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.protos.types import Prompt, SamplingParameters, VersionSpan  # noqa: E402
from tandem.rollout.environments.agent_session import AgentSession  # noqa: E402
from tandem.rollout.environments.config import EnvironmentConfig  # noqa: E402
from tandem.rollout.sampler import Completion, Sampler, SamplingRequest  # noqa: E402
from tandem.services.data.chat import ChatEncoder, load_tokenizer  # noqa: E402
from tandem.services.data.tiny_model import build_tiny_model  # noqa: E402
from tandem.services.rollout.episodes import EpisodeEncoder  # noqa: E402
from tandem.services.rollout.openai_proxy import OpenAIProxy  # noqa: E402

SIDES = (1, 64)
"""Sessions side by side."""
MOST_MILLISECONDS = 5.0
ENGINE_SECONDS, TURNS, TURN_TOKENS = 0.5, 6, 64
QUESTION, REPLY = "a" * 1000, "b" * 200
"""The first message of a conversation, and each later one."""
SAMPLING = SamplingParameters(max_tokens=8000)
CONVERSATIONS = 4
"""Of each session in a round."""


class WaitingSampler(Sampler):
    """Answers every request with the same tokens, after the same time."""

    is_dead = False

    def __init__(self, model: Path) -> None:
        tokenizer = load_tokenizer(str(model))
        super().__init__(tokenizer, max_model_tokens=16_000, seed=1)
        end: Any = tokenizer.eos_token_id
        self._ids = [*tokenizer.encode("c" * (TURN_TOKENS - 1), add_special_tokens=False), end]

    async def check(self) -> None: ...
    def close(self) -> None: ...
    async def _start_transfer(self, *_: object) -> None: ...
    async def _transfer_progress(self, *_: object) -> Any: ...

    async def _generate(self, request: SamplingRequest) -> Completion:
        await asyncio.sleep(ENGINE_SECONDS)
        return Completion(self._ids, [-1.0] * len(self._ids), [VersionSpan(0, 1, 0)], "stop")

    async def _sampled_so_far(self, request_ids: Collection[str]) -> Mapping[str, Completion]:
        return {}


async def serve(model: Path, number: int) -> None:
    """Prints the address and the keys of so many sessions, and serves them until the input ends."""
    sampler, encoder = WaitingSampler(model), EpisodeEncoder(ChatEncoder(str(model)))
    settings = EnvironmentConfig(path="none:None", max_turns=10_000, rewritten_history="fork")
    prompt = Prompt(0, 0, np.array([1], np.int32), 1, SAMPLING)
    sessions: dict[str, AgentSession] = {}
    for row in range(number):
        sessions[f"{row}"] = AgentSession(sampler, encoder, settings, prompt, SAMPLING, row)
    async with OpenAIProxy(sessions).serving() as address:
        print(json.dumps({"address": address, "keys": [one.api_key for one in sessions.values()]}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


class Connection:
    """A kept HTTP connection to one session."""

    def __init__(self, address: str, session: int, key: str) -> None:
        self._address, self._session, self._key = address, session, key

    async def __aenter__(self) -> Connection:
        place = urlsplit(self._address)
        self._reader, self._writer = await asyncio.open_connection(place.hostname, place.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def call(self, messages: list[dict[str, str]]) -> tuple[str, float]:
        """What the policy says, and the seconds from the first byte of the call to the last one of the answer."""
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        head = (
            f"POST /sessions/{self._session}/v1/chat/completions HTTP/1.1\r\nHost: proxy\r\n"
            f"Authorization: Bearer {self._key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        answer_head = await self._reader.readuntil(b"\r\n\r\n")
        (length,) = (line for line in answer_head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        answer = await self._reader.readexactly(int(length.split(b":")[1]))
        seconds = time.perf_counter() - began
        assert answer_head.startswith(b"HTTP/1.1 200"), answer
        return json.loads(answer)["choices"][0]["message"]["content"], seconds


async def play(connection: Connection, dice: random.Random, conversations: int) -> list[float]:
    """What was added to each call, in milliseconds."""
    added = []
    for number in range(conversations):
        await asyncio.sleep(dice.random() * ENGINE_SECONDS)
        messages = [{"role": "user", "content": f"{dice.random()} {number} {QUESTION}"}]
        for _ in range(TURNS):
            said, seconds = await connection.call(messages)
            assert said == "c" * (TURN_TOKENS - 1), said
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": REPLY}]
            added.append(1e3 * (seconds - ENGINE_SECONDS))
    return added


async def play_all(address: str, keys: Sequence[str], seed: int) -> list[float]:
    """What was added to each call of all sessions, in milliseconds."""

    async def one(place: int, key: str) -> list[float]:
        dice = random.Random(1000 * seed + place)
        async with Connection(address, place, key) as connection:
            await play(connection, dice, 1)  # warms up
            return await play(connection, dice, CONVERSATIONS)

    parts = await asyncio.gather(*(one(place, key) for place, key in enumerate(keys)))
    return [value for part in parts for value in part]


def measure(model: Path, number: int, seed: int) -> dict[str, float]:
    """A round with so many sessions, in a new process."""
    command = [sys.executable, __file__, "--serve", str(model), "--sessions", str(number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            served = json.loads(process.stdout.readline())
            began = time.perf_counter()
            added = sorted(asyncio.run(play_all(served["address"], served["keys"], seed)))
            seconds = time.perf_counter() - began
        finally:
            process.kill()
    share = (CONVERSATIONS + 1) / CONVERSATIONS
    return {
        "calls_per_second": len(added) * share / seconds,
        "mean_ms": statistics.fmean(added),
        "p50_ms": statistics.median(added),
        "p95_ms": added[int(0.95 * len(added))],
        "p99_ms": added[int(0.99 * len(added))],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "proxy.json")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sessions", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve, arguments.sessions))
        return 0
    rounds: dict[int, list[dict[str, float]]] = {number: [] for number in SIDES}
    with tempfile.TemporaryDirectory(prefix="tandem-proxy-") as folder:
        model = build_tiny_model(Path(folder) / "model")
        for seed in range(arguments.rounds):
            for number in SIDES:
                rounds[number].append(measure(model, number, seed))
                values = "  ".join(f"{name} {value:.2f}" for name, value in rounds[number][-1].items())
                print(f"round {seed + 1}, {number:2} sessions: {values}")
    sides = {
        str(number): {name: round(statistics.median(one[name] for one in of), 2) for name in of[0]}
        for number, of in rounds.items()
    }
    record = {
        "command": f"python benchmarks/proxy.py --rounds {arguments.rounds}",
        "cores": os.cpu_count(),
        "engine_seconds": ENGINE_SECONDS,
        "turns": TURNS,
        "sessions": sides,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {arguments.output}")
    missed = [number for number, side in sides.items() if side["mean_ms"] > MOST_MILLISECONDS]
    for number in missed:
        print(f"NOT MET: {number} sessions: {sides[number]['mean_ms']} ms a call, not {MOST_MILLISECONDS:g}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
