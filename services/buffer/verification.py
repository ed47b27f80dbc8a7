"""The check of a run's ledger while everything runs: groups in chunks, then the totals in one instant of Redis, then
the marks of finished groups, epoch by epoch.

A group may move between two chunks, so groups are listed first and each one is then compared with its queue, lease,
payload, credit and outcome by one script. Nothing that lasts is missed, because whatever names a group (its state, a
queue, the outstanding groups) is listed, and no group is reported for what another instant showed. Groups may end while
the marks are counted, so a counter has to lie between the numbers of marks before and after it was read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from redis.client import Pipeline

from tandem.services.buffer.connection import Connection
from tandem.services.buffer.types import LIVE_STATES

_CHUNK = 128  # each takes some 25 µs of Redis
_PAGE = 512
_TRIES = 3  # a rollback may take marks away and set them again meanwhile


def violations(connection: Connection) -> list[str]:
    """One line for each contradiction."""
    group_ids = sorted(_listed(connection))
    found: list[bytes] = []
    for first in range(0, len(group_ids), _CHUNK):
        found += connection.run("verify_groups", *group_ids[first : first + _CHUNK])
    found += connection.run("verify_totals")
    return [*(line.decode() for line in found), *_miscounted(connection)]


def _miscounted(connection: Connection) -> list[str]:
    """One line for each counter that disagrees with the marks of groups."""
    found: list[str] = []
    for _ in range(_TRIES):
        before = _marked(connection)
        counters = {name.decode(): int(number) for name, number in connection.hash("counters").items()}
        counted = {n: number for n, number in counters.items() if n in ("admitted", "committed") or n[:8] == "dropped:"}
        after = before if +before == +Counter(counted) else _marked(connection)
        found = [
            f"{name} counts {counted.get(name, 0)}, marked are {after[name]}"
            for name in sorted({*counted, *before, *after})
            if not min(before[name], after[name]) <= counted.get(name, 0) <= max(before[name], after[name])
        ]
        if not found:
            break
    return found


def _marked(connection: Connection) -> Counter[str]:
    """The number of groups that are marked as admitted, committed, and dropped for each reason. An epoch is a few short
    commands, for a run may have thousands.
    """
    redis, key, found = connection.redis, connection.key, Counter[str]()
    epochs = sorted(connection.retried(lambda: set(redis.sscan_iter(key("epochs"), count=_PAGE))))
    for first in range(0, len(epochs), _CHUNK):
        names = [epoch.decode() for epoch in epochs[first : first + _CHUNK]]
        maps = cast("list[list[bytes]]", _answers(connection, Pipeline.smembers, [f"maps:{epoch}" for epoch in names]))
        places = [(epoch, name.decode()) for epoch, members in zip(names, maps, strict=True) for name in members]
        numbers = _answers(connection, Pipeline.bitcount, [f"bits:{epoch}:{name}" for epoch, name in places])
        for (_, name), number in zip(places, cast("list[int]", numbers), strict=True):
            found[name] += number
    return found


def _answers(connection: Connection, command: Callable[[Pipeline, str], object], keys: Sequence[str]) -> list[object]:
    """The answers to one command for each key, sent at once and run one by one."""

    def ask() -> list[object]:
        with connection.redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                command(pipeline, connection.key(key))
            return cast("list[object]", pipeline.execute())

    return connection.retried(ask)


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
