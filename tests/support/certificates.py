"""Certificates that `tandem certs init` does not make: expired ones, and those for other hosts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import grpc

from tandem.services.commands import certs

HOUR = timedelta(hours=1)


def issue(
    folder: Path, owner: str, *, host: str = "127.0.0.1", starts: timedelta = -HOUR, ends: timedelta = HOUR
) -> None:
    """Writes OWNER.crt and OWNER.key for a service, signed by the folder's CA, valid between two times from now."""
    with mock.patch.object(certs, "_CLOCK_SKEW", -starts):
        authority = certs._read_authority(folder)
        certs._issue(folder, owner, authority, certs._BOTH, [certs._name(host)], datetime.now(UTC) + ends)


def unchecked_server(folder: Path, owner: str) -> grpc.ServerCredentials:
    """The credentials of a server whose certificate Tandem would refuse to load."""
    key, certificate = ((folder / f"{owner}.{kind}").read_bytes() for kind in ("key", "crt"))
    return grpc.ssl_server_credentials([(key, certificate)])


def unchecked_client(folder: Path, owner: str) -> grpc.ChannelCredentials:
    """The same for a client."""
    ca, key, certificate = ((folder / name).read_bytes() for name in ("ca.crt", f"{owner}.key", f"{owner}.crt"))
    return grpc.ssl_channel_credentials(ca, key, certificate)
