"""Generated scored groups for the tests of learning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tandem.protos.codec import encode_group
from tandem.protos.row_headers import group_headers
from tandem.protos.types import (
    Packing,
    Prompt,
    Role,
    SamplingMask,
    SamplingParameters,
    ScoredTrajectory,
    Segment,
    TrainBatch,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from tandem.trainer.batch.planning import plan_batch
from tandem.trainer.checkpoints.state import STATE_FILE, checkpoint_folder

NUM_TOKENS_KNOWN = 98  # ids above the special tokens of tests.support.tiny_model


def make_segment(
    random: np.random.Generator, prompt_ids: np.ndarray, num_sampled: int, versions: Sequence[int]
) -> Segment:
    """A prompt and `num_sampled` random tokens after it; the versions have spans of about equal length."""
    length = len(prompt_ids) + num_sampled
    loss_mask = np.zeros(length, np.uint8)
    loss_mask[len(prompt_ids) :] = 1
    logprobs = np.where(loss_mask, -random.exponential(3.0, length), 0.0).astype(np.float32)
    starts = np.linspace(len(prompt_ids), length, len(versions), endpoint=False).astype(int)
    spans = tuple(VersionSpan(int(start), 1, version) for start, version in zip(starts, versions, strict=True))
    ids = np.concatenate([prompt_ids, random.integers(3, NUM_TOKENS_KNOWN, num_sampled)]).astype(np.int32)
    return Segment(ids, logprobs, loss_mask, spans)


def make_group(
    index: int,
    *,
    num_samples: int = 4,
    seed: int = 0,
    versions: Sequence[int] = (0,),
    temperature: float = 1.0,
    max_sampled: int = 12,
    num_segments: int = 1,
    rewards: Sequence[float | None] | None = None,
    baseline: bool = False,
) -> TrajectoryGroup:
    """A scored group. `rewards` None draws 0 or 1, and a None inside is an unscored row. `baseline` adds an untrained
    greedy row, whose reward is drawn unless `rewards` has one more.
    """
    random = np.random.default_rng([seed, index])
    sampling = SamplingParameters(temperature=temperature, max_tokens=max_sampled)
    prompt_ids = random.integers(3, NUM_TOKENS_KNOWN, random.integers(2, 8)).astype(np.int32)
    rows = []
    for number in range(num_samples + baseline):
        lengths = random.integers(1, max_sampled + 1, num_segments)
        segments = tuple(make_segment(random, prompt_ids, int(length), versions) for length in lengths)
        role: Role = "baseline" if number == num_samples else "policy"
        drawn = sampling.greedy if role == "baseline" else sampling
        trajectory = Trajectory(number, role, segments, "stop", "", drawn)
        reward = float(random.integers(0, 2)) if rewards is None or number >= len(rewards) else rewards[number]
        rows.append(ScoredTrajectory(trajectory, reward, {}, None if reward is not None else "timeout"))
    return TrajectoryGroup(Prompt(0, index, prompt_ids, num_samples, sampling), tuple(rows))


def with_tool_output(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group as if a tool had answered after every second sampled token except an answer's last."""
    random = np.random.default_rng(len(group.rows))
    rows = [
        replace(
            row,
            trajectory=replace(row.trajectory, segments=tuple(_with_gaps(random, s) for s in row.trajectory.segments)),
        )
        for row in group.scored_rows
    ]
    return replace(group, rows=tuple(rows))


def _with_gaps(random: np.random.Generator, segment: Segment) -> Segment:
    sampled = np.flatnonzero(segment.loss_mask)
    after = sampled[1:-1:2] + 1  # one to four tokens of output before each of these positions
    after = np.repeat(after, random.integers(1, 5, len(after)))
    spans = tuple(
        replace(one, first_token=one.first_token + int((after < one.first_token).sum())) for one in segment.spans
    )
    output = random.integers(3, NUM_TOKENS_KNOWN, len(after)).astype(np.int32)
    return Segment(
        np.insert(segment.ids, after, output),
        np.insert(segment.behavior_logprobs, after, 0.0),
        np.insert(segment.loss_mask, after, 0),
        spans,
    )


def with_sampling_masks(group: TrajectoryGroup, top_k: int = 5) -> TrajectoryGroup:
    """The group as if sampled with top-k: each sampled token's mask has it and random other tokens."""
    random = np.random.default_rng(top_k)

    def masked(segment: Segment) -> Segment:
        counts = np.where(segment.loss_mask, random.integers(1, top_k + 1, len(segment.ids)), 0).astype(np.int32)
        kept = [
            np.append(random.choice(np.delete(np.arange(NUM_TOKENS_KNOWN), token), count - 1, replace=False), token)
            for token, count in zip(segment.ids, counts, strict=True)
            if count
        ]
        return replace(segment, sampling_mask=SamplingMask(np.concatenate(kept).astype(np.int32), counts))

    rows = []
    for row in group.scored_rows:
        sampling = replace(row.trajectory.sampling, top_k=top_k)
        segments = tuple(masked(segment) for segment in row.trajectory.segments)
        rows.append(replace(row, trajectory=replace(row.trajectory, sampling=sampling, segments=segments)))
    return replace(group, rows=tuple(rows))


def with_broken_row(group: TrajectoryGroup, *, row: int = 0, value: float = math.nan) -> TrajectoryGroup:
    """The group with `value` as the sampler's log-prob of a row's first sampled token."""
    rows = list(group.scored_rows)
    first, *others = rows[row].trajectory.segments
    logprobs = first.behavior_logprobs.copy()
    logprobs[np.flatnonzero(first.loss_mask)[0]] = value
    segments = (replace(first, behavior_logprobs=logprobs), *others)
    rows[row] = replace(rows[row], trajectory=replace(rows[row].trajectory, segments=segments))
    return replace(group, rows=tuple(rows))


def make_batch(
    groups: Iterable[TrajectoryGroup],
    *,
    policy_version: int = 1,
    world_size: int = 1,
    tokens_per_micro_batch: int = 128,
    optimizer_steps: int = 1,
    packing: Packing = "padded",
) -> tuple[TrainBatch, dict[str, TrajectoryGroup]]:
    """The groups as a planned batch, and the groups by id."""
    by_id = {group.group_id: group for group in groups}
    batch = plan_batch(
        [header for group in by_id.values() for header in group_headers(group)],
        list(by_id),
        policy_version=policy_version,
        incarnation=1,
        world_size=world_size,
        tokens_per_micro_batch=tokens_per_micro_batch,
        optimizer_steps=optimizer_steps,
        packings=(packing,),
    )
    return batch, by_id


def make_payloads(groups: Iterable[TrajectoryGroup]) -> dict[str, bytes]:
    """The groups as the buffer stores them."""
    return {group.group_id: encode_group(group) for group in groups}


def write_states(checkpoints: Path, names: Iterable[tuple[int, int]]) -> list[Path]:
    """Makes the folder `checkpoints` hold one without weights for each version and incarnation. Returns their
    `state.json`.
    """
    states = [checkpoint_folder(checkpoints, version, incarnation) / STATE_FILE for version, incarnation in names]
    for state in states:
        state.parent.mkdir(parents=True)
        state.write_text("{}")
    return states
