"""Configuration of durable reward jobs, and of the reward service that stands alone. Imports no grpc and no redis."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tandem.reward.config import RewardConfig


class JobsConfig(BaseModel):
    """`[jobs]`: reward jobs that clients submit: where they are kept, for how long, and how many bytes of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    """Services with the same namespace on one Redis share its jobs; default: the run's id, `reward` for a service that
    stands alone.
    """
    max_unscored_bytes: Annotated[int, Field(ge=1 << 25)] = 1 << 28
    """Items waiting for their score; above it submission waits. One job may fill half of it."""
    max_result_bytes: Annotated[int, Field(ge=0)] = 0
    """Results kept; above it jobs that have ended give up theirs (`expired`), the first to end first. One job may fill
    half of it.
    0: twice max_unscored_bytes.
    """
    retention_seconds: Annotated[float, Field(gt=0.0)] = 604800.0
    """How long the results of a job that has ended are kept; then job and idempotency key are forgotten."""

    @property
    def result_bytes(self) -> int:
        """`max_result_bytes`, derived if it is not given."""
        return self.max_result_bytes or 2 * self.max_unscored_bytes

    @property
    def redis_bytes(self) -> int:
        """What jobs may take in Redis: items that wait, and results that are kept."""
        return self.max_unscored_bytes + self.result_bytes

    def in_namespace(self, default: str) -> JobsConfig:
        """The same with the default filled in."""
        return self.model_copy(update={"namespace": self.namespace or default})


class ServiceConfig(BaseModel):
    """What `tandem reward serve` reads: the sections of a recipe that concern scoring."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    reward: RewardConfig = RewardConfig()
    jobs: JobsConfig = JobsConfig()
