"""Reward jobs in Redis. Each verb is one atomic script. Every item of a job ends once, scored, unscored or cancelled.

A job consists of chunks: each is stored with its items, leased with a fencing token, scored, and replaced by its
results. If the holder of a lease dies, the chunk returns to its old place. If it was only late, its results are
refused.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.protos.errors import UnknownJobError
from tandem.services.buffer.connection import Connection, KeySpace, milliseconds, new_request
from tandem.services.config.jobs import JobsConfig

JobState = Literal["OPEN", "RUNNING", "DONE", "CANCELLED", "EXPIRED"]

CANCELLED = "cancelled"
"""Reason of the items of a cancelled job that have no result."""

_JOBS = KeySpace(
    "tandem.services.reward.jobs.scripts",
    prelude=("jobs", "room"),
    prefix="tandem:reward",
    remedy_when_full="raise its `maxmemory`, or delete jobs and lower jobs.max_unscored_bytes or jobs.max_result_bytes",
)
_JOB_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class JobRecord:
    """State of a job. Times are Unix times in seconds, 0 for events that have not happened."""

    job_id: str
    idempotency_key: str
    name: str
    state: JobState
    priority: int
    num_items: int
    num_scored: int
    num_unscored: Mapping[str, int]
    """Unscored items by reason."""
    sum_values: float
    """Sum over the scored items."""
    num_chunks: int
    """Chunks stored so far, with indices 0 … num_chunks - 1."""
    num_results: int
    """Chunks with results, with cursors 1 … num_results."""
    result_bytes: int
    """Bytes stored for the job: its results, its record, and its rubric until it has ended."""
    created_at: float
    finished_at: float
    expires_at: float

    @property
    def num_waiting(self) -> int:
        return self.num_items - self.num_scored - sum(self.num_unscored.values())

    @property
    def ended(self) -> bool:
        """Whether no further results will come. The results may still be deleted (`EXPIRED`)."""
        return self.state in ("DONE", "CANCELLED", "EXPIRED")


@dataclass(frozen=True, slots=True)
class ChunkClaim:
    """A leased chunk: its stored items and the partial results of earlier holders."""

    job_id: str
    index: int
    token: int
    first_item: int
    """Number of its first item within the job."""
    attempts: int
    """How often its items were scored before, without a result for some of them."""
    losses: int
    """Consecutive holders that died. A holder that reports the loss of its lease is not counted."""
    under_way: int
    """Number of units (items, or compared groups) without a result that the last dead holder was scoring. 0: all."""
    rubric: str
    digest: str
    """Digest of the rubric at submission."""
    items: bytes
    partial: bytes


class JobStore:
    """The jobs of one namespace. Thread-safe.

    If Redis is unreachable, every method waits up to `connection.OUTAGE_SECONDS` and then raises UnavailableError. A
    full Redis raises EnvironmentLackError. Data reported as stored are fsynced if Redis is configured to do so, like
    the embedded one.
    """

    def __init__(self, redis_url: str, config: JobsConfig) -> None:
        assert config.namespace, "the caller fills in the default"
        self.config = config
        self.connection = Connection(redis_url, config.namespace, _JOBS)
        limits = (config.max_unscored_bytes, config.result_bytes)
        self.connection.run("configure", milliseconds(config.retention_seconds), *limits)

    def close(self) -> None:
        """Closes its connections."""
        self.connection.close()

    def register(self, worker: str) -> int:
        """Registers a worker that has just started. Requeues the chunks of its predecessor and returns their number."""
        return int(self.connection.run("register", worker))

    def submit(self, key: str, *, rubric: str, priority: int, name: str = "", digest: str = "") -> JobRecord:
        """Creates the job of an idempotency key, or returns the existing one with its own name and digest.

        Raises:
            JobExistsError: the key's job has another rubric or priority.
            JobLimitError: other jobs have reached their limit of stored bytes.
        """
        # Ids sort by age, so the older job's chunk comes first if two chunks have the same place.
        fresh = f"{time.time_ns() // 1000:014x}{uuid.uuid4().hex[:18]}"
        return _job(self.connection.run("submit", fresh, key, rubric, priority, name, digest))

    def add_chunk(self, job_id: str, index: int, num_items: int, items: bytes) -> tuple[bool, JobRecord]:
        """Stores a chunk once. Returns False if there is no room yet; see `has_room`.

        Raises:
            UnknownJobError: there is no such job.
            JobError: the job takes no more chunks.
            DataError: a chunk before this one is missing.
            JobLimitError: the results of this job, or of all that have not ended, have reached their limit.
        """
        stored, job = self.connection.run("add_chunk", checked_job_id(job_id), index, num_items, items)
        return bool(stored), _job(job)

    def has_room(self, job_id: str, num_bytes: int) -> tuple[bool, JobRecord]:
        """Whether a chunk of that size has room now, or the job takes no more chunks. Raises UnknownJobError."""
        room, job = self.connection.run("wait_for_room", checked_job_id(job_id), num_bytes)
        return bool(room), _job(job)

    def seal(self, job_id: str, num_chunks: int) -> JobRecord:
        """Marks the job as complete: no more chunks follow. It ends when all chunks have results.

        Raises:
            UnknownJobError: there is no such job.
            JobError: it is cancelled.
            DataError: another number of chunks is stored.
        """
        return _job(self.connection.run("seal", checked_job_id(job_id), num_chunks))

    def claim(self, worker: str, lease_seconds: float, timeout_seconds: float) -> ChunkClaim | None:
        """Leases the next chunk. Waits for one; returns None at the timeout.

        Chunks of higher priority come first. Jobs of the same priority take turns, item by item.
        """

        def attempt() -> list[ChunkClaim]:
            reply = self.connection.run("claim", new_request(), worker, milliseconds(lease_seconds))
            return [_claim(reply)] if reply else []

        claimed = self.connection.wait_for("signal:waiting", attempt, timeout_seconds)
        return claimed[0] if claimed else None

    def renew(self, claims: Sequence[ChunkClaim], lease_seconds: float) -> list[int]:
        """Extends leases to `lease_seconds` from now. Returns the tokens of lost leases."""
        flat = [part for claim in claims for part in (claim.job_id, claim.index, claim.token)]
        return [int(token) for token in self.connection.run("renew", milliseconds(lease_seconds), *flat)]

    def save(self, claim: ChunkClaim, *, partial: bytes, under_way: int, cleared: bool) -> bool:
        """Saves the results so far and the number of units scored next (`ChunkClaim.under_way`), in case the holder
        dies.

        `cleared`: the items that killed earlier holders are scored. Returns False if the lease is not current.
        """
        return bool(
            self.connection.run("save", claim.job_id, claim.index, claim.token, partial, under_way, int(cleared))
        )

    def give_back(self, claim: ChunkClaim, *, attempts: int, partial: bytes, pause_seconds: float) -> bool:
        """Ends the lease and requeues the chunk with its partial results after a pause.

        Returns False if the lease is not current.
        """
        arguments = (claim.job_id, claim.index, claim.token, attempts, partial, milliseconds(pause_seconds))
        return bool(self.connection.run("give_back", new_request(), *arguments))

    def complete(
        self, claim: ChunkClaim, results: bytes, *, num_scored: int, sum_values: float, num_unscored: Mapping[str, int]
    ) -> bool:
        """Stores the results of a chunk and ends its lease. If the lease is not current, refuses them and returns
        False.

        If jobs then store too many bytes, results of other ended jobs are deleted.

        Raises:
            LedgerError: the numbers do not add up to the items of the chunk.
        """
        reasons = [part for reason in num_unscored.items() for part in reason]
        arguments = (claim.job_id, claim.index, claim.token, results, num_scored, repr(sum_values), *reasons)
        return bool(self.connection.run("complete", new_request(), *arguments))

    def cancel(self, job_id: str) -> JobRecord:
        """Cancels a job: its items without a result become `cancelled`. A job that has ended is left as it is.

        Raises:
            UnknownJobError: there is no such job.
        """
        return _job(self.connection.run("cancel", checked_job_id(job_id)))

    def delete(self, job_id: str) -> JobRecord:
        """Deletes a job that has ended, with its results and its key.

        Returns its last state, also if repeated within a minute.

        Raises:
            UnknownJobError: there is no such job.
            JobError: it has not ended.
        """
        return _job(self.connection.run("delete", checked_job_id(job_id)))

    def events(self, job_id: str, after_cursor: int, max_bytes: int) -> tuple[JobRecord, list[bytes]]:
        """Returns the job and its results after a cursor: up to `max_bytes`, but at least one if there are any.

        0 bytes: only the job.

        Raises:
            UnknownJobError: there is no such job.
            JobError: its results were deleted.
        """
        job, results = self.connection.run("events", checked_job_id(job_id), after_cursor, max_bytes)
        return _job(job), list(results)

    def list_jobs(self, limit: int) -> list[JobRecord]:
        """The newest jobs, newest first."""
        return [_job(reply) for reply in self.connection.run("list", limit)]

    def counts(self) -> dict[str, float]:
        """Jobs, chunks waiting and leased, bytes of items and of results, and sums over the life of the namespace."""
        reply = self.connection.run("counts")
        return {name.decode(): float(figure) for name, figure in zip(reply[::2], reply[1::2], strict=True)}


def checked_job_id(job_id: str) -> str:
    """The id. Raises UnknownJobError if it is no job id."""
    if not _JOB_ID.fullmatch(job_id):
        raise UnknownJobError(f"there is no job {job_id!r:.80}; a job_id has 32 hexadecimal digits")
    return job_id


def _job(reply: Sequence[bytes]) -> JobRecord:
    fields = {name.decode(): value for name, value in zip(reply[::2], reply[1::2], strict=True)}
    reasons = {name[9:]: int(number) for name, number in fields.items() if name.startswith("unscored:")}
    return JobRecord(
        job_id=fields["job_id"].decode(),
        idempotency_key=fields["idempotency_key"].decode(),
        name=fields["name"].decode(),
        state=fields["state"].decode(),  # type: ignore[arg-type]  # the scripts write no other states
        priority=int(fields["priority"]),
        num_items=int(fields["num_items"]),
        num_scored=int(fields["num_scored"]),
        num_unscored=reasons,
        sum_values=float(fields["sum_values"]),
        num_chunks=int(fields["num_chunks"]),
        num_results=int(fields["num_results"]),
        result_bytes=int(fields["result_bytes"]),
        created_at=int(fields["created_ms"]) / 1000,
        finished_at=int(fields["finished_ms"]) / 1000,
        expires_at=int(fields["expires_ms"]) / 1000,
    )


def _claim(reply: Sequence[Any]) -> ChunkClaim:
    job_id, index, token, first, attempts, losses, under_way, rubric, digest, items, partial = reply
    return ChunkClaim(
        job_id=job_id.decode(),
        index=int(index),
        token=int(token),
        first_item=int(first),
        attempts=int(attempts),
        losses=int(losses),
        under_way=int(under_way),
        rubric=rubric.decode(),
        digest=digest.decode(),
        items=items,
        partial=partial or b"",
    )
