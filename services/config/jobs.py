"""Configuration of durable reward jobs and of the standalone reward service. Imports neither grpc nor redis."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tandem.protos.options import Options
from tandem.reward.config import RewardConfig


class JobsConfig(Options):
    """`[jobs]`: where the reward jobs of clients are kept, for how long, and how many bytes of them."""

    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    """Services with the same namespace on one Redis share their jobs. Default: the run's id, or `reward` for a
    standalone service.
    """
    max_unscored_bytes: Annotated[int, Field(ge=1 << 25)] = 1 << 28
    """Bytes of items that wait for a score; above this limit, submission waits. One job may use half of it."""
    max_result_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of results that are kept; above this limit, ended jobs lose their results (`expired`), in the order in
    which they ended. One job may use half of it. 0: twice max_unscored_bytes.
    """
    retention_seconds: Annotated[float, Field(gt=0.0)] = 604800.0
    """Time for which the results of an ended job are kept; then the job and its idempotency key are deleted."""

    @property
    def result_bytes(self) -> int:
        """`max_result_bytes`, or its default."""
        return self.max_result_bytes or 2 * self.max_unscored_bytes

    @property
    def redis_bytes(self) -> int:
        """Bytes that jobs may take in Redis: waiting items and kept results."""
        return self.max_unscored_bytes + self.result_bytes

    def in_namespace(self, default: str) -> JobsConfig:
        """A copy with the default namespace filled in."""
        return self.model_copy(update={"namespace": self.namespace or default})


class ServiceConfig(Options):
    """Configuration of `tandem reward serve`: the sections of a recipe that concern scoring."""

    reward: RewardConfig = RewardConfig()
    jobs: JobsConfig = JobsConfig()
