"""Base class of the engines' samplers. Loads neither torch nor an engine's library.

A sampler answers prompts with trajectories and receives new weights while it samples. Each engine implements the
abstract methods. The tests in tests/rollout/contract/ specify them and run on every engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from tandem.protos.errors import DataError, FencedError, MissingVersionError, WeightTransferError, error_class
from tandem.protos.manifest import encode_manifest
from tandem.protos.store_source import StoreSource
from tandem.protos.types import (
    FinishReason,
    SamplingMask,
    SamplingParameters,
    Segment,
    Trajectory,
    VersionSpan,
    WeightGroupAddress,
    WeightManifest,
)
from tandem.rollout.answer_texts import AnswerTexts, Tokenizer
from tandem.rollout.gather import gather_or_cancel
from tandem.rollout.segments import unsampled, with_sampled

PromptIds = Sequence[int] | NDArray[np.int32]
NO_VERSION = (0, -1)
"""Incarnation and policy version of weights that no trainer has sent."""
_LONGEST_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Durations of one weight update. `stall_seconds`: how long it kept the engine from making steps."""

    digests: tuple[str, ...]
    transfer_seconds: float
    stall_seconds: float


@dataclass(slots=True)
class SamplerFigures:
    """Sums since the engine's start. Busy: at least one request in flight; else idle."""

    sampled_tokens: int = 0
    resumed_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_updates: int = 0
    weight_stall_seconds: float = 0.0
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One trajectory to sample. `sampling.max_tokens` fits the model; `seed` None means unseeded.

    `sampled_ids` is the beginning of the answer, which an earlier request sampled. It counts towards `max_tokens`, and
    the random numbers go on where those of the earlier request ended.
    """

    request_id: str
    prompt_ids: NDArray[np.int32]
    sampling: SamplingParameters
    seed: int | None
    sampled_ids: Sequence[int] = ()

    @property
    def known_ids(self) -> list[int]:
        """All tokens before the first one to sample."""
        return [*self.prompt_ids.tolist(), *self.sampled_ids]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request sampled, with the end token, and the log-probs of the distribution that each token was drawn from.

    Spans count from the first token that this request sampled. `finish_reason` is "abort" while it is running.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[VersionSpan]
    finish_reason: FinishReason
    mask: SamplingMask | None = None
    """Of these tokens, if `SamplingParameters.records_mask`."""
    num_cached: int = 0
    """Tokens of the prompt that the engine had in its cache, or that another row computed."""


class TransferProgress(TypedDict):
    """Progress of a weight transfer on one worker. `error`: class name and message of the error that ended it."""

    done: bool
    seconds: float
    digests: list[str]
    error: tuple[str, str] | None


def is_received(workers: Sequence[TransferProgress]) -> bool:
    """Whether the transfer ended on every worker without an error."""
    return all(worker["done"] and not worker["error"] for worker in workers)


class Sampler(ABC):
    """One running engine. All methods but `figures` belong to one event loop."""

    def __init__(
        self, tokenizer: Tokenizer, *, max_model_tokens: int, seed: int, group_store: StoreSource | None = None
    ) -> None:
        self._texts = AnswerTexts(tokenizer)
        self._group_store = group_store
        self.max_model_tokens = max_model_tokens
        """Maximum length of prompt plus answer."""
        self._seed = seed
        self._version = NO_VERSION
        self._newest_incarnation = 0
        self._update_lock = asyncio.Lock()
        self._joins = 0
        """Weight groups that this sampler was told to join so far."""
        self._request_numbers = itertools.count()
        self._running: dict[str, _Answer] = {}  # by request id
        self._counting = threading.Lock()  # `figures` is called from any thread
        self._counted_until = time.monotonic()
        self._figures = SamplerFigures()

    @property
    @abstractmethod
    def is_dead(self) -> bool:
        """True once the engine has ended; every request then fails."""

    @abstractmethod
    async def check(self) -> None:
        """Raises UnavailableError unless the engine still makes steps, because a live engine may hang."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine and removes its files."""

    @abstractmethod
    async def _generate(self, request: SamplingRequest) -> Completion:
        """Samples until the model's end token, a stop string, or `max_tokens`. Ends the request when it is cancelled.

        Raises DataError if prompt or parameters cannot be used, UnavailableError once the engine has ended.
        """

    async def _sampled_so_far(self, request_ids: Collection[str]) -> Mapping[str, Completion]:
        """Returns what these running requests have sampled; none that has no token yet.

        An engine that does not implement it never gets `sampled_ids`, and unfinished answers are sampled anew.
        """
        return {}

    @abstractmethod
    async def _start_transfer(self, kind: Literal["join", "receive"], arguments: Mapping[str, object]) -> None:
        """Calls `StagedReceiver.start_<kind>` on every worker. The transfer runs in parallel to the engine's steps."""

    @abstractmethod
    async def _transfer_progress(self, version: tuple[int, int] | None) -> tuple[Sequence[TransferProgress], float]:
        """Returns `StagedReceiver.progress` of every worker, and for how many seconds the engine made no step. If all
        have received `version` (incarnation, policy_version), loads the staged weights and changes the version of later
        tokens, both between the same two steps. Running requests keep their KV cache.
        """

    @property
    def incarnation(self) -> int:
        return self._version[0]

    @property
    def policy_version(self) -> int:
        """The version of the weights, -1 before the first update."""
        return self._version[1]

    def figures(self) -> SamplerFigures:
        self._count_seconds()
        return replace(self._figures)

    async def sample(
        self, prompt_ids: PromptIds, num_samples: int, sampling: SamplingParameters, *, key: str = ""
    ) -> tuple[Trajectory, ...]:
        """Samples the trajectories 0 … num_samples − 1 of one prompt; see `sample_one`."""
        rows = (self.sample_one(prompt_ids, sampling, trajectory_id=number, key=key) for number in range(num_samples))
        return tuple(await gather_or_cancel(rows))

    async def sample_one(
        self,
        prompt_ids: PromptIds | Segment,
        sampling: SamplingParameters,
        *,
        trajectory_id: int,
        key: str = "",
        unfinished: Trajectory | None = None,
    ) -> Trajectory:
        """Samples one trajectory, a request of its own.

        With a `key` (a group's id) or a seed in `sampling`, its random numbers depend only on the run's seed, those two
        and `trajectory_id`. A segment in place of the prompt, such as the turns before, stays the beginning of the
        trajectory as it is. An `unfinished` one, from `unfinished` of any sampler, is continued after its last token.

        Raises DataError if the prompt or the parameters cannot be used, UnavailableError once the engine has ended.
        """
        begun = unfinished.segments[0] if unfinished else None
        if isinstance(prompt_ids, Segment):
            begun, prompt_ids = begun or prompt_ids, prompt_ids.ids
        prompt = np.asarray(prompt_ids, np.int32)
        room = self.max_model_tokens - len(prompt)
        if not len(prompt) or room < 1:
            told = f"prompt of {len(prompt)} tokens leaves no room in {self.max_model_tokens} tokens, or is empty"
            raise DataError(told)
        if sampling.max_tokens < 1:
            raise DataError(f"max_tokens is {sampling.max_tokens}, and an answer has at least one token")
        fitting = sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room)
        answer = _Answer(key, trajectory_id, prompt, sampling, begun)
        request_id = f"{key}/{trajectory_id}/{next(self._request_numbers)}"
        seed = self._request_seed(sampling, key, trajectory_id)
        request = SamplingRequest(request_id, prompt, fitting, seed, answer.sampled_ids)
        assert len(request.sampled_ids) < fitting.max_tokens, f"trajectory {trajectory_id} of {key} is finished"
        with self._one_more_running(request_id, answer):
            completion = await self._generate(request)
        self._figures.prompt_tokens += len(prompt)
        self._figures.cached_tokens += completion.num_cached
        self._figures.resumed_tokens += len(request.sampled_ids)
        self._count_sampled(answer, completion)
        return answer.trajectory(completion, self._texts.of([*request.sampled_ids, *completion.token_ids]))

    async def unfinished(self, keys: Collection[str]) -> dict[tuple[str, int], Trajectory]:
        """Returns the running trajectories of these keys as far as they are sampled, by key and trajectory id.

        Their finish reason is "abort", and they have no text. Raises UnavailableError once the engine has ended.
        """
        running = {request_id: answer for request_id, answer in self._running.items() if answer.key in keys}
        sampled = await self._sampled_so_far(running.keys()) if running else {}
        for request_id, completion in sampled.items():
            self._count_sampled(running[request_id], completion)
        return {
            (answer.key, answer.trajectory_id): answer.trajectory(sampled[request_id], "")
            for request_id, answer in running.items()
            if request_id in sampled
        }

    def _count_sampled(self, answer: _Answer, completion: Completion) -> None:
        self._figures.sampled_tokens += max(0, len(completion.token_ids) - answer.num_counted)
        answer.num_counted = max(answer.num_counted, len(completion.token_ids))

    async def join_weight_group(
        self, address: WeightGroupAddress, first_rank: int, incarnation: int, timeout_seconds: float
    ) -> None:
        """Joins a weight group of a trainer incarnation with one rank per tensor-parallel worker, from `first_rank` on;
        leaves the previous one, even if a version is still arriving there.

        Raises FencedError if a later incarnation was here before, WeightTransferError if not all ranks connect before
        the deadline.
        """
        assert self._group_store is not None, "a sampler without a store joins no group"
        arguments = {"address": asdict(address), "first_rank": first_rank, "store": self._group_store}
        self._refuse_earlier(incarnation)
        self._newest_incarnation = incarnation
        self._joins += 1
        async with self._update_lock:
            await self._transfer("join", arguments, timeout_seconds)

    async def update_weights(self, manifest: WeightManifest, group_name: str, timeout_seconds: float) -> UpdateReport:
        """Receives a version during generation and applies it between two engine steps. Running requests keep their KV.

        Finishes even if the caller is cancelled, so that the version stamp always matches the weights. If a bucket is
        damaged or late, the engine keeps its weights. Raises FencedError if the version is below the engine's own or of
        an earlier incarnation than the last that was here, MissingVersionError if it has no buckets and does not follow
        the engine's own, WeightTransferError, UnavailableError.
        """
        return await asyncio.shield(asyncio.ensure_future(self._update_weights(manifest, group_name, timeout_seconds)))

    async def _update_weights(self, manifest: WeightManifest, group_name: str, timeout_seconds: float) -> UpdateReport:
        arguments = {"manifest": encode_manifest(manifest), "group_name": group_name}
        async with self._update_lock:
            self._check_order(manifest)
            version = manifest.incarnation, manifest.policy_version
            workers, stall_seconds = await self._transfer("receive", arguments, timeout_seconds, version)
            self._version = version
        self._figures.weight_updates += 1
        self._figures.weight_stall_seconds += stall_seconds
        return UpdateReport(tuple(workers[0]["digests"]), max(worker["seconds"] for worker in workers), stall_seconds)

    def _check_order(self, manifest: WeightManifest) -> None:
        """Refuses weights of a trainer that was replaced, and a new number for weights that this engine lacks."""
        self._refuse_earlier(manifest.incarnation)
        offered = (manifest.incarnation, manifest.policy_version)
        told = f"version {offered[1]} of incarnation {offered[0]}"
        has = f"this sampler has version {self.policy_version} of incarnation {self.incarnation}"
        if offered < self._version:
            raise FencedError(f"{told} is refused: {has}")
        if not manifest.buckets and offered != (self.incarnation, self.policy_version + 1):
            raise MissingVersionError(f"{told} came without weights, and {has}; it must get the whole weights")
        self._newest_incarnation = manifest.incarnation

    def _refuse_earlier(self, incarnation: int) -> None:
        if incarnation < self._newest_incarnation:
            told = f"trainer incarnation {incarnation} was replaced by {self._newest_incarnation}"
            raise FencedError(f"{told}: this sampler takes no weights from it")

    async def _transfer(
        self,
        kind: Literal["join", "receive"],
        arguments: Mapping[str, object],
        timeout_seconds: float,
        version: tuple[int, int] | None = None,
    ) -> tuple[Sequence[TransferProgress], float]:
        """Waits until the transfer is over and, with a version, the received weights are applied."""
        # A worker's error names the cause, so the workers' deadline comes first.
        deadline, joins = time.monotonic() + timeout_seconds + 1.0, self._joins
        await self._start_transfer(kind, {**arguments, "timeout_seconds": timeout_seconds})
        pause = 0.001
        while True:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
            workers, stall_seconds = await self._transfer_progress(version)
            for worker in workers:
                if worker["error"]:
                    raise error_class(worker["error"][0])(worker["error"][1])
            if is_received(workers):
                return workers, stall_seconds
            if self._joins > joins:
                raise WeightTransferError(f"the {kind} of weights was replaced by the join of another group")
            if time.monotonic() > deadline:
                raise WeightTransferError(f"the {kind} of weights had not ended after {timeout_seconds:g} s")

    def _request_seed(self, sampling: SamplingParameters, key: str, trajectory_id: int) -> int | None:
        if not key and sampling.seed is None:
            return None
        seed = self._seed if sampling.seed is None else sampling.seed
        digest = hashlib.blake2b(f"{seed}/{key}/{trajectory_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1  # engines take a non-negative 64-bit number

    @contextlib.contextmanager
    def _one_more_running(self, request_id: str, answer: _Answer) -> Iterator[None]:
        if not self._running:
            self._count_seconds()
        self._running[request_id] = answer
        try:
            yield
        finally:
            if len(self._running) == 1:
                self._count_seconds()
            del self._running[request_id]

    def _count_seconds(self) -> None:
        """Counts the time since the last call. Each sum only grows, as readers take a smaller one for a restart."""
        with self._counting:
            now = time.monotonic()
            if self._running:
                self._figures.busy_seconds += now - self._counted_until
            else:
                self._figures.idle_seconds += now - self._counted_until
            self._counted_until = now


@dataclass(slots=True)
class _Answer:
    """A trajectory that is being sampled. `begun` has the prompt and what earlier requests sampled.

    `num_counted` of the tokens that this request sampled are in the figures.
    """

    key: str
    trajectory_id: int
    prompt: NDArray[np.int32]
    sampling: SamplingParameters
    begun: Segment | None
    num_counted: int = 0

    @property
    def sampled_ids(self) -> list[int]:
        return [] if self.begun is None else self.begun.ids[len(self.prompt) :].tolist()

    def trajectory(self, completion: Completion, text: str) -> Trajectory:
        begun = self.begun or unsampled(self.prompt)
        segment = with_sampled(begun, completion.token_ids, completion.logprobs, completion.spans, completion.mask)
        return Trajectory(self.trajectory_id, "policy", (segment,), completion.finish_reason, text, self.sampling)
