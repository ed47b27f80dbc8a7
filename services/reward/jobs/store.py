"""Reward jobs in Redis. Each verb is one atomic script. Every item of a job ends once: scored, unscored or cancelled.

A job consists of chunks: each is stored with its items, leased with a fencing token, scored, and replaced by its
results. If the holder of a lease dies, the chunk returns to its old place; if it was only late, its results are
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
    """A job at one instant. Times are Unix time in seconds, 0 for what has not happened."""

    job_id: str
    idempotency_key: str
    name: str
    state: JobState
    priority: int
    num_items: int
    num_scored: int
    num_unscored: Mapping[str, int]
    """By reason."""
    sum_values: float
    """Of the scored items."""
    num_chunks: int
    """Stored so far: indices 0 … num_chunks - 1."""
    num_results: int
    """Chunks with results: cursors 1 … num_results."""
    result_bytes: int
    """Stored for it: its results, its rubric until it has ended, and its record."""
    created_at: float
    finished_at: float
    expires_at: float

    @property
    def num_waiting(self) -> int:
        return self.num_items - self.num_scored - sum(self.num_unscored.values())

    @property
    def ended(self) -> bool:
        """True once no further result will come. The results may still be deleted (`EXPIRED`)."""
        return self.state in ("DONE", "CANCELLED", "EXPIRED")


@dataclass(frozen=True, slots=True)
class ChunkClaim:
    """A leased chunk: its stored items, and what an earlier holder saved."""

    job_id: str
    index: int
    token: int
    first_item: int
    """Number of its first item within the job."""
    attempts: int
    """How often its items were scored before, without a result for some of them."""
    losses: int
    """Holders in a row that died. One that only lost its lease, and reports it, is not counted."""
    under_way: int
    """How many units (items, or groups that are compared) the last of them was scoring, of those without a result.
    0: all of them.
    """
    rubric: str
    digest: str
    """Of the rubric when the job was submitted."""
    items: bytes
    partial: bytes


class JobStore:
    """The jobs of one namespace. Thread-safe.

    Every method waits up to `connection.OUTAGE_SECONDS` for a Redis that went away, then raises UnavailableError; a
    full Redis raises EnvironmentLackError. What a method reports as stored was fsynced, if Redis is set up to do so, as
    the embedded one is.
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
        """Registers a worker that has just started. The chunks of its predecessor wait again; returns how many."""
        return int(self.connection.run("register", worker))

    def submit(self, key: str, *, rubric: str, priority: int, name: str = "", digest: str = "") -> JobRecord:
        """Creates the job of an idempotency key, or returns the existing one with its own name and digest.

        Raises:
            JobExistsError: the key's job has another rubric or priority.
            JobLimitError: other jobs hold as many bytes as they may.
        """
        # Ids sort by age, so of two chunks with the same place that of the older job comes first.
        fresh = f"{time.time_ns() // 1000:014x}{uuid.uuid4().hex[:18]}"
        return _job(self.connection.run("submit", fresh, key, rubric, priority, name, digest))

    def add_chunk(self, job_id: str, index: int, num_items: int, items: bytes) -> tuple[bool, JobRecord]:
        """Stores a chunk, once. False: there is no room yet, see `has_room`.

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
        """Says that no more chunks follow. The job ends when all have results.

        Raises:
            UnknownJobError: there is no such job.
            JobError: it is cancelled.
            DataError: another number of chunks is stored.
        """
        return _job(self.connection.run("seal", checked_job_id(job_id), num_chunks))

    def claim(self, worker: str, lease_seconds: float, timeout_seconds: float) -> ChunkClaim | None:
        """Leases the next chunk; waits for one. None at the timeout.

        Chunks of higher priority come first. Jobs of the same priority take turns, item by item.
        """

        def attempt() -> list[ChunkClaim]:
            reply = self.connection.run("claim", new_request(), worker, milliseconds(lease_seconds))
            return [_claim(reply)] if reply else []

        claimed = self.connection.wait_for("signal:waiting", attempt, timeout_seconds)
        return claimed[0] if claimed else None

    def renew(self, claims: Sequence[ChunkClaim], lease_seconds: float) -> list[int]:
        """Extends leases to `lease_seconds` from now. Returns the tokens of leases that are lost."""
        flat = [part for claim in claims for part in (claim.job_id, claim.index, claim.token)]
        return [int(token) for token in self.connection.run("renew", milliseconds(lease_seconds), *flat)]

    def save(self, claim: ChunkClaim, *, partial: bytes, under_way: int, cleared: bool) -> bool:
        """Saves what is scored so far and what comes next (see `ChunkClaim.under_way`), in case the holder dies.

        `cleared`: the items that earlier holders died of are scored. False if the lease is not current.
        """
        return bool(
            self.connection.run("save", claim.job_id, claim.index, claim.token, partial, under_way, int(cleared))
        )

    def give_back(self, claim: ChunkClaim, *, attempts: int, partial: bytes, pause_seconds: float) -> bool:
        """Ends the lease. The chunk waits again after a pause, with its partial results. False if the lease is not
        current.
        """
        arguments = (claim.job_id, claim.index, claim.token, attempts, partial, milliseconds(pause_seconds))
        return bool(self.connection.run("give_back", new_request(), *arguments))

    def complete(
        self, claim: ChunkClaim, results: bytes, *, num_scored: int, sum_values: float, num_unscored: Mapping[str, int]
    ) -> bool:
        """Stores the results of a chunk and ends its lease. False if the lease is not current: the results are refused.

        If jobs then hold too many bytes, results of other jobs that have ended are deleted.

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
        """Deletes a job that has ended, with its results and its key. Returns it as it was, also when repeated within a
        minute.

        Raises:
            UnknownJobError: there is no such job.
            JobError: it has not ended.
        """
        return _job(self.connection.run("delete", checked_job_id(job_id)))

    def events(self, job_id: str, after_cursor: int, max_bytes: int) -> tuple[JobRecord, list[bytes]]:
        """The job, and its results after a cursor: up to `max_bytes`, but at least one if there is any.

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
        state=fields["state"].decode(),  # type: ignore[arg-type]  # the scripts write no other
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
