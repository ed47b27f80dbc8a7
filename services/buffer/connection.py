"""The wire to Redis: verbs run as Lua scripts, outages are waited for within a deadline, errors arrive as those of the
tree.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.retry import Retry

from tandem.protos.errors import (
    ConfigError,
    DataError,
    EnvironmentLackError,
    FencedError,
    JobError,
    JobExistsError,
    JobLimitError,
    LedgerError,
    NotAdmittedError,
    RunExistsError,
    TandemError,
    UnavailableError,
    UnknownJobError,
)

OUTAGE_SECONDS = 10.0
"""How long a verb waits for a Redis that went away: it may be restarting and loading its append-only file."""

_SOCKET_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.5
_POLL_SECONDS = 1.0  # nobody rings when a lease runs out
_OLDEST_REDIS = (6, 2)
_REFUSALS: dict[str, type[TandemError]] = {
    "DATA": DataError,
    "EXISTS": RunExistsError,
    "FENCED": FencedError,
    "JOB": JobError,
    "JOBEXISTS": JobExistsError,
    "JOBLIMIT": JobLimitError,
    "LEDGER": LedgerError,
    "NORUN": UnavailableError,
    "NOTADMITTED": NotAdmittedError,
    "UNKNOWNJOB": UnknownJobError,
}
_REMEDIES = {
    "EXISTS": "; add --resume to go on with it, or choose another run.run_id",
    "NORUN": "; start it with `tandem run`, or its feed with `tandem serve feed`",
}

Answer = TypeVar("Answer")
Claimed = TypeVar("Claimed")


@dataclass(frozen=True, slots=True)
class ScriptFolder:
    """Where verbs lie: a package of `<verb>.lua`, and the texts that are put before each of them after what all verbs
    share.
    """

    package: str
    prelude: tuple[str, ...]


@cache
def script_text(folder: ScriptFolder, verb: str) -> str:
    """The Lua text of a verb: common.lua, the folder's prelude, then <verb>.lua."""
    files = resources.files(folder.package)
    texts = [files.joinpath(f"{name}.lua").read_text(encoding="utf-8") for name in (*folder.prelude, verb)]
    common = resources.files("tandem.services.buffer.scripts").joinpath("common.lua").read_text(encoding="utf-8")
    return "\n".join([common, *texts])


class Connection:
    """One run's place in Redis. Thread-safe: every call takes a connection of its own from the pool.

    Another kind of place has other scripts, another prefix and other words for itself.

    Args:
        redis_url: `redis://…`, `rediss://…` or `unix:///path/of.sock`.
        run_id: part of every key, as the cluster's hash tag.
        connect_timeout_seconds: how long to wait for the server to answer the first time.

    Raises:
        ConfigError: the URL cannot be read.
        UnavailableError: nobody answers there.
        EnvironmentLackError: the server refuses us, or is too old.
    """

    SCRIPTS: ClassVar = ScriptFolder("tandem.services.buffer.scripts", ("prelude", "limiter", "groups", "samplers"))
    PREFIX: ClassVar[str] = "tandem"
    KIND: ClassVar[str] = "run"
    WHEN_FULL: ClassVar[str] = "raise its `maxmemory`, or lower run.staleness_budget"

    def __init__(self, redis_url: str, run_id: str, *, connect_timeout_seconds: float = 5.0) -> None:
        assert run_id and not set(run_id) & set("{}"), "a run id is part of a hash tag"
        self.run_id = run_id
        self.place = _without_secrets(redis_url)
        self._prefix = f"{self.PREFIX}:{{{run_id}}}:"
        try:
            self._redis = redis.Redis.from_url(
                redis_url,
                protocol=2,
                socket_timeout=_SOCKET_SECONDS,
                socket_connect_timeout=connect_timeout_seconds,
                retry=Retry(NoBackoff(), 0),  # `_persist` retries, and knows which calls may be repeated
            )
        except ValueError as error:
            raise ConfigError(
                f"{self.place!r} (run.redis_url, TANDEM_REDIS_URL or --redis-url) cannot be used: {error}"
            ) from None
        self._scripts: dict[str, Script] = {}
        server = self.information("server", connect_timeout_seconds)
        version = str(server["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_REDIS:
            raise EnvironmentLackError(f"Redis at {self.place} is version {version}; Tandem needs 6.2 or later")

    def close(self) -> None:
        """Closes the pool's connections."""
        self._redis.close()

    def information(self, section: str, outage_seconds: float | None = None) -> Mapping[str, Any]:
        """What the server says of itself in a section of INFO."""
        return self._persist(lambda: self._redis.info(section), outage_seconds)

    def setting(self, name: str) -> str:
        """A setting of the server; empty if it does not tell."""

        def ask() -> str:
            try:
                return str(self._redis.config_get(name).get(name, ""))
            except redis.ResponseError:  # managed servers keep CONFIG to themselves
                return ""

        return self._persist(ask)

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _run(self, verb: str, *arguments: bytes | str | int) -> Any:
        """Runs one verb atomically. It may run twice if an answer is lost, so each is idempotent or carries a request
        id.
        """
        script = self._scripts.get(verb)
        if script is None:
            script = self._scripts[verb] = self._redis.register_script(script_text(self.SCRIPTS, verb))
        return self._persist(lambda: script(keys=[self._key("meta")], args=arguments))

    def _persist(self, call: Callable[[], Answer], outage_seconds: float | None = None) -> Answer:
        """The call's answer, retried through an outage; raises the tree's error for whatever Redis refuses."""
        deadline = time.monotonic() + (OUTAGE_SECONDS if outage_seconds is None else outage_seconds)
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return call()
            except (redis.AuthenticationError, redis.exceptions.AuthorizationError) as error:
                raise EnvironmentLackError(f"Redis at {self.place} refuses this user: {error}") from None
            except (redis.ConnectionError, redis.TimeoutError) as error:  # BusyLoadingError is one of these
                if time.monotonic() + pause > deadline:
                    raise UnavailableError(
                        f"Redis at {self.place} cannot be reached: {_one_line(error)}; start it, or name another one"
                    ) from None
            except redis.InvalidResponse as error:
                raise EnvironmentLackError(
                    f"what answers at {self.place} is no Redis: {_one_line(error)}; "
                    "name another one, or start one there"
                ) from None
            except redis.ResponseError as error:
                raise self._refusal(error) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _wait_at_bell(self, bell: str, attempt: Callable[[], list[Claimed]], timeout_seconds: float) -> list[Claimed]:
        """Tries, then sleeps until the bell rings (or a second has passed), until something is claimed or the time is
        up.

        A bell holds a token a waiting thing and every taker of a token looks again, so no ring is lost; at worst, when
        a taker dies, the next look is a second away.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            claimed = attempt()
            left = deadline - time.monotonic()
            if claimed or left <= 0:
                return claimed
            self._persist(lambda: self._redis.blpop([self._key(bell)], timeout=max(0.01, min(left, _POLL_SECONDS))))  # noqa: B023

    def _words(self, refusal: str) -> str:
        """A refusal of a script, with its place."""
        return f"{self.KIND} {self.run_id} in Redis at {self.place}: {refusal}"

    def _refusal(self, error: redis.ResponseError) -> Exception:
        text = _one_line(error)
        code, _, rest = text.partition(" ")
        if code in _REFUSALS:
            return _REFUSALS[code](f"{self._words(rest)}{_REMEDIES.get(code, '')}")
        if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM command not allowed" in text:
            return EnvironmentLackError(f"Redis at {self.place} is full: {self.WHEN_FULL}")
        if isinstance(error, (redis.ReadOnlyError, redis.exceptions.NoPermissionError)) or "MISCONF" in text:
            return EnvironmentLackError(f"Redis at {self.place} accepts no writes: {text}")
        return error  # a bug in a script: it keeps its traceback


def new_request() -> str:
    """An id under which a verb's answer is remembered."""
    return uuid.uuid4().hex


def milliseconds(seconds: float) -> int:
    """As the scripts count time."""
    return round(seconds * 1000)


def _without_secrets(redis_url: str) -> str:
    parts = urlsplit(redis_url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
