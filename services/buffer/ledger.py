"""The trainer's verbs, fenced by its incarnation, and the check that no group is lost or counted twice."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence

from tandem.protos.errors import DataError
from tandem.services.buffer.connection import Connection
from tandem.services.buffer.registry import Sampler, with_generations

STATES = (
    "prompts_waiting",
    "prompts_leased",
    "generated_waiting",
    "generated_leased",
    "scored_waiting",
    "scored_claimed",
    "trained",
    "committed",
    "dropped",
)
"""The states of a group, in order. `admitted` is always the sum over them."""

_COUNTERS = ("admitted", "retired", "restored", "outstanding", "stale_results_refused", "leases_expired")
_GROUP_ID = re.compile(r"[0-9]+-[0-9]+")
_MAX_INDEX = 2**32  # a group's index is the position of a bit in a Redis string
_MAX_REASON = 64


class Ledger:
    """Incarnations, versions, and figures of every state. All verbs are idempotent."""

    connection: Connection

    def begin_incarnation(self) -> int:
        """Starts a new trainer incarnation. Earlier ones are refused, and no sampler is LIVE until it is updated.

        Claims stay unchanged until `rollback`. Raises UnavailableError if the run was never created.
        """
        return int(self.connection.run("begin_incarnation"))

    def check_incarnation(self, incarnation: int) -> None:
        """Raises FencedError unless this incarnation is the current one."""
        self.connection.run("check_incarnation", incarnation)

    def record(self, incarnation: int, version: int, group_ids: Sequence[str]) -> None:
        """Marks claimed groups as trained(version) and removes their payloads. Call it once the batch is fsynced to
        disk.

        Raises:
            FencedError: a later trainer started.
            LedgerError: a group is not claimed, or the version was recorded with other groups.
        """
        self.connection.run("record", incarnation, version, *checked_ids(group_ids))

    def publish(self, incarnation: int, version: int, acknowledged: Sequence[str | Sampler]) -> None:
        """Retires the credits of all groups trained at or below `version`.

        Samplers that acknowledged it become LIVE, other LIVE samplers STALE. Pass the `Sampler`s as read when the
        broadcast began: a sampler that has restarted since stays JOINING, because it has its first weights again. A
        plain id is not checked for restarts.

        Raises:
            FencedError: a later trainer started.
            LedgerError: a later version is published.
        """
        self.connection.run("publish", incarnation, version, *with_generations(acknowledged))

    def commit(self, incarnation: int, version: int) -> None:
        """Removes the groups trained at or below `version`, which a finished checkpoint contains. They stay counted.

        Raises:
            FencedError: a later trainer started.
            LedgerError: the version is not published yet.
        """
        self.connection.run("commit", incarnation, version)

    def rollback(self, incarnation: int, checkpoint_version: int, recorded: Mapping[int, Sequence[str]]) -> None:
        """Makes the ledger agree with the disk: the checkpoint, and the batches `recorded` (version → its group ids).

        Versions up to the checkpoint are committed. Groups recorded later become trained and outstanding again,
        whatever their state in Redis, until the last of those versions is published. Other claimed groups are requeued
        in order. The published version becomes the checkpoint's. Records at or below the checkpoint are needed only if
        Redis may have lost writes. Their groups are then committed too, so they are never trained twice.

        Raises:
            FencedError: a later trainer started.
            LedgerError: a group is trained after the checkpoint in Redis but missing in the records, or two records
                have the same group.
        """
        batches = [[version, checked_ids(recorded[version])] for version in sorted(recorded)]
        self.connection.run("rollback", incarnation, checkpoint_version, json.dumps(batches))

    def drop_claimed(self, incarnation: int, group_ids: Sequence[str], reason: str) -> None:
        """Drops claimed groups that selection rejected. Their credits return at once.

        Raises:
            FencedError: a later trainer started.
            LedgerError: a group is not claimed.
        """
        self.connection.run("drop_claimed", incarnation, checked_reason(reason), *checked_ids(group_ids))

    def drop_outstanding(self, incarnation: int, reason: str) -> int:
        """Ends a run: drops every group that is not trained, and returns their number. Raises FencedError."""
        return int(self.connection.run("drop_outstanding", incarnation, uuid.uuid4().hex, checked_reason(reason)))

    def counts(self) -> dict[str, int]:
        """Returns groups per state (`STATES`), drops by reason (`dropped:<reason>`), and the limiter's counters."""
        reply = self.connection.run("counts")
        figures = dict.fromkeys((*_COUNTERS, *STATES), 0)
        return figures | {name.decode(): int(figure) for name, figure in zip(reply[::2], reply[1::2], strict=True)}

    def drop_errors(self) -> dict[str, str]:
        """Returns, by reason, the error of the first group dropped for it."""
        return {
            name.decode(): text.decode(errors="replace") for name, text in self.connection.hash("drop_errors").items()
        }

    def verify(self) -> list[str]:
        """Returns violations of conservation and consistency, one line each; [] if the ledger is consistent.

        The state of every group is compared with its queue, lease, payload, credit and outcome, and all groups with the
        counters, atomically.
        """
        return [line.decode() for line in self.connection.run("verify")]


def checked_ids(group_ids: Iterable[str]) -> list[str]:
    """Returns the ids as a list. Raises DataError for an id that is not "<epoch>-<index>" with an index below 2³²."""
    checked = list(group_ids)
    for group_id in checked:
        if not _GROUP_ID.fullmatch(group_id) or int(group_id.partition("-")[2]) >= _MAX_INDEX:
            raise DataError(f"group id {group_id!r} is not <epoch>-<index> with an index below {_MAX_INDEX}")
    return checked


def checked_reason(reason: str) -> str:
    """Checks that the reason of a drop or release is short, because each reason has a counter."""
    assert 0 < len(reason) <= _MAX_REASON, f"a reason is a name of at most {_MAX_REASON} characters, got {reason!r}"
    return reason
