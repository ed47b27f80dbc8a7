"""The publisher's state for one sampler: its channel, the calls of a weight update, and their results."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import TypeVar, cast

import grpc

from tandem.protos import common_pb2, common_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import FencedError, MissingBaseWeightsError
from tandem.protos.manifest import encode_manifest
from tandem.protos.types import WeightGroupAddress, WeightManifest
from tandem.services.buffer.types import Sampler
from tandem.services.rpc.client import connect, from_rpc_error

log = logging.getLogger(__name__)

_PING_SECONDS = 2.0
_GRACE_SECONDS = 5.0  # the sampler's deadline comes first, because its error names the cause
_MAX_RETRY_SECONDS = 30.0

Reply = TypeVar("Reply")


class SamplerLink:
    """One start of one sampler; a restarted sampler gets a new link. Its calls carry `token`, over TLS if there are
    `credentials`, with a certificate that names `server_name`, by default the address's host.

    - `busy`: a publication or a catch-up is using it; guarded by the publisher's lock.
    - `failed`: its last update failed, so publications leave it out until a catch-up succeeds.
    - `lacks_base`: it reported that its model folder is not the adapters' base.
    """

    def __init__(
        self, sampler: Sampler, token: str, credentials: grpc.ChannelCredentials | None, server_name: str = ""
    ) -> None:
        self.sampler = sampler
        self.busy = False
        self.failed = False
        self.lacks_base = False
        self.silent_checks = 0
        """Checks in a row that found its heartbeat silent."""
        self._given_up = ""
        self._call: grpc.Future[object] | None = None
        self._failed_catch_ups = 0
        self._retry_at = 0.0
        self._channel = connect(sampler.address, token, credentials, server_name)
        self._rollout = rollout_pb2_grpc.RolloutServiceStub(self._channel)

    @property
    def may_retry(self) -> bool:
        """False for some time after a failed catch-up; the time grows with each failure."""
        return self._retry_at <= time.monotonic()

    def note_catch_up(self, succeeded: bool) -> None:
        if succeeded:
            self.failed = False
            self._failed_catch_ups, self._retry_at = 0, 0.0
            return
        self._failed_catch_ups += 1
        self._retry_at = time.monotonic() + min(2.0**self._failed_catch_ups, _MAX_RETRY_SECONDS)

    def holds(self, version: tuple[int, int]) -> bool:
        """Whether the sampler had these weights, by incarnation and version, when its state was last read."""
        sampler = self.sampler
        return sampler.state == "LIVE" and (sampler.incarnation, sampler.version) == version

    def ping(self) -> grpc.Future[common_pb2.InfoReply]:
        stub = common_pb2_grpc.InfoServiceStub(self._channel)
        return self._made(stub.Info.future(common_pb2.InfoRequest(), timeout=_PING_SECONDS))

    def join(
        self, address: WeightGroupAddress, first_rank: int, incarnation: int, timeout_seconds: float
    ) -> grpc.Future[rollout_pb2.JoinWeightGroupReply]:
        request = rollout_pb2.JoinWeightGroupRequest(
            **asdict(address), first_rank=first_rank, incarnation=incarnation, timeout_seconds=timeout_seconds
        )
        return self._made(self._rollout.JoinWeightGroup.future(request, timeout=timeout_seconds + _GRACE_SECONDS))

    def update(
        self, manifest: WeightManifest, timeout_seconds: float, group_name: str = ""
    ) -> grpc.Future[rollout_pb2.UpdateWeightsReply]:
        request = rollout_pb2.UpdateWeightsRequest(
            manifest=encode_manifest(manifest), group_name=group_name, timeout_seconds=timeout_seconds
        )
        return self._made(self._rollout.UpdateWeights.future(request, timeout=timeout_seconds + _GRACE_SECONDS))

    def give_up(self, why: str) -> None:
        """From another thread: ends the call under way, which then fails for this reason."""
        if self._call is not None and not self._call.done():
            self._given_up = why
            self._call.cancel()

    def reply(self, call: grpc.Future[Reply], failure: str) -> Reply | None:
        """The reply of a call; on failure marks the sampler as failed and returns None. Raises FencedError if the
        sampler has met a later trainer.
        """
        try:
            return call.result()
        except grpc.FutureCancelledError:
            self._note_failure(f"{failure}: {self._given_up}")
            return None
        except grpc.RpcError as error:
            cause = from_rpc_error(error)
            if isinstance(cause, FencedError):  # Redis may not know of it, if it lost its last writes
                raise FencedError(f"sampler {self.sampler.id}: {cause}") from None
            self._note_failure(f"{failure}: {cause}")
            self.lacks_base = self.lacks_base or isinstance(cause, MissingBaseWeightsError)
            return None

    def acknowledgement(
        self, call: grpc.Future[rollout_pb2.UpdateWeightsReply], manifest: WeightManifest
    ) -> rollout_pb2.UpdateWeightsReply | None:
        """The reply of an update, or None if the sampler does not hold every bucket as it was sent."""
        reply = self.reply(call, f"did not take version {manifest.policy_version}")
        if reply is not None and list(reply.digests) != [bucket.digest for bucket in manifest.buckets]:
            self._note_failure(f"acknowledged other digests for version {manifest.policy_version}")
            return None
        return reply

    def close(self) -> None:
        self._channel.close()

    def _made(self, call: grpc.Future[Reply]) -> grpc.Future[Reply]:
        self._call = cast("grpc.Future[object]", call)
        return call

    def _note_failure(self, text: str) -> None:
        log.warning("weights: sampler %s %s", self.sampler.id, text)
        self.failed = True
