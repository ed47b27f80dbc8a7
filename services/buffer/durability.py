"""Checks Tandem's requirements for Redis: acknowledged writes are on disk, and keys are never evicted.

The embedded Redis meets them (`tandem.services.buffer.redis_server`). The settings of a user's Redis are checked here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tandem.protos.errors import ConfigError
from tandem.services.buffer.connection import Connection


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """A server's settings for persistence and memory."""

    appendonly: bool
    appendfsync: str
    """`always`, `everysec` or `no`; empty if the server does not report it."""
    aof_load_truncated: bool
    """Whether the server loads a log that ends within a write, as one that is killed or loses power may leave it."""
    maxmemory_bytes: int
    """0: no limit."""
    maxmemory_policy: str

    @property
    def evicts(self) -> bool:
        """Whether the server removes keys when it is full, instead of refusing writes."""
        return self.maxmemory_bytes > 0 and self.maxmemory_policy != "noeviction"


class Weakness(NamedTuple):
    """A setting that breaks one of Tandem's guarantees."""

    fact: str
    cost: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.fact}: {self.cost}; {self.remedy}"


def read_settings(connection: Connection) -> RedisSettings:
    """Reads a server's settings from INFO, and from CONFIG GET, which managed servers refuse."""
    memory = connection.server_info("memory")
    return RedisSettings(
        appendonly=bool(connection.server_info("persistence")["aof_enabled"]),
        appendfsync=connection.setting("appendfsync"),
        aof_load_truncated=connection.setting("aof-load-truncated") == "yes",
        maxmemory_bytes=int(memory["maxmemory"]),
        maxmemory_policy=str(memory["maxmemory_policy"]),
    )


def weaknesses(settings: RedisSettings) -> list[Weakness]:
    """Returns the weaknesses of these settings, the worst first."""
    found = []
    if settings.maxmemory_policy != "noeviction":
        fact = f"maxmemory-policy is {settings.maxmemory_policy}"
        when = "is full" if settings.evicts else "is given a maxmemory"
        cost = f"groups and jobs are lost without a word once it {when}"
        found.append(Weakness(fact, cost, "set `maxmemory-policy noeviction` there"))
    if not settings.appendonly:
        cost, remedy = "when it ends, groups and jobs are lost", "set `appendonly yes` and `appendfsync always` there"
        found.append(Weakness("appendonly is no", cost, remedy))
    elif not settings.appendfsync:
        cost, remedy = "it refuses CONFIG GET, as managed servers do", "see to it that every write is synced"
        remedy += " (`appendfsync always`) and none is loaded in part (`aof-load-truncated no`)"
        found.append(Weakness("appendfsync could not be checked", cost, remedy))
    elif settings.appendfsync != "always":
        lost = "the last second" if settings.appendfsync == "everysec" else "the last half minute"
        cost = f"what it acknowledged within {lost} is lost when it is killed or its machine fails"
        found.append(Weakness(f"appendfsync is {settings.appendfsync}", cost, "set `appendfsync always` there"))
    if settings.appendonly and settings.aof_load_truncated:
        cost = "once its log has ended within a write, a later start may bring back half of that write"
        found.append(Weakness("aof-load-truncated is yes", cost, "set `aof-load-truncated no` there"))
    return found


def check_settings(connection: Connection) -> list[str]:
    """Returns one line with the remedy for each weakness of a server. Raises ConfigError if it evicts keys."""
    settings = read_settings(connection)
    lines = [f"Redis at {connection.place}: {weakness}" for weakness in weaknesses(settings)]
    if settings.evicts:
        raise ConfigError(lines[0])
    return lines


def check_room(connection: Connection, job_bytes: int, group_bytes: int = 0) -> None:
    """Raises ConfigError if the server evicts, or its memory is less than that of jobs plus twice that of groups."""
    check_settings(connection)
    limit = read_settings(connection).maxmemory_bytes
    if limit and 2 * group_bytes > limit:
        raise ConfigError(
            f"the run may hold {_mebibytes(group_bytes)} in Redis at {connection.place}, more than half of its "
            f"maxmemory {_mebibytes(limit)}: raise maxmemory, or lower run.groups_per_batch, run.staleness_budget, "
            "rollout.samples_per_prompt or rollout.max_response_tokens"
        )
    if limit and 2 * group_bytes + job_bytes > limit:
        beside = f", groups {_mebibytes(group_bytes)}" if group_bytes else ""
        raise ConfigError(
            f"Redis at {connection.place}: jobs may take {_mebibytes(job_bytes)}{beside}, and its maxmemory is "
            f"{_mebibytes(limit)}: raise maxmemory, or lower jobs.max_unscored_bytes or jobs.max_result_bytes"
        )


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
