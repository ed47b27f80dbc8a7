"""Configuration of the reward service."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class RewardConfig(BaseModel):
    """`[reward]`: which scorer judges the answers, and what happens when it cannot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scorer: str = "exact"
    """`exact`, `regex`, `numeric`, or `module.path:function` / `file.py:function` with verl's `compute_score` signature."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the scorer, e.g. `{tolerance = 1e-6}` or `{pattern = '#### (-?\\d+)'}`."""
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Worker processes that score side by side."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 10.0
    """Longest time one answer may take; past it the answer is unscored (`timeout`), never 0."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts at a group with unscored rows before they keep their reason."""
    min_scored_samples: Annotated[int, Field(ge=0)] = 0
    """Scored rows a group needs to go on once the attempts are spent; 0 means all of them. A greedy answer to compare with is not
    among them, and always needed where there is one."""
    lease_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """How long a claimed group stays this service's without a renewal."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """gRPC port; 0 picks a free one."""
