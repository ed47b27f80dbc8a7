"""Checks of the answers that every service gives about itself: Info, health and reflection."""

from __future__ import annotations

import time

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tandem.protos import common_pb2, common_pb2_grpc
from tandem.services.buffer.buffer import Buffer
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.server import INFO_SERVICE
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.service_info import software_version

RPC_SECONDS = 10.0


def token_of(buffer: Buffer, role: Role = Role.read) -> str:
    return run_token(buffer.secret(), role)


def ask_info(address: str, token: str = "") -> common_pb2.InfoReply:
    with connect(address, token) as channel, translated():
        return common_pb2_grpc.InfoServiceStub(channel).Info(common_pb2.InfoRequest(), timeout=RPC_SECONDS)


def health_of(address: str, name: str) -> int:
    with connect(address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=RPC_SECONDS).status)


def listed_services(address: str, token: str = "") -> set[str]:
    with connect(address, token) as channel:
        return set(ProtoReflectionDescriptorDatabase(channel).get_services())


def check_what_it_says(
    address: str,
    buffer: Buffer,
    *,
    name: str,
    service_names: tuple[str, ...],
    started_after: float,
    policy_version: int = -1,
    incarnation: int | None = None,
) -> common_pb2.InfoReply:
    """Fails unless the service of that name answers completely; returns its Info. Nothing may be in flight.

    `service_names` are the services besides Info, health and reflection. `incarnation` is by default the current one.
    """
    for one in ("", *service_names, INFO_SERVICE):
        assert health_of(address, one) == health_pb2.HealthCheckResponse.SERVING, one
    with pytest.raises(grpc.RpcError) as unknown:
        health_of(address, "tandem.v1.NoSuchService")
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    always = {INFO_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME}
    token = token_of(buffer)
    assert listed_services(address, token) == {*service_names, *always}

    info = ask_info(address, token)
    assert (info.service, info.run_id, info.software_version) == (name, buffer.run_id, software_version())
    assert started_after <= info.started_at <= time.time()
    counts = {figure: float(number) for figure, number in buffer.counts().items()}
    assert info.policy_version == policy_version
    assert info.incarnation == (counts["incarnation"] if incarnation is None else incarnation)
    assert {figure: info.figures[figure] for figure in counts if figure in info.figures} == counts
    assert info.activity and "\n" not in info.activity
    return info
