"""What a ring is simulated with: the sizes of its groups, the seconds that its work takes, and its setting."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupSize:
    """The tokens of one group."""

    prompt_tokens: int
    """With those of tool results."""
    answer_tokens: tuple[int, ...]
    """Sampled tokens of each answer."""
    shared_tokens: int = 0
    """Of `prompt_tokens`, those that the trainer computes once for all answers, and not for each of them."""

    @property
    def trained_tokens(self) -> int:
        """Those that the trainer computes, without padding."""
        own_tokens = self.prompt_tokens - self.shared_tokens
        return self.shared_tokens + own_tokens * len(self.answer_tokens) + sum(self.answer_tokens)


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds that work takes. A sampler's step lasts `step_seconds + row_seconds · rows in flight` and samples one
    token of each row. A batch takes the trainer `batch_seconds + token_seconds · tokens`.
    """

    step_seconds: float
    row_seconds: float
    batch_seconds: float
    token_seconds: float
    publish_seconds: float = 0.0
    """The trainer stands still for so long to publish a version."""
    publication_seconds: float = 0.0
    """A version then takes so long to reach the samplers, beside the training of the next one."""
    stall_seconds: float = 0.0
    """Samplers stand still for so long at each update."""
    score_seconds: float = 0.0
    """One reward service scores a group in so long, one group after the other."""
    evaluation_seconds: float = 0.0
    """The trainer waits so long for an evaluation, before it publishes the next version."""
    output_seconds: float = 0.0
    """A checkpoint or an export."""
    rejected_fraction: float = 0.0
    """Share of the scored groups that selection drops."""
    trainer_processors: float = 0.0
    """Processors that the trainer keeps busy while it works."""
    sampler_processors: float = 0.0
    """Processors that a sampler and the reward service keep busy while it samples."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A ring to simulate."""

    groups_per_batch: int
    staleness_budget: int
    samplers: int = 1
    groups_in_flight: int = 16
    """Groups that a sampler holds at most."""
    scorers: int = 1
    evaluate_every: int = 0
    output_every: int = 0
    processors: float = math.inf
    """Of the machine on which all of them run; infinite if they run on several."""
    total_groups: float = math.inf
    """Groups of the whole run, without those that selection drops; infinite for a run without an end."""

    @property
    def credits(self) -> int:
        return (self.staleness_budget + 1) * self.groups_per_batch
