"""The check of a run's ledger while everything runs: groups in chunks, then the totals, each in one instant of Redis.

A group may move between two chunks, so groups are listed first and each one is then compared with its queue, lease,
payload, credit and outcome by one script. Nothing that lasts is missed, because whatever names a group (its state, a
queue, the outstanding groups) is listed, and no group is reported for what another instant showed.
"""

from __future__ import annotations

from tandem.services.buffer.connection import Connection
from tandem.services.buffer.types import LIVE_STATES

_CHUNK = 128  # each takes some 25 µs of Redis
_PAGE = 512


def violations(connection: Connection) -> list[str]:
    """One line for each contradiction."""
    group_ids = sorted(_listed(connection))
    found: list[bytes] = []
    for first in range(0, len(group_ids), _CHUNK):
        found += connection.run("verify_groups", *group_ids[first : first + _CHUNK])
    found += connection.run("verify_totals")
    return [line.decode() for line in found]


def _listed(connection: Connection) -> set[bytes]:
    """The ids of all groups in progress. Redis guarantees that a scan returns what is there from its begin to its end,
    and a group that moves meanwhile keeps its state.
    """
    redis, key = connection.redis, connection.key
    group_ids = set(connection.retried(lambda: [name for name, _ in redis.hscan_iter(key("states"), count=_PAGE)]))
    group_ids.update(connection.retried(lambda: list(redis.sscan_iter(key("outstanding"), count=_PAGE))))
    for state in (*LIVE_STATES, "trained"):
        members = connection.retried(lambda: list(redis.zscan_iter(key(state), count=_PAGE)))  # noqa: B023
        group_ids.update(name for name, _ in members)
    return group_ids
