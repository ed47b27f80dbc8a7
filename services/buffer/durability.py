"""What a Redis has to be for what Tandem keeps in it: what it has acknowledged is on disk, and nothing is ever evicted.

The embedded Redis is set up so (`tandem.services.buffer.redis_server`); one that a user names is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protos.errors import ConfigError
from tandem.services.buffer.connection import Connection


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """How a server is set up to keep what it is given."""

    appendonly: bool
    appendfsync: str
    """`always`, `everysec` or `no`; empty: the server does not tell."""
    maxmemory_bytes: int
    """0: no limit of its own."""
    maxmemory_policy: str

    @property
    def evicts(self) -> bool:
        """Whether it throws keys away when it is full, in place of refusing to write."""
        return self.maxmemory_bytes > 0 and self.maxmemory_policy != "noeviction"


@dataclass(frozen=True, slots=True)
class Weakness:
    """A setting with which something that is promised does not hold."""

    fact: str
    cost: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.fact}: {self.cost}; {self.remedy}"


def read_settings(connection: Connection) -> RedisSettings:
    """The settings of the server a connection leads to. INFO tells most of them; CONFIG, which managed servers refuse,
    the rest.
    """
    memory = connection.information("memory")
    return RedisSettings(
        appendonly=bool(connection.information("persistence")["aof_enabled"]),
        appendfsync=connection.setting("appendfsync"),
        maxmemory_bytes=int(memory["maxmemory"]),
        maxmemory_policy=str(memory["maxmemory_policy"]),
    )


def weaknesses(settings: RedisSettings) -> list[Weakness]:
    """What does not hold with these settings, the worst first; nothing, if all does."""
    found = []
    if settings.maxmemory_policy != "noeviction":
        when = "is full" if settings.evicts else "is given a maxmemory"
        found.append(
            Weakness(
                f"maxmemory-policy is {settings.maxmemory_policy}",
                f"groups and jobs are lost without a word once it {when}",
                "set `maxmemory-policy noeviction` there",
            )
        )
    if not settings.appendonly:
        found.append(
            Weakness(
                "appendonly is no",
                "when it ends, groups and jobs are lost",
                "set `appendonly yes` and `appendfsync always` there",
            )
        )
    elif settings.appendfsync not in ("always", ""):
        lost = "the last second" if settings.appendfsync == "everysec" else "the last half minute"
        found.append(
            Weakness(
                f"appendfsync is {settings.appendfsync}",
                f"what it acknowledged within {lost} is lost when it is killed or its machine fails",
                "set `appendfsync always` there",
            )
        )
    elif not settings.appendfsync:
        found.append(
            Weakness(
                "appendfsync could not be checked",
                "it refuses CONFIG GET, as managed servers do",
                "see to it that every write is synced (`appendfsync always`)",
            )
        )
    return found


def check_room(connection: Connection, job_bytes: int, group_bytes: int = 0) -> None:
    """The server's own limit leaves room for all that jobs may hold, beside twice what the groups of a run may.

    Raises:
        ConfigError: it does not.
    """
    limit = read_settings(connection).maxmemory_bytes
    if limit and 2 * group_bytes + job_bytes > limit:
        beside = f", groups {_mebibytes(group_bytes)}" if group_bytes else ""
        raise ConfigError(
            f"Redis at {connection.place}: jobs may take {_mebibytes(job_bytes)}{beside}, "
            f"and its maxmemory is {_mebibytes(limit)}: "
            "raise maxmemory, or lower jobs.max_unscored_bytes or jobs.max_result_bytes"
        )


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def check_settings(connection: Connection) -> list[str]:
    """What does not hold with the server of a connection, a line each, with the remedy.

    Raises:
        ConfigError: it evicts. Groups and jobs would be gone, and nobody told.
    """
    settings = read_settings(connection)
    lines = [f"Redis at {connection.place}: {weakness}" for weakness in weaknesses(settings)]
    if settings.evicts:
        raise ConfigError(lines[0])
    return lines
