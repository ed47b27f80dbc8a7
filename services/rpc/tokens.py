"""Bearer tokens: what a server accepts, and the role that each method of a service needs."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool

from tandem.protos import common_pb2
from tandem.protos.errors import AccessError, AuthenticationError, ConfigError, UserError

TOKEN_VARIABLE = "TANDEM_TOKEN"
"""Environment variable of the token that clients of the reward service send."""
HEADER = "authorization"
_SCHEME = "Bearer "
_OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})  # probes have no token, and learn only whether it serves
_READ_SERVICES = frozenset({"grpc.reflection.v1alpha.ServerReflection"})

ROLES: dict[str, common_pb2.Role] = {
    name.lower(): role  # type: ignore[misc]
    for name, role in common_pb2.Role.items()
    if role != common_pb2.NONE
}
"""The roles of tokens by name, each including those before it."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Metadata = Iterable[tuple[str, str | bytes]]


class Tokens:
    """The tokens that a server accepts: their SHA-256, each with its role."""

    def __init__(self, roles: Mapping[str, common_pb2.Role]) -> None:
        self._roles = roles

    @classmethod
    def of_run(cls, secret: str) -> Tokens:
        """The tokens of a run: one for each role."""
        return cls({_digest(run_token(secret, role)): role for role in ROLES.values()})

    @classmethod
    def load(cls, file: Path) -> Tokens:
        """The tokens of a file that `add_token` wrote. Raises ConfigError, also if other users may read the file."""
        try:
            if file.stat().st_mode & 0o077:
                raise ConfigError(f"token file {file}: other users may read or write it; run chmod 600 {file}")
            entries = tomllib.loads(file.read_text(encoding="utf-8"))
            return cls({str(entry["sha256"]): ROLES[entry["role"]] for entry in entries.values()})
        except OSError as error:
            raise ConfigError(f"token file {file}: {error.strerror}; `tandem reward token` writes one") from None
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"token file {file} cannot be read: {error}; `tandem reward token` writes one") from None

    def check(self, metadata: Metadata, needed: common_pb2.Role) -> None:
        """Raises AuthenticationError without a valid token, AccessError if its role does not include `needed`."""
        if needed == common_pb2.NONE:
            return
        given = next((value for key, value in metadata if key == HEADER), "")
        text = given.decode(errors="replace") if isinstance(given, bytes) else given
        role = self._roles.get(_digest(text.removeprefix(_SCHEME))) if text.startswith(_SCHEME) else None
        if role is None:
            fault = "this token is not known here" if given else "the call has no token"
            raise AuthenticationError(f"{fault}; set {TOKEN_VARIABLE} to one that this service accepts")
        if role < needed:
            has, needs = (common_pb2.Role.Name(one).lower() for one in (role, needed))
            raise AccessError(f"the call needs a token with the role {needs}, this one has {has}")


def run_token(secret: str, role: common_pb2.Role) -> str:
    """The token of a run for a role, from the run's secret. Nobody finds another role's token from it."""
    return hmac.new(secret.encode(), common_pb2.Role.Name(role).encode(), hashlib.sha256).hexdigest()


def add_token(file: Path, name: str, role: str) -> str:
    """Makes a token and appends its name, role and SHA-256 to the file. Raises UserError for a name that is taken."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is not a name of letters, digits, - and _")
    if file.exists() and name in tomllib.loads(file.read_text(encoding="utf-8")):
        raise UserError(f"{file} holds a token for {name}; delete its line first, or choose another name")
    token = secrets.token_urlsafe(32)
    with open(file, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
        out.write(f'{name} = {{ role = "{role}", sha256 = "{_digest(token)}" }}\n')
    return token


def bearer(token: str) -> tuple[str, str]:
    """The metadata of a call with this token."""
    return HEADER, f"{_SCHEME}{token}"


def role_needed(service_name: str, method_name: str) -> common_pb2.Role:
    """The role that the method's `option (role)` names; INTERNAL if it names none."""
    if service_name in _OPEN_SERVICES:
        return common_pb2.NONE
    if service_name in _READ_SERVICES:
        return common_pb2.READ
    service = descriptor_pool.Default().FindServiceByName(service_name)
    extensions: Any = service.FindMethodByName(method_name).GetOptions().Extensions
    named: common_pb2.Role = extensions[common_pb2.role]
    return named or common_pb2.INTERNAL


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
