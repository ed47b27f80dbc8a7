"""Addresses of a service that may have several replicas. Calls rotate over them and skip replicas that are down."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

from tandem.protos.errors import UnavailableError, UserError

ADDRESS_VARIABLE = "TANDEM_REWARD_ADDRESS"
DEFAULT_PORT = 50051
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
_CONNECT_SECONDS = 3.0


def named_addresses(addresses: str | Sequence[str] = "") -> tuple[str, ...]:
    """The given addresses (text: separated by commas), otherwise those of TANDEM_REWARD_ADDRESS, otherwise the default.
    Raises UserError if an address is not host:port.
    """
    parts = addresses.split(",") if isinstance(addresses, str) else addresses
    named = tuple(part.strip() for part in parts if part.strip())
    if not named:
        variable = os.environ.get(ADDRESS_VARIABLE, "")
        return named_addresses(variable) if variable.strip(", ") else (DEFAULT_ADDRESS,)
    for address in named:
        if address.startswith("unix:"):
            continue
        host, sign, port = address.rpartition(":")
        if not sign or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(f"address {address!r} is not host:port (several are separated by commas)")
    return named


def check_listening(addresses: Sequence[str]) -> None:
    """Raises UnavailableError if nothing listens at any of the addresses: a command need not retry them for long."""
    failures = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            if address.startswith("unix:"):
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(_CONNECT_SECONDS)
                    probe.connect(address.removeprefix("unix:").removeprefix("//"))
            else:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
            return
        except OSError as error:
            failures.append(error.strerror or str(error))
    raise UnavailableError(
        f"the reward service at {', '.join(addresses)} cannot be reached ({', '.join(dict.fromkeys(failures))}); "
        f"start it with `tandem reward serve`, or name another by --address or {ADDRESS_VARIABLE}"
    )


def target_of(addresses: Sequence[str]) -> str:
    """The addresses as a gRPC target. A single name stays a name, which gRPC resolves again when its IPs change. Raises
    UserError if one of several addresses cannot be resolved, or they are not all IPv4 or all IPv6.
    """
    if len(addresses) == 1:
        return addresses[0] if addresses[0].startswith("unix:") else f"dns:///{addresses[0]}"
    if any(address.startswith("unix:") for address in addresses):
        raise UserError("a unix socket cannot be one of several addresses")
    found = [_resolve(address) for address in addresses]
    for version, kind in ((4, "ipv4"), (6, "ipv6")):
        if all(version in one for one in found):
            return f"{kind}:" + ",".join(dict.fromkeys(place for one in found for place in one[version]))
    raise UserError(f"addresses {', '.join(addresses)}: some are only IPv4, some only IPv6; use addresses of one kind")


def is_loopback(host: str) -> bool:
    """Whether the name or IP address leads to this machine alone. An unknown name does: nothing can listen there."""
    try:
        places = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(place[4][0]).partition("%")[0]).is_loopback for place in places)


def is_unspecified(host: str) -> bool:
    """Whether the host stands for all addresses of this machine, as 0.0.0.0 does. No client connects to it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _resolve(address: str) -> dict[int, list[str]]:
    """The IP addresses of host:port by IP version, with the port."""
    host, _, port = address.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"address {address}: {error.strerror or error}") from None
    found: dict[int, list[str]] = {}
    for info in infos:
        ip = ipaddress.ip_address(str(info[4][0]).partition("%")[0])
        found.setdefault(ip.version, []).append(f"{ip}:{port}" if ip.version == 4 else f"[{ip}]:{port}")
    return found
