"""A sampler's gRPC side: direct sampling (for evaluation), pause and drain, and the two calls of a weight update."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
import numpy as np

from tandem.protos import common_pb2, rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import DataError, EpisodeError, NotAdmittedError
from tandem.protos.manifest import decode_manifest
from tandem.protos.types import Prompt, SamplingParameters, Trajectory, WeightGroupAddress, WeightManifest
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.gather import gather_or_cancel
from tandem.rollout.sampler import Sampler
from tandem.services.buffer.types import Claim
from tandem.services.group_leases import GroupResult
from tandem.services.leases import LeaseLoop
from tandem.services.rollout.episodes import requested_prompts
from tandem.services.rpc.limits import RpcLimits

log = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.RolloutService"
RPC_LIMITS = RpcLimits(
    payload_bytes={
        f"/{SERVICE_NAME}/Generate": 64 << 20,  # 64 prompts of 256k tokens
        f"/{SERVICE_NAME}/UpdateWeights": 64 << 20,  # about 200 bytes for each tensor of a manifest
    }
)
"""For the server on which the servicer is registered."""
MAX_SAMPLES = 8192
"""Samples of one Generate."""
_LONGEST_SECONDS = 86_400.0
_MOST_RANKS = 1 << 16

Claims = LeaseLoop[Claim, GroupResult]
Context = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """gRPC `RolloutService` of one sampler."""

    name: str
    engine: Sampler
    claims: Claims
    max_response_tokens: int
    weights_folder: Path
    episodes: EpisodeSampler | None = None

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Context) -> rollout_pb2.GenerateReply:
        """Samples every item. If a version is required, a token of another one fails the call (NotAdmittedError)."""
        required = request.required_version if request.HasField("required_version") else None
        if required is not None and self.engine.policy_version != required:
            raise NotAdmittedError(f"asked for version {required}, {self.name} carries {self.engine.policy_version}")
        num_samples = sum(max(item.num_samples, 1) for item in request.items)
        if num_samples > MAX_SAMPLES:
            raise DataError(f"the items ask for {num_samples:,} samples, at most {MAX_SAMPLES:,} are allowed")
        sampling = self._sampling(request.sampling)
        items = await gather_or_cancel(self._sample(n, item, sampling) for n, item in enumerate(request.items))
        reply = rollout_pb2.GenerateReply(items=[rollout_pb2.GenerateReply.Item(samples=samples) for samples in items])
        if required is not None:
            found = {span.policy_version for item in reply.items for sample in item.samples for span in sample.spans}
            if found - {required}:
                raise NotAdmittedError(f"asked for version {required}, tokens were sampled by {sorted(found)}")
        return reply

    async def Pause(self, request: rollout_pb2.PauseRequest, context: Context) -> rollout_pb2.SamplerState:
        """Stops claiming prompts. Groups in flight continue."""
        self.claims.paused = True
        return self._state()

    async def Resume(self, request: rollout_pb2.ResumeRequest, context: Context) -> rollout_pb2.SamplerState:
        self.claims.paused = False
        return self._state()

    async def Drain(self, request: rollout_pb2.DrainRequest, context: Context) -> rollout_pb2.SamplerState:
        """Pauses, and replies once nothing is in flight or at the deadline. The reply says which."""
        self.claims.paused = True
        await self.claims.drained(_time_limit(request.timeout_seconds))
        return self._state()

    async def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: Context
    ) -> rollout_pb2.JoinWeightGroupReply:
        if not 0 < request.first_rank < request.world_size <= _MOST_RANKS:
            raise DataError(f"rank {request.first_rank} of {request.world_size}: no such place")
        address = WeightGroupAddress(request.host, request.group_name, request.world_size, request.backend)
        seconds = _time_limit(request.timeout_seconds)
        await self.engine.join_weight_group(address, request.first_rank, request.incarnation, seconds)
        return rollout_pb2.JoinWeightGroupReply()

    async def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: Context
    ) -> rollout_pb2.UpdateWeightsReply:
        """Receives a version during sampling and applies it between two steps."""
        seconds = _time_limit(request.timeout_seconds)
        manifest = self._with_own_folder(decode_manifest(request.manifest))
        report = await self.engine.update_weights(manifest, request.group_name, seconds)
        return rollout_pb2.UpdateWeightsReply(policy_version=manifest.policy_version, **asdict(report))

    def _with_own_folder(self, manifest: WeightManifest) -> WeightManifest:
        """The manifest, whose folder must lie in that of the run's weights: a caller cannot have others read."""
        if manifest.backend != "disk" or not manifest.buckets:
            return manifest
        own = self.weights_folder.resolve()
        try:
            folder = Path(manifest.location).resolve()
        except (OSError, ValueError) as error:  # a name that is too long, or holds NUL
            raise DataError(f"weights folder {manifest.location!r:.80}: {error}") from None
        if folder.parent != own:
            remedy = "give run.folder as the same absolute path on all machines"
            raise DataError(f"weights folder {str(folder)!r:.200} does not lie in {own}; {remedy}")
        return replace(manifest, location=str(folder))

    def _state(self) -> rollout_pb2.SamplerState:
        return rollout_pb2.SamplerState(
            paused=self.claims.paused,
            groups_in_flight=self.claims.num_held,
            policy_version=self.engine.policy_version,
        )

    def _sampling(self, message: rollout_pb2.SamplingParameters) -> SamplingParameters:
        # An unset field reads as 0. Temperature 0 is greedy; 0 is invalid in the other fields.
        return SamplingParameters(
            temperature=message.temperature,
            top_p=message.top_p or 1.0,
            top_k=message.top_k,
            max_tokens=message.max_tokens or self.max_response_tokens,
            seed=message.seed if message.HasField("seed") else None,
            stop=tuple(message.stop),
            repetition_penalty=message.repetition_penalty or 1.0,
            min_p=message.min_p,
        )

    async def _sample(
        self, number: int, item: rollout_pb2.GenerateRequest.Item, sampling: SamplingParameters
    ) -> list[rollout_pb2.GenerateReply.Sample]:
        if len(item.prompt_ids) % 4:
            raise DataError(f"item {number}: prompt_ids are int32, {len(item.prompt_ids)} bytes are none")
        prompt = np.frombuffer(item.prompt_ids, "<i4")
        if item.HasField("episode"):
            prompts, episodes = requested_prompts(item, prompt, sampling), self._episodes_in(item.episode.environment)
            return await gather_or_cancel(_played(episodes, one, number) for number, one in enumerate(prompts))
        # Items of one request have different random numbers.
        key = f"generate-{number}" if sampling.seed is not None else ""
        rows = await self.engine.sample(prompt, max(item.num_samples, 1), sampling, key=key)
        return [_sample_message(row) for row in rows]

    def _episodes_in(self, environment: str) -> EpisodeSampler:
        """What plays episodes in the environment that a request names; "" is the recipe's."""
        if self.episodes is None:
            raise DataError(f"{self.name} has no environment, so it plays no episodes")
        if environment and environment not in self.episodes.others:
            raise DataError(f"{self.name}: no evaluation set of its recipe has the class and arguments of this call")
        return self.episodes.others[environment] if environment else self.episodes


async def _played(episodes: EpisodeSampler, prompt: Prompt, number: int) -> rollout_pb2.GenerateReply.Sample:
    """An episode. One that fails is no fault of the other samples."""
    try:
        return _sample_message(await episodes.sample(prompt, prompt.sampling, number))
    except (EpisodeError, DataError) as error:
        log.warning("episode %s failed: %s", prompt.group_id, error)
        return rollout_pb2.GenerateReply.Sample(finish_reason="error", episode=json.dumps({"error": str(error)}))


def _time_limit(seconds: float) -> float:
    if not 0.0 <= seconds <= _LONGEST_SECONDS:  # nor NaN
        raise DataError(f"timeout_seconds is {seconds:g}, not between 0 and {_LONGEST_SECONDS:g}")
    return seconds


def _sample_message(row: Trajectory) -> rollout_pb2.GenerateReply.Sample:
    """The sampled tokens of all segments, without those between the turns."""
    ids, logprobs, spans, count = [], [], [], 0
    for segment in row.segments:
        sampled = segment.loss_mask.astype(bool)
        spans += [replace(span, first_token=count + int(sampled[: span.first_token].sum())) for span in segment.spans]
        ids.append(segment.ids[sampled])
        logprobs.append(segment.behavior_logprobs[sampled])
        count += segment.num_loss_tokens
    return rollout_pb2.GenerateReply.Sample(
        ids=np.concatenate(ids).astype("<i4").tobytes(),
        behavior_logprobs=np.concatenate(logprobs).astype("<f4").tobytes(),
        text=row.text,
        finish_reason=row.finish_reason,
        spans=[common_pb2.VersionSpan(**asdict(span)) for span in spans],
        earned_reward=row.earned_reward,
        episode=json.dumps(dict(row.metadata)) if row.metadata else "",
    )
