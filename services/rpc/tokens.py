"""Bearer tokens: what a server accepts, and the role that each method needs."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tandem.protos.errors import AccessError, AuthenticationError, ConfigError, UserError

TOKEN_VARIABLE = "TANDEM_TOKEN"
"""Environment variable of the token that clients of the reward service send."""
HEADER = "authorization"
_SCHEME = "Bearer "
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Metadata = Iterable[tuple[str, str | bytes]]


class Role(StrEnum):
    """What a token allows. Each role includes those before it."""

    read = "read"
    """Look at runs, services and jobs."""
    score = "score"
    """Let items be scored, and submit jobs."""
    operate = "operate"
    """Pause, drain and stop services, and sample."""
    internal = "internal"
    """Replace weights: what the services of a run ask of each other."""

    def includes(self, other: Role) -> bool:
        return _ORDER.index(self) >= _ORDER.index(other)


class Caller(NamedTuple):
    """Who calls a service."""

    name: str
    """Of its token in the token file. The tokens of a run have no names."""
    role: Role


_ORDER = list(Role)
ANYBODY = Caller("", Role.internal)
"""The caller of a service that asks for no token."""
ROLES_NEEDED: Mapping[str, Role | None] = {
    f"/{service}/{method}": role
    for service, role, methods in (
        ("grpc.health.v1.Health", None, "Check Watch"),  # probes have no token, and learn only whether it serves
        ("grpc.reflection.v1alpha.ServerReflection", Role.read, "ServerReflectionInfo"),
        ("tandem.v1.InfoService", Role.read, "Info"),
        ("tandem.v1.ControlService", Role.read, "Status Watch GetLedger"),
        ("tandem.v1.ControlService", Role.operate, "Scale Drain Pause Resume Checkpoint Stop"),
        ("tandem.v1.EnvironmentService", Role.internal, "Describe Open Restore Step FinalReward Snapshot"),
        ("tandem.v1.EnvironmentService", Role.internal, "Close Heartbeat"),
        ("tandem.v1.EnvironmentService", Role.operate, "Drain"),
        ("tandem.v1.RewardService", Role.read, "GetJob WatchJob ListJobs ListScorers"),
        ("tandem.v1.RewardService", Role.score, "Score ScoreStream SubmitJob CancelJob DeleteJob"),
        ("tandem.v1.RolloutService", Role.operate, "Generate Pause Resume Drain"),
        ("tandem.v1.RolloutService", Role.internal, "JoinWeightGroup UpdateWeights"),
    )
    for method in methods.split()
}
"""By the path of a method. None: no token. A method that is missing here needs `internal`."""


class Tokens:
    """The tokens that a server accepts: their SHA-256, each with who has it."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._callers = callers

    @classmethod
    def of_run(cls, secret: str) -> Tokens:
        """The tokens of a run: one for each role."""
        return cls({_digest(run_token(secret, role)): Caller("", role) for role in Role})

    @classmethod
    def load(cls, file: Path) -> Tokens:
        """The tokens of a file that `add_token` wrote. Raises ConfigError, also if other users may read the file."""
        return cls({digest: Caller(name, role) for name, (digest, role) in _read(file).items()})

    def check(self, metadata: Metadata, needed: Role) -> Caller:
        """Returns who calls. Raises AuthenticationError without a valid token, AccessError if its role does not include
        `needed`.
        """
        given = str(next((value for key, value in metadata if key == HEADER), ""))
        caller = self._callers.get(_digest(given.removeprefix(_SCHEME))) if given.startswith(_SCHEME) else None
        if caller is None:
            fault = "this token is not known here" if given else "the call has no token"
            raise AuthenticationError(f"{fault}; set {TOKEN_VARIABLE} to one that this service accepts")
        if not caller.role.includes(needed):
            raise AccessError(f"the call needs a token with the role {needed}, this one has {caller.role}")
        return caller


def run_token(secret: str, role: Role) -> str:
    """The token of a run for a role, from the run's secret. Nobody finds another role's token from it."""
    return hmac.new(secret.encode(), role.encode(), hashlib.sha256).hexdigest()


def add_token(file: Path, name: str, role: Role) -> str:
    """Makes a token and appends its name, role and SHA-256 to the file. Raises UserError for a name that is taken, or a
    file that cannot be used.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is not a name of letters, digits, - and _")
    if file.exists() and name in _read(file):
        raise UserError(f"{file} holds a token for {name}; delete its line first, or choose another name")
    token = secrets.token_urlsafe(32)
    try:
        with open(file, "a", encoding="utf-8", opener=partial(os.open, mode=0o600)) as out:
            out.write(f'{name} = {{ role = "{role}", sha256 = "{_digest(token)}" }}\n')
    except OSError as error:
        raise ConfigError(f"token file {file}: {error.strerror}") from None
    return token


def bearer(token: str) -> tuple[str, str]:
    """The metadata of a call with this token."""
    return HEADER, f"{_SCHEME}{token}"


def _read(file: Path) -> dict[str, tuple[str, Role]]:
    """SHA-256 and role by name. Raises ConfigError, also if other users may read the file."""
    try:
        entries = tomllib.loads(read_private(file).decode())
        for name in entries:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a name of letters, digits, - and _")
        return {name: (str(entry["sha256"]), Role(entry["role"])) for name, entry in entries.items()}
    except OSError as error:
        raise ConfigError(f"token file {file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"token file {file} cannot be read: {error}; `tandem reward token` writes one") from None


def read_private(file: Path) -> bytes:
    """The content of a file that only its owner may read. Raises OSError, also if other users may.

    The group of root's file may read it, too, if this process is not root's: only root could choose that group. Secrets
    are mounted like that into containers.
    """
    status = file.stat()
    allowed = 0o040 if status.st_uid == 0 and os.geteuid() != 0 else 0
    if status.st_mode & 0o077 & ~allowed:
        raise PermissionError(0, f"other users may read or write it; run chmod 600 {file}")
    return file.read_bytes()


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
