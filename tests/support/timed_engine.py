"""Samplers that end while they sample: a simulated engine under the real service, and the lengths of its answers."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tandem.protos.codec import encode_group, payload_to_batch
from tandem.protos.types import FinishReason, Prompt, SamplingParameters, TrajectoryGroup, VersionSpan
from tandem.rollout.config import RolloutConfig
from tandem.rollout.sampler import Completion, Sampler, SamplingRequest, TransferProgress
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import Claim
from tandem.services.process import die_with_parent, stop_event
from tandem.services.rollout.service import SamplingWorker
from tests.support.fork_server import ForkServer
from tests.support.redis_ring import HEADERS, SAMPLER, SCORER, new_run

NUM_PROMPTS = 2000
IN_FLIGHT = 128
END_SECONDS = 1.5
"""Lifetime of a sampler, if the scenario ends it."""
TOKENS_PER_SECOND = 700.0
"""Of one answer: the longest take 5.7 s, the mean 0.4 s."""
DEADLINE_SECONDS = 90.0

Lengths = NDArray[np.int64]

_PROMPT_IDS = np.arange(5, 9, dtype=np.int32)
_MAX_TOKENS = 4000
_END_CHANCES_T = 2.0 / (300.0 + np.arange(_MAX_TOKENS))
"""Chance that an answer ends with its token t. P(more than t tokens) = (300 / (300 + t))², a Lomax distribution."""


class _TextlessTokenizer:
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


class TimedEngine(Sampler):
    """Samples each answer at the same speed, without a model.

    Whether the answer ends with its token t depends on the request's seed, the weights and t, as if sampled from them.
    Other weights have the same distribution of lengths and give other answers.
    """

    def __init__(self, weights: int, tokens_per_second: float) -> None:
        super().__init__(_TextlessTokenizer(), max_model_tokens=_MAX_TOKENS + len(_PROMPT_IDS), seed=5)
        self._weights = weights
        self._tokens_per_second = tokens_per_second
        self._now = time.monotonic()
        """The time of the last step."""
        self._rows: dict[str, tuple[float, int, asyncio.Future[None]]] = {}
        """By request id: when it began, how many tokens it will have, and a future for its end."""

    @property
    def is_dead(self) -> bool:
        return False

    async def check(self) -> None:
        """Nothing can hang."""

    def close(self) -> None:
        """Nothing is open."""

    async def _generate(self, request: SamplingRequest) -> Completion:
        assert request.seed is not None
        first = len(request.sampled_ids)
        drawn_T = np.random.Generator(np.random.Philox(key=[request.seed, self._weights])).random(_MAX_TOKENS)
        ends_T = np.flatnonzero((drawn_T < _END_CHANCES_T)[first:])
        num_tokens = int(ends_T[0]) + 1 if len(ends_T) else _MAX_TOKENS - first
        ended = asyncio.get_running_loop().create_future()
        self._rows[request.request_id] = (self._now, num_tokens, ended)
        try:
            await ended
        finally:
            del self._rows[request.request_id]
        return self._completion(num_tokens, "stop" if len(ends_T) else "length")

    async def _sampled_so_far(self, request_ids: Collection[str]) -> Mapping[str, Completion]:
        rows = [(request_id, *self._rows[request_id]) for request_id in self._rows.keys() & request_ids]
        sampled = {request_id: self._num_sampled(began) for request_id, began, _, ended in rows if not ended.done()}
        return {request_id: self._completion(number, "abort") for request_id, number in sampled.items() if number}

    async def step_forever(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self._now = time.monotonic()
            for began, num_tokens, ended in self._rows.values():
                if not ended.done() and self._num_sampled(began) >= num_tokens:
                    ended.set_result(None)

    def _num_sampled(self, began: float) -> int:
        return int((self._now - began) * self._tokens_per_second)

    def _completion(self, num_tokens: int, reason: FinishReason) -> Completion:
        return Completion([7] * num_tokens, [-1.0] * num_tokens, [VersionSpan(0, 1, self._weights)], reason)

    async def _start_transfer(self, kind: Literal["join", "receive"], arguments: Mapping[str, object]) -> None:
        raise NotImplementedError

    async def _transfer_progress(self, version: tuple[int, int] | None) -> tuple[Sequence[TransferProgress], float]:
        raise NotImplementedError


@dataclass(frozen=True)
class Scenario:
    """How one run of `NUM_PROMPTS` prompts with one sample each is disturbed."""

    end: Literal["", "kill", "leave"] = "kill"
    """How each sampler ends: by kill -9, or told to stop; "": it does not end."""
    partial_rollout: bool = True
    changes_weights: bool = False
    """Every sampler has other weights than the one before."""
    drops_unfinished: bool = False
    """The groups that a killed sampler held are dropped."""
    lease_seconds: float = 1.2
    """Unfinished answers are saved after each third of it."""


CALM = Scenario(end="", lease_seconds=60.0)


def _serve(url: str, run_id: str, scenario: Scenario, weights: int) -> None:
    die_with_parent()
    stop = stop_event()
    config = RolloutConfig(
        max_groups_in_flight=IN_FLIGHT,
        lease_seconds=scenario.lease_seconds,
        samples_per_prompt=1,
        partial_rollout=scenario.partial_rollout,
    )
    engine = TimedEngine(weights, TOKENS_PER_SECOND if scenario.end else 4 * TOKENS_PER_SECOND)
    buffer = Buffer(url, run_id)
    buffer.register_sampler(SAMPLER, "127.0.0.1:1", 1)

    async def sample() -> None:
        steps = asyncio.create_task(engine.step_forever())
        await SamplingWorker(buffer, engine, config, SAMPLER).run(stop)
        steps.cancel()

    asyncio.run(sample())


# Samplers are forked from a process that has imported everything, so that a new one is there at once.
_PROCESSES = ForkServer("tests.support.timed_engine")


@functools.cache
def _prompts() -> list[tuple[str, bytes]]:
    sampling = SamplingParameters(max_tokens=_MAX_TOKENS)
    prompts = [Prompt(0, index, _PROMPT_IDS, 1, sampling) for index in range(NUM_PROMPTS)]
    return [(prompt.group_id, encode_group(TrajectoryGroup(prompt))) for prompt in prompts]


class EndingSamplers:
    """Runs a scenario with one sampler after the other."""

    def __init__(self, url: str, scenario: Scenario) -> None:
        self._url, self._scenario = url, scenario
        self._buffer = new_run(url, groups_per_batch=NUM_PROMPTS, target_groups=NUM_PROMPTS, infrastructure=1000)
        self._sampler: ForkServerProcess | None = None
        self.num_ended = 0
        self.num_mixed = 0
        """Answers with tokens of more than one version."""

    def lengths(self) -> Lengths:
        """Samples every prompt, and returns the lengths of the answers that were completed, sorted."""
        assert self._buffer.admit(_prompts(), NUM_PROMPTS) == NUM_PROMPTS
        try:
            self._start_sampler()
            lengths = self._collect()
            self._end_sampler("kill")
        finally:
            if self._sampler is not None:  # after an error, which an assertion here would hide
                self._sampler.kill()
                self._sampler.join(20)
        assert self._buffer.verify() == []
        self._buffer.close()
        return np.sort(lengths)

    def _collect(self) -> list[int]:
        lengths: list[int] = []
        num_dropped = 0
        end_at = time.monotonic() + END_SECONDS
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(lengths) + num_dropped < NUM_PROMPTS:
            assert time.monotonic() < deadline, self._buffer.counts()
            claims = self._buffer.claim("generated", SCORER, 500, 60.0, 0.1)
            for batch in [payload_to_batch(claim.payload) for claim in claims]:
                lengths.append(len(batch.column("ids")[0]) - len(_PROMPT_IDS))
                self.num_mixed += len(batch.column("spans")[0]) > 1
            if claims:
                self._buffer.complete_all([(claim, b"scored", HEADERS) for claim in claims])
            if self._scenario.end and time.monotonic() > end_at:
                self._end_sampler(self._scenario.end)
                self.num_ended += 1
                num_dropped += self._drop_leased() if self._scenario.drops_unfinished else 0
                self._start_sampler()
                end_at = time.monotonic() + END_SECONDS
        return lengths

    def _start_sampler(self) -> None:
        weights = self.num_ended if self._scenario.changes_weights else 0
        generation = self._buffer.samplers()[0].generation
        self._sampler = _PROCESSES.start(_serve, self._url, self._buffer.run_id, self._scenario, weights)
        while self._buffer.samplers()[0].generation == generation:
            assert self._sampler.is_alive()
            time.sleep(0.005)
        self._admit_sampler()

    def _end_sampler(self, how: Literal["kill", "leave"]) -> None:
        if self._sampler is not None:
            assert self._sampler.is_alive(), "the sampler has ended by itself"
            self._sampler.kill() if how == "kill" else self._sampler.terminate()
            self._sampler.join(20)
            assert self._sampler.exitcode == (-9 if how == "kill" else 0)

    def _admit_sampler(self) -> None:
        (sampler,) = self._buffer.samplers()
        self._buffer.admit_sampler(1, sampler, 0)

    def _drop_leased(self) -> int:
        self._buffer.counts()  # once this is answered, Redis has read all that the sampler sent before it was killed
        number = self._buffer.counts()["prompts_leased"]
        self._buffer.register_sampler(SAMPLER, "127.0.0.1:1", 1)  # puts its predecessor's leases in front
        self._admit_sampler()
        claims: list[Claim] = []
        while len(claims) < number:  # a call hands out at most 128
            more = self._buffer.claim("prompts", SAMPLER, number - len(claims), 60.0, 1.0)
            assert more, f"{len(claims)} of {number} leases came back"
            claims += more
        return sum(self._buffer.release(claim, "unfinished", "data") == "dropped" for claim in claims)


def distance(one: Lengths, other: Lengths) -> float:
    """The Kolmogorov–Smirnov distance of two samples."""
    values = np.concatenate([one, other])
    shares = [np.searchsorted(lengths, values, side="right") / len(lengths) for lengths in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def critical_distance(one: Lengths, other: Lengths) -> float:
    """What two samples of one distribution exceed with a chance of 1 %."""
    return math.sqrt(-math.log(0.01 / 2) / 2) * math.sqrt(1 / len(one) + 1 / len(other))
