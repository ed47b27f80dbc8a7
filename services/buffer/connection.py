"""A connection to Redis: runs verbs as Lua scripts, retries during an outage, and raises TandemErrors."""

from __future__ import annotations

import logging
import re
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.retry import Retry

from tandem.protos.errors import ConfigError, EnvironmentLackError, TandemError, UnavailableError, error_class

log = logging.getLogger(__name__)

OUTAGE_SECONDS = 10.0
"""How long a command waits for an unreachable Redis. The services of a run wait for `run.redis_outage_seconds`."""
OLDEST_REDIS = (6, 2)
MOST_GROUPS = 128
"""How many groups a call about leases concerns at most: CHUNK in groups.lua."""

_SOCKET_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.5
_POLL_SECONDS = 1.0  # an expired lease sends no signal
_STOPPING_SECONDS = 2.0  # a service that is told to stop is killed some seconds later
_TOLD_AFTER_SECONDS = 1.0  # an embedded Redis that died is restarted sooner
# A Redis that is loading its data, runs a long script, or fails over to a replica. Redis 6.2 quotes a command's refusal
# within that of its script: "ERR Error running script …: -READONLY …".
_PASSING = re.compile(r"(?:^|-)(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|NOREPLICAS|READONLY|TRYAGAIN|UNBLOCKED) ")
# Of a command in a script: Redis 7 and 6.2.
_NO_PERMISSION = (
    "ACL failure in script",
    "can't run this command or subcommand",
    "can't access at least one of the keys",
)
_REMEDIES = {
    "RunExistsError": "; add --resume to go on with it, or choose another run.run_id",
    "UnavailableError": "; start it with `tandem run`, or its feed with `tandem serve feed`",
}

Answer = TypeVar("Answer")
Claimed = TypeVar("Claimed")


@dataclass(frozen=True, slots=True)
class KeySpace:
    """A kind of data in Redis: its scripts, the prefix of its keys, and its name in errors."""

    package: str
    """Package of the scripts, one `<verb>.lua` each."""
    prelude: tuple[str, ...]
    """Scripts inserted before each verb, after common.lua."""
    prefix: str
    remedy_when_full: str
    kind: str = ""
    """Name of one of its namespaces in errors. Empty: errors do not name the namespace."""


RUNS = KeySpace(
    "tandem.services.buffer.scripts",
    prelude=("prelude", "limiter", "groups", "samplers"),
    prefix="tandem",
    remedy_when_full="raise its `maxmemory`, or lower run.staleness_budget",
    kind="run",
)


@cache
def script_text(space: KeySpace, verb: str) -> str:
    """Returns the Lua text of a verb: common.lua, the prelude, then <verb>.lua."""
    files = [resources.files(space.package) / f"{name}.lua" for name in (*space.prelude, verb)]
    common = resources.files(RUNS.package) / "common.lua"
    return "\n".join(file.read_text(encoding="utf-8") for file in [common, *files])


class Connection:
    """One namespace of a key space in Redis. Thread-safe: every call uses its own connection from the pool.

    `name` is part of every key, as the cluster's hash tag. Raises ConfigError for a bad URL, UnavailableError if no
    server answers there, EnvironmentLackError if it refuses the connection or is too old.
    """

    def __init__(
        self,
        redis_url: str,
        name: str,
        space: KeySpace,
        *,
        connect_timeout_seconds: float = 5.0,
        outage_seconds: float | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """`outage_seconds`: how long to wait for an unreachable Redis, now and later, saying so in the log. Default:
        `connect_timeout_seconds` now, `OUTAGE_SECONDS` later. Once `stop` is set, no call waits for long,
        and those that follow one that gave up do not wait.
        """
        assert name and not set(name) & set("{}"), "the name is part of a hash tag"
        self._outage_seconds = outage_seconds
        self._stop = stop or threading.Event()
        self._lock = threading.Lock()
        self._away_since: float | None = None
        """Monotonic time since when Redis has been away, once the log says so."""
        self._gave_up = ("", 0.0)
        """Why and when (monotonic) the last call gave up that had begun after `stop`. The next ones give up at once: a
        service makes several as it stops, and would wait in each.
        """
        self.name = name
        self.place = _without_secrets(redis_url)
        self.prefix = f"{space.prefix}:{{{name}}}:"
        self._space = space
        try:
            self.redis = redis.Redis.from_url(
                redis_url,
                protocol=2,
                socket_timeout=_SOCKET_SECONDS,
                socket_connect_timeout=connect_timeout_seconds,
                retry=Retry(NoBackoff(), 0),  # `retried` does the retries
            )
        except ValueError as error:
            # The error may quote a part of the password.
            fault = 'percent-encode "/", "?", "#" and "@" in its user and password' if "@" in redis_url else error
            raise ConfigError(
                f"{self.place!r} (run.redis_url, TANDEM_REDIS_URL or --redis-url) cannot be used: {fault}"
            ) from None
        self._check_files()
        self._scripts: dict[str, Script] = {}
        patience = connect_timeout_seconds if outage_seconds is None else outage_seconds
        version = str(self.server_info("server", patience)["redis_version"])
        if redis_version(version) < OLDEST_REDIS:
            raise EnvironmentLackError(f"Redis at {self.place} is version {version}; Tandem needs 6.2 or later")

    def close(self) -> None:
        self.redis.close()

    def server_info(self, section: str, outage_seconds: float | None = None) -> Mapping[str, Any]:
        return self.retried(lambda: self.redis.info(section), outage_seconds)

    def setting(self, name: str) -> str:
        """Returns a setting of the server; empty if CONFIG GET is refused."""

        def ask() -> str:
            try:
                return str(self.redis.config_get(name).get(name, ""))
            except redis.ResponseError:  # managed servers refuse CONFIG
                return ""

        return self.retried(ask)

    def key(self, name: str) -> str:
        return self.prefix + name

    def hash(self, name: str) -> dict[bytes, bytes]:
        return cast("dict[bytes, bytes]", self.retried(lambda: self.redis.hgetall(self.key(name))))

    def run(self, verb: str, *arguments: bytes | str | int) -> Any:
        """Runs a verb atomically. It runs twice if an answer is lost, so each is idempotent or carries a request id."""
        if verb not in self._scripts:
            self._scripts[verb] = self.redis.register_script(script_text(self._space, verb))
        return self.retried(lambda: self._scripts[verb](keys=[self.key("meta")], args=arguments))

    def run_in_parts(self, verb: str, argument: str | int, rows: Sequence[Sequence[bytes | str | int]]) -> list[int]:
        """Runs a verb for some rows at a time, and returns the numbers that it answers."""
        answers: list[int] = []
        for first in range(0, len(rows), MOST_GROUPS):
            flat = [value for row in rows[first : first + MOST_GROUPS] for value in row]
            answers += map(int, self.run(verb, argument, *flat))
        return answers

    def retried(self, call: Callable[[], Answer], outage_seconds: float | None = None) -> Answer:
        """Calls and retries while Redis is unreachable. Raises a TandemError for an error reported by Redis."""
        patience = next(one for one in (outage_seconds, self._outage_seconds, OUTAGE_SECONDS) if one is not None)
        began, was_stopping = time.monotonic(), self._stop.is_set()
        pause = _FIRST_PAUSE_SECONDS
        why, gave_up_at = self._gave_up
        if why and began < gave_up_at + _STOPPING_SECONDS:
            raise UnavailableError(why)
        while True:
            try:
                answer = call()
            except (redis.AuthenticationError, redis.exceptions.AuthorizationError) as error:
                raise EnvironmentLackError(f"Redis at {self.place} refuses this user: {error}") from None
            except redis.InvalidResponse as error:
                told = f"what answers at {self.place} is no Redis: {_one_line(error)}"
                raise EnvironmentLackError(f"{told}; name another one, or start one there") from None
            except (redis.ConnectionError, redis.TimeoutError) as error:  # BusyLoadingError is one of these
                if fault := _tls_fault(error):
                    raise EnvironmentLackError(f"Redis at {self.place}: {fault}") from None
                fault, remedy = f"cannot be reached: {_one_line(error)}", "start it"
            except redis.ResponseError as error:
                fault, remedy = self._passing_refusal(error), "mend it"
                # After a failover the address names another server, and the old one refuses writes for good.
                self.redis.connection_pool.disconnect(inuse_connections=False)
            else:
                self._note_answer()
                return answer
            if self._stop.is_set():
                patience = min(patience, _STOPPING_SECONDS)
            if time.monotonic() + pause > began + patience:
                told = f"Redis at {self.place} {fault}; {remedy}, or name another one"
                if was_stopping:
                    self._gave_up = (told, time.monotonic())
                raise UnavailableError(told)
            self._note_outage(began, fault)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def wait_for(self, signal: str, attempt: Callable[[], list[Claimed]], timeout_seconds: float) -> list[Claimed]:
        """Repeats the attempt until it claims an item or the time is over. In between it blocks on the signal list.

        The list has a token for each waiting item. A client that takes a token makes an attempt, so no signal is lost.
        If such a client dies, or a lease expires (without a signal), the next attempt follows within a second.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            claimed = attempt()
            left = deadline - time.monotonic()
            if claimed or left <= 0:
                return claimed
            self.wait_for_signal(signal, max(0.01, min(left, _POLL_SECONDS)))

    def wait_for_signal(self, signal: str, timeout_seconds: float) -> None:
        """Takes a token of the signal list. Returns without one at the timeout."""
        self.retried(lambda: self.redis.blpop([self.key(signal)], timeout=timeout_seconds))

    def _check_files(self) -> None:
        """Raises ConfigError if a file of TLS is missing: redis-py reports the server as missing."""
        settings = self.redis.connection_pool.connection_kwargs
        for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            file = settings.get(name)
            if file and not Path(file).is_file():
                raise ConfigError(f"Redis at {self.place}: {name}={file} in its URL is no file")

    def _note_outage(self, began: float, fault: str) -> None:
        """Says once in an outage, in the log of a service, that its calls wait."""
        if self._outage_seconds is None or time.monotonic() < began + _TOLD_AFTER_SECONDS:
            return
        with self._lock:
            if self._away_since is None:
                self._away_since = began
                log.warning("Redis at %s %s; waits for it up to %g s", self.place, fault, self._outage_seconds)

    def _note_answer(self) -> None:
        if self._away_since is None:
            return
        with self._lock:
            since, self._away_since = self._away_since, None
        if since is not None:
            log.info("Redis at %s answers again after %.0f s", self.place, time.monotonic() - since)

    def _passing_refusal(self, error: redis.ResponseError) -> str:
        """What Redis says if it refuses for a while, as in an outage. Raises the error of any other refusal."""
        text = f"{error.status_code or ''} {_one_line(error)}".lstrip()  # redis-py takes away the codes that it knows
        if error_class(text.partition(" ")[0]) is not TandemError or not _PASSING.search(text):
            raise self._refusal(error) from error
        return f"refuses for now: {text.rstrip('.')}"

    def _refusal(self, error: redis.ResponseError) -> Exception:
        text = _one_line(error)
        name, _, rest = text.partition(" ")
        if (refusal := error_class(name)) is not TandemError:
            place = f"{self._space.kind} {self.name} in Redis at {self.place}: " if self._space.kind else ""
            return refusal(f"{place}{rest}{_REMEDIES.get(name, '')}")
        if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM command not allowed" in text:
            return EnvironmentLackError(f"Redis at {self.place} is full: {self._space.remedy_when_full}")
        if isinstance(error, redis.exceptions.NoPermissionError) or any(words in text for words in _NO_PERMISSION):
            remedy = "give it those of deploy/redis/users.acl, or name another user"
            return EnvironmentLackError(f"Redis at {self.place}: this user lacks rights ({text}); {remedy}")
        if "MISCONF" in text:
            return EnvironmentLackError(f"Redis at {self.place} accepts no writes: {text}")
        return error  # a bug in a script: it keeps its traceback


def redis_version(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def new_request() -> str:
    """Returns a new id, under which the answer of a verb is kept for a minute."""
    return uuid.uuid4().hex


def milliseconds(seconds: float) -> int:
    """Returns the scripts' unit of time."""
    return round(seconds * 1000)


def _without_secrets(redis_url: str) -> str:
    credentials, _, place = redis_url.rpartition("@")  # a password may hold any of "/:@?#"
    scheme, mark, _ = credentials.partition("://")
    return (scheme + mark if mark else "") + place.partition("?")[0]


def _tls_fault(error: Exception) -> str:
    """Why TLS failed, with the remedy; "" for another failure, or a connection that broke while TLS began."""
    cause = error.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        remedy = "name the file of its CA in the URL (?ssl_ca_certs=FILE), or another server"
        return f"its certificate is not trusted ({cause.verify_message}); {remedy}"
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
        return f"TLS fails ({cause.reason or cause}); does it speak TLS, and are the files in its URL right?"
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
