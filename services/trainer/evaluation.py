"""Evaluation outside ledger and limiter: greedy answers from RolloutService.Generate, scored by RewardService.Score."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from statistics import fmean

import grpc
import numpy as np

from tandem.protos import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import NotAdmittedError, TandemError
from tandem.protos.types import Prompt
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import ALIVE_SECONDS
from tandem.services.config import Recipe
from tandem.services.data.dataset import load_prompts
from tandem.services.process import in_thread
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.run.endpoint import calling_credentials

log = logging.getLogger(__name__)

ROWS_PER_CALL = 64
CALLS_PER_SAMPLER = 2  # the next chunk waits in the engine while the previous one's last answers are decoded
ATTEMPTS = 3
DEADLINE_SECONDS = 900.0
_POLL_SECONDS = 0.25
_SILENT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A line of evaluations.jsonl. `unscored` counts rows without a reward by reason; the means exclude them."""

    version: int | None
    accuracy: float | None
    mean_reward: float | None
    num_rows: int
    num_scored: int
    unscored: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class EvaluationEndpoints:
    """Addresses of the samplers and of the reward services, and the token, the credentials and the name for them."""

    samplers: Sequence[str]
    reward: str
    """Several are separated by commas."""
    token: str
    credentials: grpc.ChannelCredentials | None
    max_tokens: int
    stop: Sequence[str] = ()
    server_name: str = ""


def evaluate(version: int | None, prompts: Sequence[Prompt], endpoints: EvaluationEndpoints) -> Evaluation:
    """Answers every prompt once, greedily, distributed over the samplers; without a `version` those of any version.

    A row is correct if its scorer says so (`acc` or `correct` in the breakdown), else if its reward is at least 1. A
    chunk whose call fails is sent to another sampler, at most three times; then its rows count as unscored.
    """
    started = time.monotonic()
    deadline = started + DEADLINE_SECONDS
    addresses = {*endpoints.samplers, endpoints.reward}
    security = (endpoints.token, endpoints.credentials, endpoints.server_name)
    channels = {address: connect(address, *security) for address in addresses}
    pending: list[Sequence[Prompt]] = [prompts[i : i + ROWS_PER_CALL] for i in range(0, len(prompts), ROWS_PER_CALL)]
    items: list[reward_pb2.ScoreReply.Item] = []
    reason = "no_sampler"

    def ask(place: int, chunk: Sequence[Prompt]) -> Sequence[reward_pb2.ScoreReply.Item] | TandemError:
        sampler = channels[endpoints.samplers[place % len(endpoints.samplers)]]
        try:
            answers = _generate(sampler, chunk, version, endpoints, deadline)
            return _score(channels[endpoints.reward], chunk, answers, deadline)
        except TandemError as error:
            return error

    try:
        for attempt in range(ATTEMPTS if endpoints.samplers else 0):
            with ThreadPoolExecutor(CALLS_PER_SAMPLER * len(endpoints.samplers)) as pool:
                replies = list(pool.map(ask, range(attempt, attempt + len(pending)), pending))
            chunks, pending = pending, []
            for chunk, reply in zip(chunks, replies, strict=True):
                if isinstance(reply, TandemError):
                    pending.append(chunk)
                    reason = type(reply).__name__
                else:
                    items += reply
            if not pending or time.monotonic() > deadline:
                break
    finally:
        for channel in channels.values():
            channel.close()
    scored = [item.scored for item in items if item.HasField("scored")]
    unscored = Counter(item.unscored.reason for item in items if not item.HasField("scored"))
    if pending:
        unscored[reason] += sum(map(len, pending))
    return Evaluation(
        version=version,
        accuracy=fmean(map(_is_correct, scored)) if scored else None,
        mean_reward=fmean(one.value for one in scored) if scored else None,
        num_rows=len(prompts),
        num_scored=len(scored),
        unscored=dict(unscored),
        seconds=time.monotonic() - started,
    )


def _generate(
    channel: grpc.Channel, chunk: Sequence[Prompt], version: int | None, endpoints: EvaluationEndpoints, deadline: float
) -> list[rollout_pb2.GenerateReply.Sample]:
    request = rollout_pb2.GenerateRequest(
        items=[
            rollout_pb2.GenerateRequest.Item(
                prompt_ids=np.ascontiguousarray(prompt.token_ids, "<i4").tobytes(), num_samples=1
            )
            for prompt in chunk
        ],
        sampling=rollout_pb2.SamplingParameters(
            temperature=0.0, top_p=1.0, max_tokens=endpoints.max_tokens, stop=endpoints.stop, repetition_penalty=1.0
        ),
        required_version=version,
    )
    with translated():
        reply = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request, timeout=_left(deadline))
    samples = [item.samples[0] for item in reply.items]
    versions = {span.policy_version for sample in samples for span in sample.spans}
    if version is not None and not versions <= {version}:
        raise NotAdmittedError(f"asked for answers of version {version}, got {sorted(versions)}")
    return samples


def _score(
    channel: grpc.Channel, chunk: Sequence[Prompt], answers: Sequence[rollout_pb2.GenerateReply.Sample], deadline: float
) -> Sequence[reward_pb2.ScoreReply.Item]:
    request = reward_pb2.ScoreRequest(
        items=[
            reward_pb2.ScoreRequest.Item(
                data_source=prompt.data_source,
                solution=answer.text,
                ground_truth=json.dumps(prompt.ground_truth),
                extra_info=json.dumps(dict(prompt.judged_info(len(answer.ids) // 4))),
            )
            for prompt, answer in zip(chunk, answers, strict=True)
        ]
    )
    with translated():
        return list(reward_pb2_grpc.RewardServiceStub(channel).Score(request, timeout=_left(deadline)).items)


def _is_correct(scored: reward_pb2.ScoreReply.Scored) -> bool:
    for name in ("acc", "correct"):
        if name in scored.breakdown:
            return scored.breakdown[name] >= 0.5
    return scored.value >= 1.0


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
            rollout, name = recipe.rollout, recipe.run.server_name
            return EvaluationEndpoints(
                samplers, reward, token, credentials, rollout.max_response_tokens, rollout.stop, name
            )
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
    prompts: Sequence[Prompt] = ()
    running: Future[None] | None = None

    def start(self, version: int, patience_seconds: float) -> None:
        """Starts an evaluation, which gives up and logs it if no sampler has the version within the patience."""
        assert self.running is None, "one evaluation at a time"
        self.running = in_thread("evaluation", self._run, version, patience_seconds)

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

    def _run(self, version: int, patience_seconds: float) -> None:
        if not self.prompts:
            self.prompts = load_evaluation_prompts(self.recipe)
        endpoints = wait_for_endpoints(self.buffer, self.recipe, version, patience_seconds, self.stop)
        if endpoints is not None:
            self.done(evaluate(version, self.prompts, endpoints))
        elif not self.stop.is_set():
            words = "evaluation of version %d skipped: no sampler carried it for %.0f s"
            log.warning(words, version, patience_seconds, extra={"version": version})


def load_evaluation_prompts(recipe: Recipe) -> Sequence[Prompt]:
    """The usable prompts of `data.eval_file`; logs the number of skipped rows. Raises DataError, ModelError."""
    prompts, faults = load_prompts(recipe.data.eval_file, recipe)
    if faults:
        log.warning("evaluation file %s: rows skipped: %s", recipe.data.eval_file, dict(faults))
    return prompts
