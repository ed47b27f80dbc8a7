"""`tandem health`: asks the gRPC health service, as the probes of containers do."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from grpc_health.v1 import health_pb2

from tandem.protos.errors import ConfigError, UnavailableError
from tandem.services.addresses import named_addresses
from tandem.services.rpc.certificates import CERTIFICATES_VARIABLE, channel_credentials
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.server import ADDRESS_FILE_VARIABLE

_SECONDS = 5.0


def check_health(address: str, server_name: str) -> str:
    """A line that says that the service at the address serves. Raises UnavailableError if it does not."""
    (place,) = named_addresses(address or _address_of_this_container())
    folder = os.environ.get(CERTIFICATES_VARIABLE, "")
    credentials = channel_credentials(Path(folder)) if folder else None
    with closing(connect(place, credentials=credentials, server_name=server_name)) as channel, translated():
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        reply = check(health_pb2.HealthCheckRequest(), timeout=_SECONDS)
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise UnavailableError(f"{place}: {status}")
    return f"{place}: {status}"


def _address_of_this_container() -> str:
    file = os.environ.get(ADDRESS_FILE_VARIABLE, "")
    if not file:
        raise ConfigError(f"no address: name one, or set {ADDRESS_FILE_VARIABLE} as the service has it")
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UnavailableError(f"{file}: {error.strerror}: the service does not listen yet") from None
