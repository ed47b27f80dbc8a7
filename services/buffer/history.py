"""What the ledger keeps of one group, and which groups are over: for those who look at a run, not for its services."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tandem.protos.row_headers import decode_headers
from tandem.protos.types import RowHeader
from tandem.services.buffer.arguments import checked_ids, rows
from tandem.services.buffer.connection import Connection
from tandem.services.buffer.types import Stage

_STAGES: tuple[Stage, ...] = ("prompts", "generated")


@dataclass(frozen=True, slots=True)
class Return:
    """A lease that ended without a result, at `time` in seconds since 1970 by the clock of Redis' host."""

    time: float
    stage: str
    worker: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Lease:
    """The last lease of a group in a stage."""

    worker: str
    since: float
    """Seconds since 1970."""
    is_over: bool
    """Whether its result was taken."""


@dataclass(frozen=True, slots=True)
class GroupNotes:
    """When a group was admitted, and its leases."""

    admitted_at: float | None
    """Seconds since 1970; None: unknown, as after a Redis that forgot the group."""
    returns: Sequence[Return]
    """The last ones, oldest first."""
    num_returns: int
    leases: Mapping[Stage, Lease]
    """None of those that earlier versions of Tandem gave out."""


@dataclass(frozen=True, slots=True)
class GroupHistory:
    """What Redis knows of a group. One that is over keeps only how it ended."""

    admitted: bool
    state: str
    """"" if the group is over, or was never admitted."""
    ended: str
    """`committed`, `dropped:<reason>`, or ""."""
    version: int | None
    """The version that trained it, once it is recorded and until it is committed."""
    notes: GroupNotes
    failures: Mapping[str, int]
    """By kind."""
    headers: tuple[RowHeader, ...]
    """Once it is scored, and until it is recorded."""


def group_history(connection: Connection, group_id: str) -> GroupHistory:
    """Reads what Redis knows of a group, in one instant. Raises DataError if the id is none."""
    checked_ids([group_id])
    state, score, ended, admitted, flat = connection.run("describe", group_id)
    fields = _texts(rows(flat, 2))
    trained = state == b"trained"
    return GroupHistory(
        admitted=admitted == 1,
        state=state.decode(),
        ended=ended.decode(),
        version=int(score) if trained else None,
        notes=_notes(fields),
        failures={name.partition(":")[2]: int(n) for name, n in fields.items() if name.startswith("failures:")},
        headers=decode_headers(fields["headers"]) if "headers" in fields else (),
    )


def group_notes(connection: Connection, group_ids: Sequence[str]) -> dict[str, GroupNotes]:
    """What is noted of each group, without those of which nothing is."""

    def ask() -> list[dict[bytes, bytes]]:
        with connection.redis.pipeline(transaction=False) as pipeline:
            for group_id in group_ids:
                pipeline.hgetall(connection.key(f"group:{group_id}"))
            return cast("list[dict[bytes, bytes]]", pipeline.execute())

    found = zip(group_ids, connection.retried(ask), strict=True)
    return {group_id: _notes(_texts(fields.items())) for group_id, fields in found if fields}


def finished_groups(connection: Connection) -> dict[str, set[str]]:
    """The ids of all groups that are over, by how they ended: `committed`, `dropped:<reason>`."""
    found: dict[str, set[str]] = {}
    for epoch in _names(connection, "epochs"):
        for map_name in _names(connection, f"maps:{epoch}"):
            if map_name != "admitted":
                found.setdefault(map_name, set()).update(_marked(connection, epoch, map_name))
    return found


def trained_groups(connection: Connection) -> dict[str, int]:
    """The version of every group that is trained and not committed."""
    redis, key = connection.redis, connection.key("trained")
    members = connection.retried(lambda: redis.zrange(key, 0, -1, withscores=True))
    return {name.decode(): int(version) for name, version in cast("list[tuple[bytes, float]]", members)}


def _texts(fields: Iterable[Sequence[bytes]]) -> dict[str, str]:
    return {name.decode(): text.decode(errors="replace") for name, text in fields}


def _notes(fields: Mapping[str, str]) -> GroupNotes:
    admitted_at = int(fields["admitted"]) / 1000 if "admitted" in fields else None
    return GroupNotes(admitted_at, _returns(fields), int(fields.get("returns", 0)), dict(_leases(fields)))


def _returns(fields: Mapping[str, str]) -> Sequence[Return]:
    notes = sorted(json.loads(text) for name, text in fields.items() if name.startswith("return:"))
    return [Return(milliseconds / 1000, *texts) for _number, milliseconds, *texts in notes]


def _leases(fields: Mapping[str, str]) -> Iterator[tuple[Stage, Lease]]:
    for stage in _STAGES:
        # A token is at least the time of Redis' clock in microseconds when it was given out.
        if {f"completed:{stage}", f"worker:{stage}"} <= fields.keys():
            yield stage, Lease(fields[f"worker:{stage}"], int(fields[f"completed:{stage}"]) / 1e6, is_over=True)
        elif "token" in fields and f"completed:{stage}" not in fields:
            yield stage, Lease(fields["worker"], int(fields["token"]) / 1e6, is_over=False)
            return


def _marked(connection: Connection, epoch: str, map_name: str) -> Iterator[str]:
    """Redis counts the bits of a byte from its highest."""
    redis, key = connection.redis, connection.key(f"bits:{epoch}:{map_name}")
    bits = cast("bytes | None", connection.retried(lambda: redis.get(key)))
    for place, byte in enumerate(bits or b""):
        for bit in range(8):
            if byte & (0x80 >> bit):
                yield f"{epoch}-{8 * place + bit}"


def _names(connection: Connection, key: str) -> list[str]:
    members = cast("set[bytes]", connection.retried(lambda: connection.redis.smembers(connection.key(key))))
    return sorted(name.decode() for name in members)
