"""A sampler's gRPC side: direct sampling (for evaluation), pause and drain, and the two calls of a weight update."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace

import grpc
import numpy as np

from tandem.protos import common_pb2, rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import DataError, NotAdmittedError
from tandem.protos.manifest import decode_manifest
from tandem.protos.types import SamplingParameters, Trajectory, WeightGroupAddress
from tandem.rollout.sampler import Sampler
from tandem.services.buffer.buffer import Claim
from tandem.services.leases import GroupResult, LeaseLoop

SERVICE_NAME = "tandem.v1.RolloutService"

Claims = LeaseLoop[Claim, GroupResult]
Context = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """gRPC `RolloutService` of one sampler."""

    name: str
    engine: Sampler
    claims: Claims
    max_response_tokens: int

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Context) -> rollout_pb2.GenerateReply:
        """Samples every item. If a version is required, a token of another one fails the call (NotAdmittedError)."""
        required = request.required_version if request.HasField("required_version") else None
        if required is not None and self.engine.policy_version != required:
            raise NotAdmittedError(f"asked for version {required}, {self.name} carries {self.engine.policy_version}")
        sampling = self._sampling(request.sampling)
        items = await asyncio.gather(*(self._sample(n, item, sampling) for n, item in enumerate(request.items)))
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
        await self.claims.drained(request.timeout_seconds)
        return self._state()

    async def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: Context
    ) -> rollout_pb2.JoinWeightGroupReply:
        group = (request.group_name, request.world_size, request.backend)
        address = WeightGroupAddress(request.host, request.port, *group)
        await self.engine.join_weight_group(address, request.first_rank, request.timeout_seconds)
        return rollout_pb2.JoinWeightGroupReply()

    async def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: Context
    ) -> rollout_pb2.UpdateWeightsReply:
        """Receives a version during sampling and applies it between two steps."""
        manifest = decode_manifest(request.manifest)
        report = await self.engine.update_weights(manifest, request.group_name, request.timeout_seconds)
        return rollout_pb2.UpdateWeightsReply(policy_version=manifest.policy_version, **asdict(report))

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
        )

    async def _sample(
        self, number: int, item: rollout_pb2.GenerateRequest.Item, sampling: SamplingParameters
    ) -> list[rollout_pb2.GenerateReply.Sample]:
        if len(item.prompt_ids) % 4:
            raise DataError(f"item {number}: prompt_ids are int32, {len(item.prompt_ids)} bytes are none")
        prompt = np.frombuffer(item.prompt_ids, "<i4")
        # Items of one request have different random numbers.
        key = f"generate-{number}" if sampling.seed is not None else ""
        rows = await self.engine.sample(prompt, max(item.num_samples, 1), sampling, key=key)
        return [_sample_message(row, len(prompt)) for row in rows]


def _sample_message(row: Trajectory, num_prompt_tokens: int) -> rollout_pb2.GenerateReply.Sample:
    (segment,) = row.segments
    spans = [asdict(replace(span, first_token=span.first_token - num_prompt_tokens)) for span in segment.spans]
    return rollout_pb2.GenerateReply.Sample(
        ids=segment.ids[num_prompt_tokens:].astype("<i4").tobytes(),
        behavior_logprobs=segment.behavior_logprobs[num_prompt_tokens:].astype("<f4").tobytes(),
        text=row.text,
        finish_reason=row.finish_reason,
        spans=[common_pb2.VersionSpan(**span) for span in spans],
    )
