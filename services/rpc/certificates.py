"""TLS credentials of servers and channels, from the files of a folder. `tandem certs init` writes them.

A folder holds `ca.crt` and, for a service, `service.crt` and `service.key`, for a client `client.crt` and `client.key`.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Literal

import grpc

from tandem.protos.errors import ConfigError
from tandem.services.rpc.tokens import read_private

CERTIFICATES_VARIABLE = "TANDEM_CERTIFICATES"
"""Environment variable of the certificates with which clients of the reward service connect."""
CA_FILE = "ca.crt"
_ROUNDS = 3  # flights of a handshake

Owner = Literal["service", "client"]


def server_credentials(folder: Path, host: str = "", *, client_certificates: bool) -> grpc.ServerCredentials:
    """Credentials with `service.crt`, for a server that clients know as `host`. With `client_certificates`, callers
    need a certificate of the same CA. Raises ConfigError as `channel_credentials`.
    """
    ca, key, certificate = _read(folder, "service", ssl.Purpose.SERVER_AUTH, host)
    return grpc.ssl_server_credentials([(key, certificate)], ca if client_certificates else None, client_certificates)


def http_context(folder: Path, host: str = "", *, client_certificates: bool) -> ssl.SSLContext:
    """The same for a server of HTTP. Raises ConfigError as `channel_credentials`."""
    _read(folder, "service", ssl.Purpose.SERVER_AUTH, host)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "service.crt", folder / "service.key")
    if client_certificates:
        context.load_verify_locations(folder / CA_FILE)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def channel_credentials(path: Path, owner: Owner = "client") -> grpc.ChannelCredentials:
    """Credentials of a client: a file is the CA of the services; a folder holds the client's certificate, too.

    Raises ConfigError for a file that cannot be read, a key that other users may read or that is not the certificate's,
    and a certificate that is expired, not yet valid, of another CA or for another purpose.
    """
    try:
        if path.is_dir():
            return grpc.ssl_channel_credentials(*_read(path, owner, ssl.Purpose.CLIENT_AUTH))
        ssl.create_default_context(cafile=path)
        return grpc.ssl_channel_credentials(path.read_bytes())
    except ssl.SSLError:
        raise ConfigError(f"{path} holds no certificate; name the ca.crt of the service") from None
    except OSError as error:
        raise ConfigError(f"certificates {path}: {error.strerror}; name a ca.crt, or its folder") from None


def _read(folder: Path, owner: Owner, purpose: ssl.Purpose, host: str = "") -> tuple[bytes, bytes, bytes]:
    """The CA, the key and its certificate, if they work for the purpose."""
    certificate, key = folder / f"{owner}.crt", folder / f"{owner}.key"
    try:
        texts = (folder / CA_FILE).read_bytes(), read_private(key), certificate.read_bytes()
        _try_handshake(folder / CA_FILE, certificate, key, purpose, host)
    except ssl.SSLCertVerificationError as error:
        fault = error.verify_message.rstrip(".")
        raise ConfigError(f"{certificate}: {fault}; `tandem certs init {folder}{_named(host)}` renews it") from None
    except ssl.SSLError as error:
        fault = (error.reason or "one of them is not PEM, or is encrypted").replace("_", " ").lower()
        raise ConfigError(f"{certificate} and {key.name} cannot be used with {CA_FILE}: {fault}") from None
    except OSError as error:
        remedy = f"; `tandem certs init {folder}` writes it" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{error.filename or key}: {error.strerror}{remedy}") from None
    return texts


def _named(host: str) -> str:
    return f" {host}" if host else ""


def _try_handshake(ca: Path, certificate: Path, key: Path, purpose: ssl.Purpose, host: str) -> None:
    """Makes a TLS handshake in memory, in which the other side checks the certificate. Raises SSLError."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for side in (server, client):
        side.load_cert_chain(certificate, key, password="")  # without one, OpenSSL asks on the terminal
        side.load_verify_locations(ca)
    client.check_hostname = bool(host)
    if purpose is ssl.Purpose.CLIENT_AUTH:
        client.verify_mode, server.verify_mode = ssl.CERT_NONE, ssl.CERT_REQUIRED
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname=host or None),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_ROUNDS):
        for one in sides:
            with suppress(ssl.SSLWantReadError):
                one.do_handshake()
