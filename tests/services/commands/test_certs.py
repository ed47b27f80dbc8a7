"""`tandem certs init`: what it writes, what it keeps, and one line for each bad input."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from tandem.protos.errors import ConfigError, UserError
from tandem.services.cli import app
from tandem.services.commands import certs
from tandem.services.commands.certs import write_certificates
from tandem.services.rpc.certificates import channel_credentials, server_credentials
from tests.support.certificates import HOUR, issue

LOCAL = ["localhost", "127.0.0.1", "::1"]


def read(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def names(file: Path) -> list[str]:
    found = read(file).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def purposes(file: Path) -> list[x509.ObjectIdentifier]:
    return list(read(file).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_the_command_makes_a_ca_and_certificates_that_no_other_user_can_use(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "certs"
    done = CliRunner().invoke(app, ["certs", "init", str(folder), "Feed.example.org", "10.0.0.2", "--days", "7"])
    assert done.exit_code == 0, done.output
    assert "for localhost, 127.0.0.1, ::1, feed.example.org, 10.0.0.2; valid until 20" in done.output
    assert sorted(file.name for file in folder.iterdir()) == [
        f"{owner}.{kind}" for owner in ("ca", "client", "service") for kind in ("crt", "key")
    ]
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.glob("*.key")} == {0o600}
    assert names(folder / "service.crt") == [*LOCAL, "feed.example.org", "10.0.0.2"]
    assert purposes(folder / "client.crt") == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert set(purposes(folder / "service.crt")) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    left = read(folder / "service.crt").not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=6) < left < timedelta(days=7)
    for host in (*LOCAL, "feed.example.org", "10.0.0.2"):
        server_credentials(folder, host, client_certificates=True)
    channel_credentials(folder)


def test_strict_verification_accepts_them(tmp_path: Path) -> None:
    """Python 3.13 and other implementations demand every extension of RFC 5280."""
    write_certificates(tmp_path, [], 1)
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "service.crt", tmp_path / "service.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = context.wrap_bio(to_client, to_server, server_hostname="::1")
    other = server.wrap_bio(to_server, to_client, server_side=True)
    with pytest.raises(ssl.SSLWantReadError):
        one.do_handshake()
    with pytest.raises(ssl.SSLWantReadError):
        other.do_handshake()
    one.do_handshake()


def test_a_second_time_renews_the_certificates_under_the_same_ca(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["first"], 1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    write_certificates(tmp_path, ["second", "first"], 2)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert {name for name in before if before[name] == after[name]} == {"ca.crt", "ca.key"}
    assert sorted(names(tmp_path / "service.crt")) == sorted([*LOCAL, "first", "second"])


def test_no_certificate_outlives_its_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs, "_CA_DAYS", 2)
    write_certificates(tmp_path, [], 30)
    assert read(tmp_path / "service.crt").not_valid_after_utc == read(tmp_path / "ca.crt").not_valid_after_utc


@pytest.mark.parametrize(
    "host", ["", "a b", "host:443", "http://host", "-host", "10.0.0.256", "a..b", "x" * 64, "hôte", "*", "a.*"]
)
def test_a_bad_host_is_refused_before_anything_is_written(tmp_path: Path, host: str) -> None:
    with pytest.raises(UserError, match="is neither a host name nor an IP address"):
        write_certificates(tmp_path / "new", [host], 1)
    assert not (tmp_path / "new").exists()


def _damage(folder: Path) -> None:
    (folder / "ca.crt").write_text("no certificate")


def _damage_key(folder: Path) -> None:
    (folder / "ca.key").write_text("no key")


def _change_key(folder: Path) -> None:
    (folder / "ca.key").write_bytes((folder / "client.key").read_bytes())


def _lose_key(folder: Path) -> None:
    (folder / "ca.key").unlink()


def _open_key(folder: Path) -> None:
    (folder / "ca.key").chmod(0o644)


def _take_a_service_for_the_ca(folder: Path) -> None:
    for kind in ("crt", "key"):
        (folder / f"ca.{kind}").write_bytes((folder / f"service.{kind}").read_bytes())


def _expire(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certs, "_CA_DAYS", 0)
        certs._make_authority(folder)


def _damage_service(folder: Path) -> None:
    (folder / "service.crt").write_text("no certificate")


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (_damage, r"ca\.crt is damaged \(.*\); restore it, or make a new CA in another folder"),
    (_damage_key, r"ca\.crt is damaged \("),
    (_change_key, r"ca\.crt is damaged \(ca\.key is not its key\)"),
    (_take_a_service_for_the_ca, r"ca\.crt is damaged \(it may not sign certificates\)"),
    (_lose_key, r"ca\.key: No such file or directory"),
    (_open_key, r"other users may read or write it; run chmod 600"),
    (_expire, r"ca\.crt expired on 20.*; make a new CA in another folder"),
    (_damage_service, r"service\.crt is not a certificate of this command; delete it and try again"),
]


@pytest.mark.parametrize(("spoil", "says"), FAULTS, ids=[spoil.__name__[1:] for spoil, _ in FAULTS])
def test_a_folder_that_cannot_be_used_stays_as_it_is(tmp_path: Path, spoil: Callable[[Path], None], says: str) -> None:
    write_certificates(tmp_path, [], 30)
    spoil(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=says) as caught:
        write_certificates(tmp_path, [], 30)
    assert "\n" not in str(caught.value)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/certs: Not a directory; mend that, or name another folder"):
        write_certificates(tmp_path / "file" / "certs", [], 1)
    with pytest.raises(ConfigError, match=r"No space|Permission denied|Read-only|not permitted|No such file"):
        write_certificates(Path("/proc/certs"), [], 1)


def test_an_expired_certificate_is_renewed(tmp_path: Path) -> None:
    write_certificates(tmp_path, [], 1)
    issue(tmp_path, "service", host="kept.example.org", ends=-HOUR / 2)
    with pytest.raises(ConfigError, match="has expired"):
        server_credentials(tmp_path, client_certificates=True)
    write_certificates(tmp_path, [], 1)
    server_credentials(tmp_path, "kept.example.org", client_certificates=True)
