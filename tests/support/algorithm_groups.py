"""Groups that exercise every algorithm: greedy answers, components, token rewards, several segments, tool output."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.protos.types import ScoredTrajectory, Segment, TrajectoryGroup
from tests.support.training_groups import make_group, with_tool_output


@functools.cache
def plain_policy(model: Path) -> PreTrainedModel:
    """The policy that a run starts from, in plain transformers."""
    return AutoModelForCausalLM.from_pretrained(model).eval()


@functools.cache  # hundreds of learners share the same few batches
def groups_of(
    version: int, policy: PreTrainedModel, *, num_groups: int = 4, num_samples: int = 4
) -> tuple[TrajectoryGroup, ...]:
    """The groups of the batch that makes `version`, with log-probs close to the policy's."""
    groups = []
    versions = (max(0, version - 2), version - 1)
    for index in range(num_groups):
        group = make_group(
            index, seed=version, num_samples=num_samples, versions=versions, baseline=True, num_segments=1 + index % 2
        )
        if index < 2:
            group = with_tool_output(group)
        rows = [_enriched(row, number, policy) for number, row in enumerate(group.scored_rows)]
        groups.append(replace(group, rows=tuple(rows)))
    return tuple(groups)


def _enriched(row: ScoredTrajectory, number: int, policy: PreTrainedModel) -> ScoredTrajectory:
    segments = tuple(_sampled_nearby(one, number, policy) for one in row.trajectory.segments)
    token_rewards = tuple(
        (0.1 * one.loss_mask * (np.arange(len(one.ids)) % 3 == 0)).astype(np.float32) for one in segments
    )
    assert row.reward is not None
    return replace(
        row,
        trajectory=replace(
            row.trajectory,
            segments=segments,
            finish_reason="length" if number == 1 else "stop",
            token_rewards=token_rewards,
        ),
        breakdown={"format": float(number % 2), "right": row.reward},
    )


@torch.no_grad()
def _sampled_nearby(segment: Segment, number: int, policy: PreTrainedModel) -> Segment:
    """The segment with the initial policy's log-probs plus noise, which is large in odd rows."""
    ids = torch.tensor(segment.ids, dtype=torch.long)
    logprobs = torch.zeros(len(ids))
    logprobs[1:] = policy(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    noise = (0.3 if number % 2 else 0.001) * np.sin(np.arange(len(ids)))
    return replace(segment, behavior_logprobs=(segment.loss_mask * (logprobs.numpy() + noise)).astype(np.float32))
