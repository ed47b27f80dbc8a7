"""Configuration of the reward service."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DeclaredScorer(BaseModel):
    """A scorer under a name of its own: what a rubric cannot say, or what clients must not: import paths, folders,
    addresses, keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scorer: str
    """A built-in scorer, or `module.path:function` / `file.py:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""


class LimitsConfig(BaseModel):
    """What scoring one answer may take in a worker process; past it the answer is unscored (`limit`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    memory_bytes: Annotated[int, Field(ge=64 << 20)] = 4 << 30
    """Private memory of a worker process, and of each process it starts."""
    cpu_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """Processor time of one answer, all threads together; 0 is reward.timeout_seconds."""
    processes: Annotated[int, Field(ge=0)] = 32
    """Processes a scorer may have started at a time."""
    open_files: Annotated[int, Field(ge=16)] = 256
    """Files a worker process may have open."""
    output_bytes: Annotated[int, Field(ge=0)] = 1 << 20
    """What a scorer may print while it judges one answer."""


class RewardConfig(BaseModel):
    """`[reward]`: which scorer judges the answers, and what happens when it cannot."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scorer: str = "exact"
    """A built-in scorer (docs/reward.md has them all), one of `scorers`, or `module.path:function` / `file.py:function`
    with verl's `compute_score` signature.
    """
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the scorer, e.g. `{tolerance = 1e-6}` or `{pattern = '#### (-?\\d+)'}`."""
    rubric: str = ""
    """TOML file that composes several scorers, in place of `scorer` and `arguments`."""
    scorers: dict[str, DeclaredScorer] = Field(default_factory=dict)
    """Scorers by names of their own, each with `scorer` and `arguments`, for rubrics: a client of the service may use
    these and the built-in ones that need neither folder nor address, and can name no import path, file or folder
    itself.
    """
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Worker processes that score side by side."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 10.0
    """Longest time one answer may take in a worker; past it the answer is unscored (`timeout`), never 0."""
    limits: LimitsConfig = LimitsConfig()
    """What else an answer may take in a worker."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts at a group with rows whose scorer hung or crashed before they keep their reason."""
    infrastructure_attempts: Annotated[int, Field(ge=1)] = 10
    """Attempts at a group's rows, or a job's items, whose scorer is out of reach, with pauses that grow from 0.5 s to
    30 s, before they keep that reason.
    """
    min_scored_samples: Annotated[int, Field(ge=0)] = 0
    """Scored rows a group needs to go on once the attempts are spent; 0 means all of them. A greedy answer to compare
    with is not among them, and always needed where there is one.
    """
    lease_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """How long a claimed group stays this service's without a renewal."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """gRPC port; 0 picks a free one."""

    @model_validator(mode="after")
    def _one_source_of_rewards(self) -> RewardConfig:
        if self.rubric and (self.scorer != "exact" or self.arguments):
            raise ValueError("rubric and scorer exclude one another: name the scorer in the rubric's components")
        return self

    @property
    def cpu_seconds(self) -> float:
        """Processor time of one answer."""
        return self.limits.cpu_seconds or self.timeout_seconds
