"""`tandem health` asks real servers, with and without TLS, and needs no token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.protos import common_pb2
from tandem.protos.errors import AuthenticationError, ConfigError, UnavailableError
from tandem.services.commands.certs import write_certificates
from tandem.services.commands.health import check_health
from tandem.services.rpc.certificates import CERTIFICATES_VARIABLE, server_credentials
from tandem.services.rpc.server import ADDRESS_FILE_VARIABLE, ServerThread
from tandem.services.rpc.tokens import Tokens


@contextmanager
def serving(certificates: Path | None = None) -> Iterator[str]:
    credentials = certificates and server_credentials(certificates, client_certificates=True)
    tokens = Tokens.of_run("a secret")
    server = ServerThread("127.0.0.1", 0, info=common_pb2.InfoReply, tokens=tokens, credentials=credentials or None)
    try:
        yield server.address
    finally:
        server.stop(0.1)


def test_a_service_that_serves_is_healthy_without_a_token() -> None:
    with serving() as address:
        assert check_health(address, "") == f"{address}: SERVING"
    with pytest.raises(UnavailableError, match="cannot be reached"):
        check_health(address, "")


def test_the_address_is_read_from_the_file_that_the_service_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="TANDEM_ADDRESS_FILE"):
        check_health("", "")
    monkeypatch.setenv(ADDRESS_FILE_VARIABLE, str(tmp_path / "address"))
    with pytest.raises(UnavailableError, match="does not listen yet"):
        check_health("", "")
    with serving() as address:
        assert check_health("", "") == f"{address}: SERVING"


def test_it_works_over_tls_by_a_common_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a container is in no certificate; `localhost` is in each of `tandem certs init`."""
    write_certificates(tmp_path, ["elsewhere.example"], 1)
    with serving(tmp_path) as address:
        monkeypatch.setenv(CERTIFICATES_VARIABLE, str(tmp_path))
        assert check_health(address, "localhost").endswith("SERVING")
        with pytest.raises(AuthenticationError, match="not for this address"):
            check_health(address, "another.example")
        monkeypatch.delenv(CERTIFICATES_VARIABLE)
        with pytest.raises(UnavailableError):
            check_health(address, "")
