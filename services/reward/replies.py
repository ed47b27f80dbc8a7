"""Jobs as messages for clients."""

from __future__ import annotations

from tandem.protos import reward_pb2
from tandem.services.reward.jobs.store import JobRecord


def job_message(job: JobRecord) -> reward_pb2.Job:
    """A job for a client."""
    return reward_pb2.Job(
        job_id=job.job_id,
        idempotency_key=job.idempotency_key,
        name=job.name,
        state=job.state,
        priority=job.priority,
        num_items=job.num_items,
        num_scored=job.num_scored,
        num_unscored=job.num_unscored,
        num_waiting=job.num_waiting,
        mean_value=job.sum_values / job.num_scored if job.num_scored else 0.0,
        created_at=job.created_at,
        finished_at=job.finished_at,
        expires_at=job.expires_at,
        result_bytes=job.result_bytes,
    )


def submit_reply(job: JobRecord) -> reward_pb2.SubmitJobReply:
    """A job for the client that submits it, with the index of the next chunk."""
    return reward_pb2.SubmitJobReply(job=job_message(job), next_chunk=job.num_chunks)
