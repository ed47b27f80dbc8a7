"""Limits of requests, and the reply of ListScorers, which names them."""

from __future__ import annotations

from dataclasses import asdict

from tandem.protos import reward_pb2
from tandem.reward.config import RewardConfig
from tandem.reward.scoring import ScoringCore
from tandem.reward.text.values import MAX_ACCEPTED
from tandem.services.config.jobs import JobsConfig
from tandem.services.reward.wire import MAX_DEPTH, MAX_ITEMS, MAX_REQUEST_BYTES
from tandem.services.rpc.limits import MAX_CALLS

MAX_RUBRIC_BYTES = 64 << 10
MAX_KEY_BYTES = 200
MAX_NAME_BYTES = 200
MOST_PRIORITY = 100
"""Priorities go from minus this to this."""
MAX_LISTED_JOBS = 1000
DEADLINE_MARGIN_SECONDS = 1.0
"""A call replies this long before its deadline, or a tenth of its time before it if that is less."""
REQUESTS_PER_STREAM = 8
"""Requests of a ScoreStream that are scored at once. It reads no more than these."""


def scorer_list(core: ScoringCore, reward: RewardConfig, jobs: JobsConfig) -> reward_pb2.ListScorersReply:
    """The scorers that a rubric may name, the limits, and the service's own rubric. The same for a service's life."""
    reply = reward_pb2.ListScorersReply
    limits: dict[str, float] = {
        "max_items_per_request": MAX_ITEMS,
        "max_request_bytes": MAX_REQUEST_BYTES,
        "max_rubric_bytes": MAX_RUBRIC_BYTES,
        "max_json_depth": MAX_DEPTH,
        "max_accepted_answers": MAX_ACCEPTED,
        "max_requests_per_stream": REQUESTS_PER_STREAM,
        "max_calls": MAX_CALLS,
        "max_listed_jobs": MAX_LISTED_JOBS,
        "max_unscored_bytes": jobs.max_unscored_bytes,
        "max_unscored_bytes_per_job": jobs.max_unscored_bytes // 2,
        "max_result_bytes": jobs.result_bytes,
        "max_result_bytes_per_job": jobs.result_bytes // 2,
        "deadline_margin_seconds": DEADLINE_MARGIN_SECONDS,
        "infrastructure_attempts": reward.infrastructure_attempts,
        "retention_seconds": jobs.retention_seconds,
        "timeout_seconds": reward.timeout_seconds,
        "cpu_seconds": reward.cpu_seconds,
        "memory_bytes": reward.limits.memory_bytes,
        "processes": reward.limits.processes,
        "open_files": reward.limits.open_files,
        "output_bytes": reward.limits.output_bytes,
        "num_workers": reward.num_workers,
    }
    scorers = [reply.ScorerInfo(**asdict(info)) for info in core.scorers()]
    return reply(scorers=scorers, limits=limits, default_rubric=core.default.text)
