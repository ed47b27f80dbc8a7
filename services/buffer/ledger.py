"""The trainer's verbs, which its incarnation fences, and the check that no group is lost or counted twice."""

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
"""The states of a group, in order. At every instant `admitted` is the sum over them."""

_COUNTERS = ("admitted", "retired", "restored", "outstanding", "stale_results_refused", "leases_expired")
_GROUP_ID = re.compile(r"[0-9]+-[0-9]+")
_MAX_INDEX = 2**32  # a group's index is the position of a bit in a Redis string
_MAX_REASON = 64


class Ledger:
    """Incarnations, versions, and figures of every state. All verbs may be repeated without harm."""

    connection: Connection

    def begin_incarnation(self) -> int:
        """Starts a new trainer incarnation: earlier ones are refused, and no sampler is LIVE until it is updated.

        Claims stay where they are; `rollback` moves them. Raises UnavailableError if the run was never created.
        """
        return int(self.connection.run("begin_incarnation"))

    def check_incarnation(self, incarnation: int) -> None:
        """Raises FencedError unless this incarnation is the current one."""
        self.connection.run("check_incarnation", incarnation)

    def record(self, incarnation: int, version: int, group_ids: Sequence[str]) -> None:
        """Claimed groups become trained(version); their payloads leave Redis. Call it once the batch is fsynced to
        disk.

        Raises:
            FencedError: a later trainer started.
            LedgerError: a group is not claimed, or the version was recorded with other groups.
        """
        self.connection.run("record", incarnation, version, *checked_ids(group_ids))

    def publish(self, incarnation: int, version: int, acknowledged: Sequence[str | Sampler]) -> None:
        """Retires the credits of all groups trained at or below `version`. Samplers that acknowledged it become LIVE,
        other LIVE samplers STALE.

        Pass the `Sampler`s as read when the broadcast began: one that has restarted since stays JOINING, because it has
        its first weights again. A plain id is not checked for that.

        Raises:
            FencedError: a later trainer started.
            LedgerError: a later version is published.
        """
        self.connection.run("publish", incarnation, version, *with_generations(acknowledged))

    def commit(self, incarnation: int, version: int) -> None:
        """Removes the groups trained at or below `version`, which a finished checkpoint contains; they stay counted.

        Raises:
            FencedError: a later trainer started.
            LedgerError: the version is not published yet.
        """
        self.connection.run("commit", incarnation, version)

    def rollback(self, incarnation: int, checkpoint_version: int, recorded: Mapping[int, Sequence[str]]) -> None:
        """Makes the ledger agree with the disk: the checkpoint, and the batches `recorded` (version → its group ids).

        Versions up to the checkpoint are committed. Groups recorded later become trained and outstanding again,
        whatever their state in Redis, until the last of those versions is published. Other claimed groups wait again in
        their order. The published version becomes the checkpoint's. Records at or below the checkpoint are needed only
        if Redis may have lost writes: their groups are then committed too, and never trained twice.

        Raises:
            FencedError: a later trainer started.
            LedgerError: Redis holds a group as trained after the checkpoint which no record holds, or two records hold
                one group.
        """
        batches = [[version, checked_ids(recorded[version])] for version in sorted(recorded)]
        self.connection.run("rollback", incarnation, checkpoint_version, json.dumps(batches))

    def drop_claimed(self, incarnation: int, group_ids: Sequence[str], reason: str) -> None:
        """Drops claimed groups that selection rejected; their credits return at once.

        Raises:
            FencedError: a later trainer started.
            LedgerError: a group is not claimed.
        """
        self.connection.run("drop_claimed", incarnation, checked_reason(reason), *checked_ids(group_ids))

    def drop_outstanding(self, incarnation: int, reason: str) -> int:
        """Ends a run: drops every group that is not trained, and returns how many. Raises FencedError."""
        return int(self.connection.run("drop_outstanding", incarnation, uuid.uuid4().hex, checked_reason(reason)))

    def counts(self) -> dict[str, int]:
        """Groups in every state (`STATES`), drops by reason (`dropped:<reason>`), and the counters of the limiter."""
        reply = self.connection.run("counts")
        figures = dict.fromkeys((*_COUNTERS, *STATES), 0)
        return figures | {name.decode(): int(figure) for name, figure in zip(reply[::2], reply[1::2], strict=True)}

    def drop_errors(self) -> dict[str, str]:
        """By reason of a drop, the error of the first group dropped for it."""
        return {
            name.decode(): text.decode(errors="replace") for name, text in self.connection.hash("drop_errors").items()
        }

    def verify(self) -> list[str]:
        """Violations of conservation and consistency at one instant, one line each; [] if the ledger is sound.

        Every group's state is compared with its queue, lease, payload, credit and fate, and all of them with the
        counters.
        """
        return [line.decode() for line in self.connection.run("verify")]


def checked_ids(group_ids: Iterable[str]) -> list[str]:
    """The ids as a list. Raises DataError for one that is not "<epoch>-<index>" with an index below 2³²."""
    checked = list(group_ids)
    for group_id in checked:
        if not _GROUP_ID.fullmatch(group_id) or int(group_id.partition("-")[2]) >= _MAX_INDEX:
            raise DataError(f"group id {group_id!r} is not <epoch>-<index> with an index below {_MAX_INDEX}")
    return checked


def checked_reason(reason: str) -> str:
    """The reason of a drop or release; short, because each one has its counter."""
    assert 0 < len(reason) <= _MAX_REASON, f"a reason is a name of at most {_MAX_REASON} characters, got {reason!r}"
    return reason
