"""Evaluation outside ledger and limiter: answers from RolloutService.Generate, scored by RewardService.Score."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, cast

import grpc
import numpy as np

from tandem.protos import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from tandem.protos.contracts import Score, Scored, Unscored, UnscoredReason
from tandem.protos.errors import NotAdmittedError, TandemError
from tandem.protos.types import Prompt, task_of
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import ALIVE_SECONDS
from tandem.services.config import Recipe
from tandem.services.config.eval_sets import NO_ENVIRONMENT, EvalSet
from tandem.services.data.dataset import load_prompts
from tandem.services.process import in_thread
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.run.endpoint import calling_credentials
from tandem.services.run.inputs import model_digest
from tandem.services.run.json_files import GENERATIONS_FOLDER
from tandem.services.trainer.generations import (
    EvaluationSet,
    Generation,
    GenerationsFile,
    SetResult,
    result_of,
)

log = logging.getLogger(__name__)

ROWS_PER_CALL = 64
CALLS_PER_SAMPLER = 2  # the next chunk waits in the engine while the previous one's last answers are decoded
ATTEMPTS = 3
DEADLINE_SECONDS = 900.0
_LONGEST_SECONDS = 604_800.0  # gRPC refuses those of centuries
_POLL_SECONDS = 0.25
_SILENT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A line of evaluations.jsonl: sets that were evaluated at one version, and their sums over all samples.

    `accuracy` and `mean_reward` are those of the recipe's first set; None if it is not among these sets, or failed.
    """

    version: int | None
    accuracy: float | None
    mean_reward: float | None
    num_rows: int
    num_scored: int
    unscored: Mapping[str, int]
    seconds: float
    sets: Mapping[str, SetResult]

    @classmethod
    def of(cls, version: int | None, sets: Mapping[str, SetResult], recipe: Recipe, seconds: float) -> Evaluation:
        """The evaluation of these sets of the recipe."""
        first = sets.get(recipe.eval_sets[0].name)
        return cls(
            version=version,
            accuracy=first.accuracy if first else None,
            mean_reward=first.metrics.get("mean_reward") if first else None,
            num_rows=sum(one.num_samples for one in sets.values()),
            num_scored=sum(one.num_scored for one in sets.values()),
            unscored=dict(sum((Counter(one.unscored) for one in sets.values()), Counter[str]())),
            seconds=seconds,
            sets=sets,
        )

    @property
    def failures(self) -> list[str]:
        """One line for each set without metrics."""
        return [f"evaluation set {name} failed: {one.failed}" for name, one in self.sets.items() if one.failed]


@dataclass(frozen=True, slots=True)
class EvaluationEndpoints:
    """Addresses of the samplers and of the reward services, and the token, the credentials and the name for them."""

    samplers: Sequence[str]
    reward: str
    """Several are separated by commas."""
    token: str
    credentials: grpc.ChannelCredentials | None
    server_name: str = ""

    def connected(self, stack: ExitStack) -> Channels:
        """Open channels, which the stack closes."""
        security = (self.token, self.credentials, self.server_name)
        samplers, reward = [connect(one, *security) for one in self.samplers], connect(self.reward, *security)
        for channel in (*samplers, reward):
            stack.callback(channel.close)
        return Channels(samplers, reward)


class Channels(NamedTuple):
    """Channels to the samplers and to the reward services."""

    samplers: Sequence[grpc.Channel]
    reward: grpc.Channel


def evaluate(
    version: int | None, sets: Sequence[EvaluationSet], endpoints: EvaluationEndpoints, recipe: Recipe, folder: Path
) -> Evaluation:
    """Evaluates sets, one after the other, distributed over the samplers; without a `version` those of any version.

    The samples of each set are appended to a file in the folder as they are scored. Those that an interrupted
    evaluation has left there are not sampled again. Raises OSError if the files cannot be written.
    """
    started = time.monotonic()
    weights = model_digest(recipe.model.path) if version is None else f"version {version}"
    environment = recipe.environment.model_dump_json() if recipe.environment.path else ""
    depends_on = [weights, recipe.reward.model_dump_json()]
    results: dict[str, SetResult] = {}
    with ExitStack() as stack:
        channels = endpoints.connected(stack)
        for one in sets:
            plays = bool(environment) and one.environment != NO_ENVIRONMENT
            settings = one.settings(*depends_on, *([environment] if plays else []))
            file = GenerationsFile(folder / f"{one.name}.jsonl", settings)
            deadline = time.monotonic() + deadline_seconds(one, recipe, len(channels.samplers))
            missing = _complete(_Sampling(one, version, settings, channels, file, deadline, plays))
            results[one.name] = result_of(one, file.rows, missing, recipe.eval.min_scored)
    return Evaluation.of(version, results, recipe, time.monotonic() - started)


def _complete(sampling: _Sampling) -> Mapping[str, int]:
    """Samples and scores what the set's file lacks. Returns the number of samples that did not come, by reason. A chunk
    whose call fails is sent to another sampler, at most three times.
    """
    pending = sampling.file.keep_complete(chunks_of(sampling.one.prompts))
    samplers = len(sampling.channels.samplers)
    reason = "no_sampler"
    for attempt in range(ATTEMPTS if samplers else 0):
        if not pending or time.monotonic() > sampling.deadline:
            break
        with ThreadPoolExecutor(CALLS_PER_SAMPLER * samplers) as pool:
            errors = list(pool.map(sampling.run, range(attempt, attempt + len(pending)), pending))
        reason = next((type(error).__name__ for error in errors if error), reason)
        pending = [chunk for chunk, error in zip(pending, errors, strict=True) if error]
    missing = sum(prompt.num_samples for chunk in pending for prompt in chunk)
    return {reason: missing} if missing else {}


def chunks_of(prompts: Sequence[Prompt]) -> list[Sequence[Prompt]]:
    """The prompts of each call: consecutive ones with equal sampling parameters, at most 64 samples in all, or one
    prompt. The same prompts always make the same chunks. Each chunk but greedy ones has a seed of its own.
    """
    chunks: list[Sequence[Prompt]] = []
    for (sampling, num_samples), group in groupby(prompts, key=attrgetter("sampling", "num_samples")):
        equal, length = list(group), max(1, ROWS_PER_CALL // num_samples)
        for start in range(0, len(equal), length):
            seed = None if sampling.seed is None or not sampling.temperature else sampling.seed + len(chunks)
            chunks.append(
                [replace(one, sampling=replace(sampling, seed=seed)) for one in equal[start : start + length]]
            )
    return chunks


@dataclass(frozen=True, slots=True)
class _Sampling:
    """What samples and scores the chunks of one set."""

    one: EvaluationSet
    version: int | None
    settings: str
    channels: Channels
    file: GenerationsFile
    deadline: float
    plays: bool
    """Whether the samples are episodes."""

    def run(self, place: int, chunk: Sequence[Prompt]) -> TandemError | None:
        """Samples and scores a chunk, and appends it to the set's file. Returns the error if a call failed."""
        samplers = self.channels.samplers
        try:
            rows = self._scored(self._generate(samplers[place % len(samplers)], chunk))
        except TandemError as error:
            return error
        self.file.add(rows)
        return None

    def _generate(self, channel: grpc.Channel, chunk: Sequence[Prompt]) -> list[tuple[Prompt, Generation]]:
        sampling = chunk[0].sampling
        request = rollout_pb2.GenerateRequest(
            items=[
                rollout_pb2.GenerateRequest.Item(
                    prompt_ids=np.ascontiguousarray(prompt.token_ids, "<i4").tobytes(),
                    num_samples=prompt.num_samples,
                    episode=self._episode(prompt) if self.plays else None,
                )
                for prompt in chunk
            ],
            sampling=rollout_pb2.SamplingParameters(**asdict(sampling)),
            required_version=self.version,
        )
        with translated():
            reply = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request, timeout=_left(self.deadline))
        samples = [sample for item in reply.items for sample in item.samples]
        versions = {span.policy_version for sample in samples for span in sample.spans}
        if self.version is not None and not versions <= {self.version}:
            raise NotAdmittedError(f"asked for answers of version {self.version}, got {sorted(versions)}")
        owners = [(prompt, number) for prompt in chunk for number in range(prompt.num_samples)]
        return [
            (prompt, Generation.from_answer(prompt, number, sample, self.settings))
            for (prompt, number), sample in zip(owners, samples, strict=True)
        ]

    def _episode(self, prompt: Prompt) -> rollout_pb2.GenerateRequest.Episode:
        """Names the set and the row, not the version: two versions meet the same environments."""
        name = f"eval-{self.one.name}-{prompt.index}"
        return rollout_pb2.GenerateRequest.Episode(
            row=json.dumps(task_of(prompt)), name=name, environment=self.one.environment
        )

    def _scored(self, sampled: Sequence[tuple[Prompt, Generation]]) -> list[Generation]:
        """The samples with their scores. Those whose environment failed are not scored."""
        items = [row.item(prompt) for prompt, row in sampled if not row.has_failed]
        request = reward_pb2.ScoreRequest(
            items=[
                reward_pb2.ScoreRequest.Item(
                    data_source=item.data_source,
                    solution=item.solution,
                    ground_truth=json.dumps(item.ground_truth),
                    extra_info=json.dumps(dict(item.extra_info)),
                    group=item.group,
                )
                for item in items
            ],
            rubric=self.one.rubric,
        )
        replies: Sequence[reward_pb2.ScoreReply.Item] = ()
        if items:
            with translated():
                stub = reward_pb2_grpc.RewardServiceStub(self.channels.reward)
                replies = stub.Score(request, timeout=_left(self.deadline)).items
        assert len(replies) == len(items), "one score an item"
        scores = map(_score_of, replies)
        return [row if row.has_failed else row.with_score(next(scores)) for _, row in sampled]


def _score_of(reply: reward_pb2.ScoreReply.Item) -> Score:
    if reply.HasField("scored"):
        return Scored(reply.scored.value, dict(reply.scored.breakdown))
    return Unscored(cast(UnscoredReason, reply.unscored.reason))


def deadline_seconds(one: EvaluationSet, recipe: Recipe, num_samplers: int) -> float:
    """How long the evaluation of a set may take: 15 minutes or, if environment.episode_seconds bounds its episodes, as
    long as all attempts at them may take, at most a week.
    """
    limits = recipe.environment
    if not (limits.path and limits.episode_seconds) or one.environment == NO_ENVIRONMENT:
        return DEADLINE_SECONDS
    rounds = math.ceil(len(chunks_of(one.prompts)) / (CALLS_PER_SAMPLER * max(1, num_samplers)))
    seconds = rounds * limits.max_attempts * (limits.episode_seconds + limits.step_seconds)
    return min(max(DEADLINE_SECONDS, seconds), _LONGEST_SECONDS)


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def wait_for_endpoints(
    buffer: Buffer, recipe: Recipe, version: int | None, seconds: float, stop: threading.Event
) -> EvaluationEndpoints | None:
    """Waits for samplers with the `version` (None: any live sampler) and for the reward service; None if in vain."""
    started = time.monotonic()
    silent = True
    while True:
        samplers = [
            sampler.address
            for sampler in buffer.samplers()
            if sampler.alive and (version is None or (sampler.state == "LIVE" and sampler.version == version))
        ]
        reward = ",".join(reward_addresses(buffer))
        if samplers and reward:
            token, credentials = run_token(buffer.secret(), Role.operate), calling_credentials(recipe)
            return EvaluationEndpoints(samplers, reward, token, credentials, recipe.run.server_name)
        waited = time.monotonic() - started
        if waited > seconds or stop.wait(_POLL_SECONDS):
            return None
        if waited > _SILENT_SECONDS and silent:
            silent = False
            carrying = "" if version is None else f" that carries version {version}"
            log.info("evaluation waits for %s", "the reward service" if samplers else f"a sampler{carrying}")


def reward_addresses(buffer: Buffer, alive_within_seconds: float = ALIVE_SECONDS) -> list[str]:
    """Addresses of the reward services that sent a heartbeat within this time, or of all that ever registered if none
    did: the only one may be restarting.
    """
    names = {name: address for name, address in buffer.services().items() if name.partition("-")[0] == "reward"}
    silences = buffer.silences()
    alive = [address for name, address in names.items() if silences.get(name, 0.0) <= alive_within_seconds]
    return alive or list(names.values())


@dataclass(slots=True)
class BackgroundEvaluation:
    """Evaluates a published version while the next batch is trained. The next publication waits until it is `over`."""

    buffer: Buffer
    recipe: Recipe
    stop: threading.Event
    done: Callable[[Evaluation], None]
    loaded: dict[str, EvaluationSet] = field(default_factory=dict)
    running: Future[None] | None = None

    def start(self, version: int, sets: Sequence[EvalSet], patience_seconds: float) -> None:
        """Starts an evaluation, which gives up and logs it if no sampler has the version within the patience."""
        assert self.running is None, "one evaluation at a time"
        self.running = in_thread("evaluation", self._run, version, sets, patience_seconds)

    def over(self, timeout_seconds: float) -> bool:
        """Whether none is running or it ended within the time. Raises the error that ended it."""
        if self.running is None:
            return True
        deadline = time.monotonic() + timeout_seconds
        while not wait([self.running], _POLL_SECONDS).done:
            if self.stop.is_set() or time.monotonic() > deadline:
                return False
        ended, self.running = self.running, None
        ended.result()  # a bug must end the trainer, not only the thread
        return True

    def _run(self, version: int, sets: Sequence[EvalSet], patience_seconds: float) -> None:
        for one in sets:
            if one.name not in self.loaded:
                self.loaded[one.name] = load_set(one, self.recipe)
        endpoints = wait_for_endpoints(self.buffer, self.recipe, version, patience_seconds, self.stop)
        if endpoints is not None:
            folder = generations_folder(self.recipe, version)
            self.done(evaluate(version, [self.loaded[one.name] for one in sets], endpoints, self.recipe, folder))
        elif not self.stop.is_set():
            words = "evaluation of version %d skipped: no sampler carried it for %.0f s"
            log.warning(words, version, patience_seconds, extra={"version": version})


def generations_folder(recipe: Recipe, version: int) -> Path:
    """Where a run keeps the samples of the evaluation of a version."""
    return recipe.folder / GENERATIONS_FOLDER / f"{version:06d}"


def load_set(one: EvalSet, recipe: Recipe) -> EvaluationSet:
    """The usable prompts of a set whose defaults are filled in; logs the number of skipped rows. Raises DataError,
    ModelError.
    """
    prompts, faults = load_prompts(one.file, recipe, limit=one.limit or None)
    if faults:
        log.warning("evaluation file %s: rows skipped: %s", one.file, dict(faults))
    assert one.temperature is not None, "its default is filled in"
    draws = partial(replace, temperature=one.temperature, top_p=one.top_p, top_k=0, min_p=0.0, seed=recipe.run.seed)
    with_sampling = [
        replace(
            prompt,
            num_samples=one.samples_per_prompt,
            sampling=draws(prompt.sampling, max_tokens=min(prompt.sampling.max_tokens, one.max_response_tokens)),
        )
        for prompt in prompts
    ]
    return EvaluationSet(one.name, with_sampling, one.rubric, one.environment.key(recipe.environment))
