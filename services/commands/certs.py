"""`tandem certs init`: a CA of your own, and the certificates that it signs for services and clients."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.protos.errors import ConfigError, UserError
from tandem.services.rpc.certificates import CA_FILE
from tandem.services.rpc.tokens import read_private

_CA_DAYS = 3650
_CLOCK_SKEW = timedelta(hours=1)  # the clocks of other machines may be behind
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?:\*\.)?(?:{_LABEL}\.)*{_LABEL}")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_BOTH = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]

_Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: _Key


def write_certificates(folder: Path, hosts: Sequence[str], days: int) -> list[str]:
    """Writes service.crt and client.crt with their keys, and ca.crt and ca.key if the folder has no CA. Returns a line
    about each certificate. The names of an earlier service.crt stay in the new one.

    Raises UserError for a name that no certificate can hold, ConfigError for a folder or a CA that cannot be used.
    """
    names = [_name(host) for host in (*_LOCAL, *hosts)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / CA_FILE).exists() and not (folder / "ca.key").exists():
            _make_authority(folder)
        authority = _read_authority(folder)
        names = list(dict.fromkeys([*names, *_earlier_names(folder / "service.crt")]))
        until = min(datetime.now(UTC) + timedelta(days=days), authority.certificate.not_valid_after_utc)
        _issue(folder, "service", authority, _BOTH, names, until)
        _issue(folder, "client", authority, _BOTH[1:], [], until)
    except OSError as error:
        place = error.filename or folder
        raise ConfigError(f"{place}: {error.strerror}; mend that, or name another folder") from None
    return [
        f"{folder / CA_FILE}: the CA, valid until {authority.certificate.not_valid_after_utc:%F}",
        f"{folder / 'service.crt'}: for {', '.join(str(name.value) for name in names)}; valid until {until:%F}",
        f"{folder / 'client.crt'}: for callers; valid until {until:%F}",
    ]


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        name = host.lower()
    if not _HOST.fullmatch(name) or len(name) > 253 or name.rpartition(".")[2].isdigit():
        raise UserError(f"{host!r} is neither a host name nor an IP address; name hosts as clients do, without a port")
    return x509.DNSName(name)


def _earlier_names(file: Path) -> Iterable[x509.GeneralName]:
    if not file.exists():
        return []
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (ValueError, x509.ExtensionNotFound):
        raise ConfigError(f"{file} is not a certificate of this command; delete it and try again") from None


def _make_authority(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(f"Tandem CA {secrets.token_hex(4)}")
    until = datetime.now(UTC) + timedelta(days=_CA_DAYS)
    usage = _key_usage(signs_certificates=True)
    unsigned = (
        _unsigned(subject, subject, key.public_key(), until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    _write_pair(folder, "ca", unsigned.sign(key, hashes.SHA256()), key)


def _read_authority(folder: Path) -> _Authority:
    """The CA of the folder. Raises ConfigError if it is damaged or expired, OSError if it cannot be read."""
    certificate_file, key_file = folder / CA_FILE, folder / "ca.key"
    try:
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        key = serialization.load_pem_private_key(read_private(key_file), password=None)
        if not isinstance(key, _Key) or key.public_key() != certificate.public_key():
            raise ValueError(f"{key_file.name} is not its key")
        if not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise ValueError("it may not sign certificates")
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        fault = str(error).partition("\n")[0]
        raise ConfigError(
            f"{certificate_file} is damaged ({fault}); restore it, or make a new CA in another folder"
        ) from None
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        fault = f"{certificate_file} expired on {certificate.not_valid_after_utc:%F}"
        raise ConfigError(f"{fault}; make a new CA in another folder, and give its ca.crt to all services and clients")
    return _Authority(certificate, key)


def _issue(
    folder: Path,
    owner: str,
    authority: _Authority,
    purposes: Sequence[x509.ObjectIdentifier],
    names: Sequence[x509.GeneralName],
    until: datetime,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    signer = authority.key.public_key()
    unsigned = (
        _unsigned(_subject(f"tandem {owner}"), authority.certificate.subject, key.public_key(), until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )
    if names:
        unsigned = unsigned.add_extension(x509.SubjectAlternativeName(names), critical=False)
    _write_pair(folder, owner, unsigned.sign(authority.key, hashes.SHA256()), key)


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCK_SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_pair(folder: Path, owner: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(folder / f"{owner}.key", private, 0o600)
    _write(folder / f"{owner}.crt", certificate.public_bytes(pem), 0o644)


def _write(file: Path, data: bytes, mode: int) -> None:
    temporary = file.with_name(file.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as out:
        out.write(data)
    temporary.replace(file)
