"""Who may see and steer which run: sessions in signed cookies, a limit on failed logins, and where requests come from.

A session is a cookie for each run, signed with a key made from the run's own secret. So it survives a restart of the
dashboard, and ends with the run's secret or after half a day.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Collection
from urllib.parse import urlsplit

from tandem.protos.errors import AccessError, AuthenticationError
from tandem.services.rpc.tokens import Role, Tokens, bearer

SESSION_SECONDS = 12 * 3600
_MOST_FAILURES = 10
_WINDOW_SECONDS = 60.0
_MOST_ADDRESSES = 1000


def cookie_name(key: str) -> str:
    """The cookie of a run's session."""
    return f"tandem-{key}"


def role_of_token(secret: str, token: str) -> Role | None:
    """What a token of the run allows here, `read` or `operate`; None for another token."""
    try:
        role = Tokens.of_run(secret).check([bearer(token)], Role.read).role
    except (AuthenticationError, AccessError):
        return None
    return Role.operate if role.includes(Role.operate) else Role.read


def new_session(secret: str, key: str, role: Role) -> str:
    """The value of a session's cookie."""
    said = f"{role}.{int(time.time()) + SESSION_SECONDS}.{secrets.token_hex(8)}"
    return f"{said}.{_signature(secret, key, said)}"


def role_of_session(secret: str, key: str, cookie: str) -> Role | None:
    """The role of a session of this run that has not ended; None for any other text."""
    said, _, signature = cookie.rpartition(".")
    if not hmac.compare_digest(signature.encode(), _signature(secret, key, said).encode()):
        return None
    role, ends, _nonce = said.split(".")
    return Role(role) if int(ends) > time.time() else None


def _signature(secret: str, key: str, said: str) -> str:
    return hmac.new(secret.encode(), f"dashboard session {key} {said}".encode(), hashlib.sha256).hexdigest()


class LoginLimit:
    """Counts failed logins by address of the caller: ten a minute."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def seconds_to_wait(self, address: str) -> float:
        """0 if the address may try a login now."""
        failures = self._failures.get(address, deque())
        while failures and failures[0] < time.monotonic() - _WINDOW_SECONDS:
            failures.popleft()
        return failures[0] + _WINDOW_SECONDS - time.monotonic() if len(failures) >= _MOST_FAILURES else 0.0

    def failed(self, address: str) -> None:
        self._failures.setdefault(address, deque()).append(time.monotonic())
        self._failures.move_to_end(address)
        while len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)


def known_names(names: Collection[str]) -> frozenset[str]:
    """The host names under which a browser may ask for the page: `names` and those of this machine."""
    return frozenset({"localhost", socket.gethostname().lower(), socket.getfqdn().lower(), *map(str.lower, names)})


def is_known_host(host: str, names: Collection[str]) -> bool:
    """Whether the header `Host` names this server. Another site's name that leads to this machine's address (DNS
    rebinding) is none of `names`, and cannot be an IP address.
    """
    name = _name_of(host)
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_own_origin(origin: str, host: str) -> bool:
    """Whether a request that changes something comes from the page itself: `Origin`, which scripts cannot set."""
    parts = urlsplit(origin)
    return parts.scheme in ("http", "https") and bool(host) and parts.netloc.lower() == host.lower()


def _name_of(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
