"""The experience buffer: the stages `prompts`, `generated` and `scored` in Redis. Each verb is one atomic script.

Services claim a group, work on it, and complete it. A claim is a lease with a fencing token. If its holder dies, the
group returns to the front of its queue with the partial results that `renew` saved. If the holder was only late, its
result is refused. Claims of `scored` are not leases. They belong to a trainer incarnation, and only the next
incarnation takes them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from tandem.protos.codec import decode_headers
from tandem.protos.errors import LedgerError
from tandem.protos.types import RowHeader
from tandem.services.buffer.connection import RUNS, Connection, milliseconds, new_request
from tandem.services.buffer.ledger import Ledger, checked_ids, checked_reason
from tandem.services.buffer.registry import Registry

Stage = Literal["prompts", "generated"]
FailureKind = Literal["infrastructure", "data", "voluntary"]
Released = Literal["requeued", "dropped", "refused"]


@dataclass(frozen=True, slots=True)
class Admission:
    """State for the feed: `free` credits, `wanted` groups that the run still needs, and the next position `cursor`."""

    free: int
    wanted: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A leased group. `partial` has the partial results that an earlier holder saved by `renew`."""

    group_id: str
    stage: Stage
    token: int
    payload: bytes
    partial: bytes | None


@dataclass(frozen=True, slots=True)
class ScoredClaim:
    """A scored group claimed by the trainer; `Buffer.read` fetches its payload."""

    group_id: str
    headers: tuple[RowHeader, ...]


class Buffer(Ledger, Registry):
    """One run's buffer. Thread-safe, except that one thread at a time calls `claim_scored`.

    If Redis is unreachable, every method waits up to `connection.OUTAGE_SECONDS` and then raises UnavailableError. A
    full Redis raises EnvironmentLackError. Data is never trimmed or evicted.
    """

    def __init__(self, redis_url: str, run_id: str, *, connect_timeout_seconds: float = 5.0) -> None:
        super().__init__()
        self.connection = Connection(redis_url, run_id, RUNS, connect_timeout_seconds=connect_timeout_seconds)
        self.run_id = run_id
        self.place = self.connection.place
        self._scored_request = new_request()

    def close(self) -> None:
        """Closes its connections."""
        self.connection.close()

    def create(
        self,
        *,
        groups_per_batch: int,
        staleness_budget: int,
        target_groups: int,
        failure_budget: Mapping[str, int],
        resume: bool,
    ) -> None:
        """Creates the run. With `resume`, keeps the groups of an existing run and sets its limits and target.

        `failure_budget`: how many failures of each kind, `infrastructure` and `data`, a group survives.

        Raises:
            RunExistsError: the run exists and `resume` is False.
        """
        limits = (groups_per_batch, staleness_budget, target_groups)
        budgets = (failure_budget["infrastructure"], failure_budget["data"])
        self.connection.run("create", new_request(), int(resume), *limits, *budgets)

    def delete(self) -> None:
        """Removes every key of the run. Only its supervisor may call this, and only before the first batch."""
        redis, pattern = self.connection.redis, self.connection.key("*")
        keys = self.connection.retried(lambda: list(redis.scan_iter(match=pattern, count=1000)))
        if keys:
            self.connection.retried(lambda: redis.unlink(*keys))

    def exists(self) -> bool:
        """Whether Redis holds a run of this id."""
        return bool(self.connection.retried(lambda: self.connection.redis.exists(self.connection.key("meta"))))

    def admit(self, groups: Sequence[tuple[str, bytes]], cursor: int) -> int:
        """Admits the prefix of (group id, payload) that credits and target allow, and returns its length.

        `cursor` is the feed's position after the last offered group. The position after the last admitted group is
        stored.

        Raises:
            DataError: a group was admitted before. In this case no group is admitted.
        """
        checked_ids(group_id for group_id, _ in groups)
        flat = [value for group in groups for value in group]
        return int(self.connection.run("admit", new_request(), cursor, *flat))

    def admission(self) -> Admission:
        """Returns what the feed may admit now."""
        return Admission(*map(int, self.connection.run("admission")))

    def mark_exhausted(self, why: Literal["target", "dataset"]) -> bool:
        """Marks the feed as finished. `target` is refused (False) while groups are wanted.

        A group that is dropped later undoes `target`.
        """
        return bool(self.connection.run("mark_exhausted", why))

    def exhausted(self) -> bool:
        """True once no further group can become scored: the feed has ended, and no group waits or is leased before
        stage `scored`.
        """
        return bool(self.connection.run("exhausted"))

    def claim(self, stage: Stage, worker: str, n: int, lease_seconds: float, timeout_seconds: float) -> list[Claim]:
        """Leases up to n groups of a stage. Waits for the first one; returns [] at the timeout.

        Raises:
            NotAdmittedError: for stage `prompts`, if `worker` is not a sampler LIVE at the published version.
            FencedError: for stage `prompts`, if a later start of the sampler replaced this process.
        """
        arguments = (stage, worker, self._generation(worker), n, milliseconds(lease_seconds))
        assert n > 0

        def attempt() -> list[Claim]:
            reply = self.connection.run("claim", new_request(), *arguments)
            return [
                Claim(reply[i].decode(), stage, int(reply[i + 1]), reply[i + 2], reply[i + 3])
                for i in range(0, len(reply), 4)
            ]

        return self.connection.wait_for(f"signal:{stage}", attempt, timeout_seconds)

    def claim_scored(self, incarnation: int, n: int, timeout_seconds: float) -> list[ScoredClaim]:
        """Claims up to n scored groups in order of completion. Waits for the first one; returns [] at the timeout.

        Raises:
            FencedError: a later trainer started.
        """
        assert n > 0

        def attempt() -> list[ScoredClaim]:
            # Kept until an answer arrives. If an answer is lost, even past the outage deadline, the next call gets it.
            reply = self.connection.run("claim_scored", incarnation, self._scored_request, n)
            self._scored_request = new_request()
            return [
                ScoredClaim(reply[i].decode(), decode_headers(reply[i + 1].decode())) for i in range(0, len(reply), 2)
            ]

        return self.connection.wait_for("signal:scored", attempt, timeout_seconds)

    def read(self, group_ids: Sequence[str]) -> list[bytes]:
        """Returns the payloads of the groups, in the given order.

        Raises:
            LedgerError: Redis holds no payload of a group.
        """
        if not group_ids:
            return []
        keys = [self.connection.key(f"payload:{group_id}") for group_id in group_ids]
        payloads = cast("list[bytes | None]", self.connection.retried(lambda: self.connection.redis.mget(keys)))
        missing = [group_id for group_id, payload in zip(group_ids, payloads, strict=True) if payload is None]
        if missing:
            raise LedgerError(f"run {self.run_id} in Redis at {self.place}: no payload of group {', '.join(missing)}")
        return [payload for payload in payloads if payload is not None]

    def renew(
        self, claims: Sequence[Claim], lease_seconds: float, partial: Mapping[int, bytes] | None = None
    ) -> list[int]:
        """Extends leases to `lease_seconds` from now and saves partial results by token. Returns lost tokens."""
        arguments: list[bytes | str | int] = []
        for claim in claims:
            saved = (partial or {}).get(claim.token)
            arguments += [claim.group_id, claim.stage, claim.token, int(saved is not None), saved or b""]
        return [int(token) for token in self.connection.run("renew", milliseconds(lease_seconds), *arguments)]

    def complete(self, claim: Claim, payload: bytes, headers: str = "") -> bool:
        """Moves the group to the next stage with its payload and ends the lease.

        Returns False if the lease is no longer current; the result is then refused and counted. A repetition with the
        same claim returns True and has no effect. `headers` (`tandem.protos.codec.encode_headers`) are stored with a
        group that becomes scored.
        """
        assert bool(headers) == (claim.stage == "generated"), "headers belong to scored groups"
        return bool(self.connection.run("complete", claim.group_id, claim.stage, claim.token, payload, headers))

    def release(self, claim: Claim, reason: str, kind: FailureKind, detail: str = "") -> Released:
        """Requeues the group, or drops it with `reason` once its budget for this kind of failure is spent.

        `detail` explains the reason; `drop_errors` returns it if the group is the first to be dropped for that reason.
        `voluntary` spends no budget and puts the group at the front of its queue. A failure puts it at the back.
        Returns `refused` if the lease is no longer current.
        """
        reply = self.connection.run(
            "release", new_request(), claim.group_id, claim.stage, claim.token, checked_reason(reason), kind, detail
        ).decode()
        assert reply in ("requeued", "dropped", "refused")
        return reply  # type: ignore[no-any-return]
