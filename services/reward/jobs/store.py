"""Reward jobs in Redis. Each verb is one atomic script. Every item of a job ends once, scored, unscored or cancelled.

A job consists of chunks: each is stored with its items, leased with a fencing token, scored, and replaced by its
results. If the holder of a lease dies, the chunk returns to its place; results of a holder that was late are refused.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from tandem.protos import reward_pb2
from tandem.protos.errors import UnknownJobError
from tandem.services.buffer.connection import Connection, KeySpace, milliseconds, new_request
from tandem.services.config.recipe import JobsConfig

JobState = Literal["OPEN", "RUNNING", "DONE", "CANCELLED", "EXPIRED"]
CANCELLED = "cancelled"
"""Reason of the items of a cancelled job that have no result."""
EVERYBODY = "*"
"""In place of an owner: the caller may see and end all jobs. No owner has this name."""

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
    def mean_value(self) -> float:
        return self.sum_values / self.num_scored if self.num_scored else 0.0

    @property
    def ended(self) -> bool:
        """Whether no further results will come. The results may still be deleted (`EXPIRED`)."""
        return self.state in ("DONE", "CANCELLED", "EXPIRED")

    def to_proto(self) -> reward_pb2.Job:
        return reward_pb2.Job(**{name: getattr(self, name) for name in reward_pb2.Job.DESCRIPTOR.fields_by_name})


@dataclass(frozen=True, slots=True)
class ChunkClaim:
    """A leased chunk: its items and the partial results of earlier holders, in the order of claim.lua's reply."""

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
    """How many units (items, or compared groups) without a result the last dead holder was scoring. 0: all."""
    rubric: str
    digest: str
    """Digest of the rubric at submission."""
    items: bytes
    partial: bytes


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The results of all items of a chunk, and their numbers."""

    results: bytes
    num_scored: int
    sum_values: float
    num_unscored: Mapping[str, int]
    """By reason."""

    @property
    def figures(self) -> Mapping[str, int]:
        return {"items_scored": self.num_scored, "items_unscored": sum(self.num_unscored.values())}


class JobStore:
    """The jobs of one namespace. Thread-safe. Data reported as stored are fsynced if Redis is configured to do so.

    Every method raises UnavailableError if Redis is unreachable for `connection.OUTAGE_SECONDS`, EnvironmentLackError
    if it is full, and UnknownJobError for the id of a job that does not exist. For a `caller`, the jobs of
    other owners do not exist either.
    """

    def __init__(self, redis_url: str, config: JobsConfig, stop: threading.Event | None = None) -> None:
        """Once `stop` is set, no call waits for long."""
        assert config.namespace, "the caller fills in the default"
        self.config = config
        self.connection = Connection(redis_url, config.namespace, _JOBS, stop=stop)
        limits = (config.max_unscored_bytes, config.result_bytes)
        self.connection.run("configure", milliseconds(config.retention_seconds), *limits)

    def close(self) -> None:
        self.connection.close()

    def register(self, worker: str) -> int:
        """Registers a worker that has just started. Requeues its predecessor's chunks and returns their number."""
        return int(self.connection.run("register", worker))

    def submit(
        self, key: str, *, rubric: str, priority: int, name: str = "", digest: str = "", owner: str = ""
    ) -> JobRecord:
        """Creates the job of the owner's idempotency key, or returns the existing one, which keeps its name and digest.
        Raises JobExistsError if the key's job has another rubric or priority, and JobLimitError if other jobs have
        reached their limit of stored bytes.
        """
        # Ids sort by age, so the older job's chunk comes first if two chunks have the same place.
        fresh = f"{time.time_ns() // 1000:014x}{uuid.uuid4().hex[:18]}"
        return _job(self.connection.run("submit", fresh, key, rubric, priority, name, digest, owner))

    def add_chunk(self, job_id: str, index: int, num_items: int, items: bytes) -> tuple[bool, JobRecord]:
        """Stores a chunk once. Returns False if there is no room yet; see `has_room`. Raises JobError if the job takes
        no more chunks, DataError if a chunk before this one is missing, and JobLimitError if the results of this job,
        or of all that have not ended, have reached their limit.
        """
        stored, job = self.connection.run("add_chunk", _checked_id(job_id), index, num_items, items)
        return bool(stored), _job(job)

    def has_room(self, job_id: str, num_bytes: int) -> tuple[bool, JobRecord]:
        """Whether a chunk of that size has room now, or the job takes no more chunks."""
        room, job = self.connection.run("wait_for_room", _checked_id(job_id), num_bytes)
        return bool(room), _job(job)

    def seal(self, job_id: str, num_chunks: int) -> JobRecord:
        """Marks the job as complete: no more chunks follow. It ends when all chunks have results. Raises JobError if it
        is cancelled, and DataError if another number of chunks is stored.
        """
        return _job(self.connection.run("seal", _checked_id(job_id), num_chunks))

    def claim(self, worker: str, lease_seconds: float, timeout_seconds: float) -> ChunkClaim | None:
        """Waits for the next chunk and leases it; None at the timeout. Jobs of a priority take turns, item by item."""

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
        """Saves the results so far and how many units are scored next (`ChunkClaim.under_way`), in case the holder
        dies. `cleared`: the items that killed earlier holders are scored. Returns False if the lease is not current.
        """
        arguments = (claim.job_id, claim.index, claim.token, partial, under_way, int(cleared))
        return bool(self.connection.run("save", *arguments))

    def give_back(self, claim: ChunkClaim, *, attempts: int, partial: bytes, pause_seconds: float) -> bool:
        """Ends the lease and requeues the chunk after a pause. Returns False if the lease is not current."""
        arguments = (claim.job_id, claim.index, claim.token, attempts, partial, milliseconds(pause_seconds))
        return bool(self.connection.run("give_back", new_request(), *arguments))

    def complete(self, claim: ChunkClaim, result: ChunkResult) -> bool:
        """Stores the results of a chunk and ends its lease. Returns False, and stores nothing, if it is not current.

        If jobs then store too many bytes, results of other ended jobs are deleted. Raises LedgerError if the numbers do
        not add up to the items of the chunk.
        """
        reasons = [part for reason in result.num_unscored.items() for part in reason]
        numbers = (result.num_scored, repr(result.sum_values), *reasons)
        arguments = (claim.job_id, claim.index, claim.token, result.results, *numbers)
        return bool(self.connection.run("complete", new_request(), *arguments))

    def cancel(self, job_id: str, caller: str = EVERYBODY) -> JobRecord:
        """Cancels a job: its items without a result become `cancelled`. A job that has ended is left as it is."""
        return _job(self.connection.run("cancel", _checked_id(job_id), caller))

    def delete(self, job_id: str, caller: str = EVERYBODY) -> JobRecord:
        """Deletes a job with its results and its key. Returns its last state, also if repeated within a minute. Raises
        JobError if it has not ended.
        """
        return _job(self.connection.run("delete", _checked_id(job_id), caller))

    def events(
        self, job_id: str, after_cursor: int, max_bytes: int, caller: str = EVERYBODY
    ) -> tuple[JobRecord, list[bytes]]:
        """The job and its results after a cursor: up to `max_bytes`, but one if there are any. 0: only the job. Raises
        JobError if its results were deleted.
        """
        job, results = self.connection.run("events", _checked_id(job_id), after_cursor, max_bytes, caller)
        return _job(job), list(results)

    def list_jobs(self, limit: int, caller: str = EVERYBODY) -> list[JobRecord]:
        """The newest jobs, newest first."""
        return [_job(reply) for reply in self.connection.run("list", limit, caller)]

    def counts(self) -> dict[str, float]:
        """Jobs, chunks waiting and leased, bytes of items and of results, and sums over the life of the namespace."""
        reply = self.connection.run("counts")
        return {name.decode(): float(figure) for name, figure in zip(reply[::2], reply[1::2], strict=True)}


def _checked_id(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise UnknownJobError(f"there is no job {job_id!r:.80}; a job_id has 32 hexadecimal digits")
    return job_id


def _job(reply: Sequence[bytes]) -> JobRecord:
    fields = {name.decode(): value.decode() for name, value in zip(reply[::2], reply[1::2], strict=True)}
    reasons = {name.removeprefix("unscored:"): n for name, n in fields.items() if name.startswith("unscored:")}
    times = {f"{event}_at": int(fields[f"{event}_ms"]) / 1000 for event in ("created", "finished", "expires")}
    return _READ_JOB({**fields, **times, "num_unscored": reasons})


def _claim(reply: Sequence[Any]) -> ChunkClaim:
    *values, partial = reply
    return _READ_CLAIM(dict(zip(ChunkClaim.__dataclass_fields__, [*values, partial or b""], strict=True)))


# They convert texts and bytes to the types of the fields.
_READ_JOB = TypeAdapter(JobRecord).validate_python
_READ_CLAIM = TypeAdapter(ChunkClaim).validate_python
