"""The experience buffer: the stages `prompts`, `generated` and `scored` in Redis. Each verb is one atomic script.

A verb whose groups may be many calls its script once for each version or chunk of them. The ledger is sound between two
calls, and whoever repeats the verb goes on where it ended.

Services claim a group, work on it, and complete it. A claim is a lease with a fencing token. If its holder dies, the
group returns to the front of its queue with the partial results that `renew` saved. If the holder was only late, its
result is refused. Claims of `scored` are not leases. They belong to a trainer incarnation, and only the next
incarnation takes them back.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, cast

from tandem.protos.errors import LedgerError, LostWritesError
from tandem.protos.row_headers import decode_headers
from tandem.services.buffer.arguments import checked_ids, checked_reason, rows, sampler_of, with_generations
from tandem.services.buffer.connection import MOST_GROUPS, RUNS, Connection, milliseconds, new_request
from tandem.services.buffer.rollback import check_records, recorded_version, roll_back, run_to_end
from tandem.services.buffer.trainer_calls import TrainerCalls
from tandem.services.buffer.types import (
    ALIVE_SECONDS,
    LIVE_STATES,
    STATES,
    Admission,
    Claim,
    FailureKind,
    Released,
    Sampler,
    ScoredClaim,
    Stage,
    Told,
)
from tandem.services.buffer.verification import violations

COUNTERS = ("admitted", "retired", "restored", "outstanding", "stale_results_refused", "leases_expired")


class Buffer:
    """One run's buffer. Thread-safe, except that one thread at a time calls `claim_scored`.

    If Redis is unreachable, every method waits for `outage_seconds` and then raises UnavailableError; see `Connection`
    for the default and for `stop`. A full Redis raises EnvironmentLackError. Methods that take the trainer's
    incarnation raise FencedError once a later trainer has started, and LostWritesError if Redis has lost what it
    acknowledged to one of them; they may be called again without effect. Data is never trimmed or evicted.
    """

    def __init__(
        self,
        redis_url: str,
        run_id: str,
        *,
        connect_timeout_seconds: float = 5.0,
        outage_seconds: float | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.connection = Connection(
            redis_url,
            run_id,
            RUNS,
            connect_timeout_seconds=connect_timeout_seconds,
            outage_seconds=outage_seconds,
            stop=stop,
        )
        self.run_id = run_id
        self.place = self.connection.place
        self._trainer = TrainerCalls(self.connection)
        self._scored_request = new_request()
        self._generations: dict[str, int] = {}
        self._registrations: dict[str, Callable[[], None]] = {}
        self._registering = threading.Lock()

    def close(self) -> None:
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

        `failure_budget`: how many failures of each kind, `infrastructure` and `data`, a group survives. Raises
        RunExistsError if the run exists and `resume` is False.
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
        """Whether the run was created. Raises ConfigError if another version of Tandem did it with another schema."""
        return bool(self.connection.run("exists"))

    # ---- the feed ----

    def admission(self) -> Admission:
        return Admission(*map(int, self.connection.run("admission")))

    def admit(self, groups: Sequence[tuple[str, bytes]], cursor: int, after: int | None = None) -> int:
        """Admits the prefix of (group id, payload) that credits and target allow, and returns its length.

        `cursor` is the feed's position after the last offered group. The position after the last admitted one is saved.
        With `after`, admits none unless that is the saved position: Redis may have lost the last admissions. Raises
        DataError, and admits none, if one was admitted before.
        """
        checked_ids(group_id for group_id, _ in groups)
        flat = [value for group in groups for value in group]
        return int(self.connection.run("admit", new_request(), cursor, "" if after is None else after, *flat))

    def mark_exhausted(self, why: Literal["target", "dataset"]) -> bool:
        """Marks the feed as finished. `target` is refused (False) while groups are wanted, and undone by a drop."""
        return bool(self.connection.run("mark_exhausted", why))

    def exhausted(self) -> bool:
        """Whether no further group can become scored: the feed has ended, and nothing is left before that stage."""
        return bool(self.connection.run("exhausted"))

    # ---- leases ----

    def claim(self, stage: Stage, worker: str, n: int, lease_seconds: float, timeout_seconds: float) -> list[Claim]:
        """Leases up to n groups of a stage, at most 128. Waits for the first one; returns [] at the timeout.

        For `prompts`, raises NotAdmittedError if `worker` is no sampler LIVE at the published version, FencedError if a
        later start of the sampler replaced this process.
        """
        assert n > 0

        def attempt() -> list[Claim]:
            generation = self._generation(worker)
            arguments = (stage, worker, generation, min(n, MOST_GROUPS), milliseconds(lease_seconds))
            try:
                reply = self.connection.run("claim", new_request(), *arguments)
            except LostWritesError:
                self._register_again(worker, generation)
                return []
            return [Claim(name.decode(), stage, int(token), *data) for name, token, *data in rows(reply, 4)]

        return self.connection.wait_for(f"signal:{stage}", attempt, timeout_seconds)

    def renew(
        self, claims: Sequence[Claim], lease_seconds: float, partial: Mapping[int, bytes] | None = None
    ) -> list[int]:
        """Extends leases to `lease_seconds` from now and saves partial results by token. Returns lost tokens."""
        saved = partial or {}
        leases = [(c.group_id, c.stage, c.token, int(c.token in saved), saved.get(c.token, b"")) for c in claims]
        return self.connection.run_in_parts("renew", milliseconds(lease_seconds), leases)

    def complete(self, claim: Claim, payload: bytes, headers: str = "") -> bool:
        """Completes one group; see `complete_all`. Returns False if the result was refused."""
        return not self.complete_all([(claim, payload, headers)])

    def complete_all(self, finished: Sequence[tuple[Claim, bytes, str]]) -> list[int]:
        """Moves groups of one stage, with payloads and headers, to the next, and ends their leases.

        Returns the tokens that are no longer current; their results are refused and counted. Only groups that become
        scored have headers (`tandem.protos.row_headers.encode_headers`). May be called again.
        """
        (stage,) = {claim.stage for claim, _, _ in finished}
        assert all(bool(headers) == (stage == "generated") for _, _, headers in finished)
        results = [(one.group_id, one.token, data, headers) for one, data, headers in finished]
        return self.connection.run_in_parts("complete", stage, results)

    def release(self, claim: Claim, reason: str, kind: FailureKind, detail: str = "") -> Released:
        """Requeues the group, or drops it with `reason` once its budget for this kind of failure is spent.

        `detail` explains the reason; `drop_errors` returns it if the group is the first to be dropped for that reason.
        `voluntary` spends no budget and puts the group at the front of its queue. A failure puts it at the back.
        Returns `refused` if the lease is no longer current.
        """
        lease = (claim.group_id, claim.stage, claim.token)
        reply = self.connection.run("release", new_request(), *lease, checked_reason(reason), kind, detail)
        return cast(Released, reply.decode())

    # ---- the trainer ----

    def begin_incarnation(self, above: int = 0) -> int:
        """Starts a new incarnation: earlier ones are refused, and no sampler is LIVE until it is updated.

        Its number is above that of every incarnation that Redis knows, and above `above`, the last one that is known
        elsewhere: samplers and disk refuse an earlier one, which a Redis that lost its last writes would begin again.
        Claims stay unchanged until `rollback`. Raises UnavailableError if the run was never created.
        """
        return int(self._trainer.change("begin_incarnation", above))

    def check_incarnation(self, incarnation: int) -> None:
        """Raises FencedError unless this incarnation is the current one, LostWritesError if Redis lost its changes."""
        self._trainer.check("check_incarnation", incarnation)

    def claim_scored(self, incarnation: int, n: int, timeout_seconds: float) -> list[ScoredClaim]:
        """Claims up to n scored groups in order of completion. Waits for the first one; returns [] at the timeout."""
        assert n > 0

        def attempt() -> list[ScoredClaim]:
            # Kept until an answer arrives. If an answer is lost, even past the outage deadline, the next call gets it.
            reply = self._trainer.change("claim_scored", incarnation, self._scored_request, n)
            self._scored_request = new_request()
            return [
                ScoredClaim(group_id.decode(), decode_headers(headers.decode())) for group_id, headers in rows(reply, 2)
            ]

        return self.connection.wait_for("signal:scored", attempt, timeout_seconds)

    def read(self, group_ids: Sequence[str]) -> list[bytes]:
        """Returns the payloads of the groups, in the given order. Raises LedgerError if Redis lacks one."""
        if not group_ids:
            return []
        keys = [self.connection.key(f"payload:{group_id}") for group_id in group_ids]
        payloads = cast("list[bytes | None]", self.connection.retried(lambda: self.connection.redis.mget(keys)))
        missing = [group_id for group_id, payload in zip(group_ids, payloads, strict=True) if payload is None]
        if missing:
            raise LedgerError(f"run {self.run_id} in Redis at {self.place}: no payload of group {', '.join(missing)}")
        return cast("list[bytes]", payloads)

    def record(self, incarnation: int, version: int, group_ids: Sequence[str]) -> None:
        """Marks claimed groups as trained(version) and removes their payloads. Sync the batch to disk first.

        Raises LedgerError if a group is not claimed, or the version was recorded with other groups.
        """
        self._trainer.change("record", incarnation, version, *checked_ids(group_ids))

    def drop_claimed(self, incarnation: int, group_ids: Sequence[str], reason: str) -> None:
        """Drops claimed groups, whose credits return at once. Raises LedgerError if a group is not claimed."""
        self._trainer.change("drop_claimed", incarnation, checked_reason(reason), *checked_ids(group_ids))

    def publish(
        self, incarnation: int, version: int, acknowledged: Sequence[str | Sampler], group_ids: Sequence[str] = ()
    ) -> None:
        """Retires the credits of all groups trained at or below `version`. `group_ids` are those that it trained, none
        for version 0 and after a rollback, which has entered them.

        Samplers that acknowledged it become LIVE, other LIVE samplers STALE. Pass the `Sampler`s as read when the
        broadcast began: a sampler that has restarted since stays JOINING, because it has its first weights again. A
        plain id is not checked for restarts. Raises LedgerError if a later version is published, or one of `group_ids`
        is not recorded in this version.
        """
        groups: list[str | int] = [len(group_ids), *checked_ids(group_ids)]
        run_to_end(self._trainer.change, "publish", incarnation, version, *groups, *with_generations(acknowledged))

    def commit(self, incarnation: int, version: int) -> None:
        """Removes the groups trained at or below `version`, which a finished checkpoint contains. They stay counted.
        Raises LedgerError if the version is not published yet.
        """
        run_to_end(self._trainer.change, "commit", incarnation, version)

    def committed_version(self) -> int:
        """The version up to which Redis has every batch as committed, 0 before the first commit."""
        return int(self._texts("meta").get("committed_version", 0))

    def rollback(self, incarnation: int, checkpoint_version: int, recorded: Mapping[int, Sequence[str]]) -> None:
        """Makes the ledger agree with the disk: the checkpoint, and the batches `recorded` (version → its group ids).

        Versions up to the checkpoint are committed. Groups recorded later become trained and outstanding again,
        whatever their state in Redis, until the last of those versions is published. Other claimed groups are requeued
        in order. The published version becomes the checkpoint's. Of the records at or below the checkpoint, those above
        `committed_version` are needed, because Redis may have lost writes. Their groups are then committed too, so they
        are never trained twice.

        Raises as `rollback.check_records`, and then changes nothing. A trainer that dies in a rollback leaves a sound
        ledger, in which its successor repeats it.
        """
        records = {version: checked_ids(recorded[version]) for version in sorted(recorded)}
        check_records(self.connection, checkpoint_version, records, recorded_version(self.connection))
        roll_back(self._trainer.change, incarnation, checkpoint_version, records)

    def drop_outstanding(self, incarnation: int, reason: str) -> int:
        """Ends a run: drops every group that is not trained, and returns their number."""
        counts, dropped = self.counts(), 0
        outstanding = sum(counts[state] for state in LIVE_STATES)
        while True:
            arguments = (incarnation, new_request(), checked_reason(reason))
            number = int(self._trainer.change("drop_outstanding", *arguments))
            dropped += number
            if number == 0 or dropped >= outstanding:  # the feed may admit others in their place
                return dropped

    # ---- the registry ----

    def register_sampler(self, sampler_id: str, address: str, tensor_parallel_size: int) -> None:
        """Registers a sampler that has just started, as JOINING, and requeues the leases of its predecessor.

        From then on, claims of the earlier process are refused (FencedError), and a heartbeat tells it.
        """
        generation = self.connection.run("register_sampler", sampler_id, address, tensor_parallel_size)
        self._generations[sampler_id] = int(generation)
        again = partial(self.register_sampler, sampler_id, address, tensor_parallel_size)
        self._registrations[sampler_id] = again
        run_to_end(self.connection.run, "give_back", sampler_id)

    def register_service(self, name: str, address: str) -> None:
        """Registers a service that has just started, and requeues the leases of its predecessor. From then on, claims
        of the earlier process are refused (FencedError), and a heartbeat tells it.
        """
        self._generations[name] = int(self.connection.run("register_service", name, address))
        self._registrations[name] = partial(self.register_service, name, address)
        run_to_end(self.connection.run, "give_back", name)

    def unregister_service(self, name: str) -> None:
        """Takes a service out of the registry, unless a later start has its name. Heartbeats may go on."""
        self.connection.run("unregister_service", name, self._generation(name))

    def heartbeat(self, name: str, figures: Mapping[str, float], activity: str = "") -> Told:
        """Reports, once a second, that `name` is alive, its figures (sums since its start), and what it does. Registers
        it again if Redis has lost its registration.
        """
        told, generation = b"replaced", None
        while told == b"replaced" and generation != self._generation(name):  # a thread may register it again meanwhile
            generation = self._generation(name)
            try:
                told = self.connection.run("heartbeat", name, generation, json.dumps(dict(figures)), activity)
            except LostWritesError:
                self._register_again(name, generation)
        return cast("Told", told.decode())

    def samplers(self, alive_within_seconds: float = ALIVE_SECONDS) -> list[Sampler]:
        """Returns all samplers that have ever registered, ordered by id."""
        reply = self.connection.run("samplers_alive", str(alive_within_seconds))
        return [sampler_of(*row) for row in rows(reply, 9)]

    def admit_sampler(self, incarnation: int, sampler_id: str | Sampler, version: int) -> bool:
        """Makes a sampler that was updated to `version` LIVE, if that is still the published version.

        Pass the `Sampler` as read when its update began, so that a sampler that has restarted since is not admitted.
        """
        return bool(self._trainer.change("admit_sampler", incarnation, *with_generations([sampler_id]), version))

    def services(self) -> dict[str, str]:
        return self._texts("services")

    def secret(self) -> str:
        """The secret from which the tokens of the run's services are made. The first caller creates it."""
        key, redis = self.connection.key("secret"), self.connection.redis
        self.connection.retried(lambda: redis.set(key, secrets.token_hex(32), nx=True))
        return cast("bytes", self.connection.retried(lambda: redis.get(key))).decode()

    def figures(self) -> dict[str, dict[str, float]]:
        """Returns the latest figures of every service and sampler by name."""
        return {name: json.loads(text) for name, text in self._texts("figures").items()}

    def activities(self) -> dict[str, str]:
        """Returns what every service and sampler does, in one line, by name."""
        return self._texts("activities")

    def silences(self) -> dict[str, float]:
        """Returns the seconds since the last heartbeat of every service and sampler by name."""
        return {name.decode(): int(silent_ms) / 1000 for name, silent_ms in rows(self.connection.run("silences"), 2)}

    # ---- figures ----

    def published_version(self) -> int:
        """The published policy version, -1 before the first publication."""
        return int(self._texts("meta").get("published_version", -1))

    def counts(self) -> dict[str, int]:
        """Returns groups per state (`STATES`), drops by reason (`dropped:<reason>`), and the limiter's counters."""
        found = {name.decode(): int(figure) for name, figure in rows(self.connection.run("counts"), 2)}
        return dict.fromkeys((*COUNTERS, *STATES), 0) | found

    def set_aside(self) -> dict[str, str]:
        """Returns, by group id, why a prompt failed so often that no later epoch admits it. At most 1,000 are kept."""
        return self._texts("set_aside")

    def drop_errors(self) -> dict[str, str]:
        """Returns, by reason, the error of the first group dropped for it."""
        return self._texts("drop_errors")

    def verify(self) -> list[str]:
        """Compares every group with its queue, lease, payload, credit and outcome, and all groups with the counters.

        Returns one line for each contradiction. It may run while everything else does, and holds nobody up.
        """
        return violations(self.connection)

    def _texts(self, name: str) -> dict[str, str]:
        return {field.decode(): text.decode(errors="replace") for field, text in self.connection.hash(name).items()}

    def _register_again(self, name: str, generation: int | str) -> None:
        """Repeats the registration with this generation, which Redis has lost, unless another thread has done so."""
        with self._registering:
            if self._generation(name) == generation:
                self._registrations[name]()

    def _generation(self, name: str) -> int | str:
        return self._generations.get(name, "")
