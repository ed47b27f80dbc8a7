"""Shared by the reward service's tests: groups to score, and the scored groups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.types import Prompt, SamplingParameters, Segment, Trajectory, TrajectoryGroup, VersionSpan
from tandem.services.buffer.buffer import Buffer
from tests.support.redis_ring import claim, new_run

SAMPLING = SamplingParameters(max_tokens=4)


def trajectory(number: int, text: str, *, earned: float = 0.0, **more: Any) -> Trajectory:
    segment = Segment(
        np.array([1, 2, 3], np.int32),
        np.array([0, -1, -2], np.float32),
        np.array([0, 1, 1], np.uint8),
        (VersionSpan(1, 1, 0),),
    )
    fields = {"role": "policy", "finish_reason": "stop", "sampling": SAMPLING, "earned_reward": earned, **more}
    return Trajectory(trajectory_id=number, segments=(segment,), text=text, **fields)


def generate(buffer: Buffer, groups: Sequence[Sequence[Trajectory]]) -> list[str]:
    """Admits and samples groups; the ground truth is "1"."""
    first = buffer.admission().cursor
    prompts = [
        Prompt(
            0,
            first + n,
            np.array([1], np.int32),
            len(rows),
            SAMPLING,
            data_source="d",
            ground_truth="1",
            extra_info={"n": n},
        )
        for n, rows in enumerate(groups)
    ]
    assert buffer.admit([(p.group_id, b"") for p in prompts], first + len(groups)) == len(groups)
    by_id = {p.group_id: TrajectoryGroup(p, tuple(rows)) for p, rows in zip(prompts, groups, strict=True)}
    for one in claim(buffer, "prompts", len(groups)):
        assert buffer.complete(one, encode_group(by_id[one.group_id]))
    return list(by_id)


def answers(*texts: str) -> list[Trajectory]:
    return [trajectory(number, text) for number, text in enumerate(texts)]


def collect(buffer: Buffer, number: int, seconds: float = 20.0) -> dict[str, TrajectoryGroup]:
    """The next `count` scored groups by id."""
    incarnation = buffer.begin_incarnation()
    found: dict[str, TrajectoryGroup] = {}
    deadline = time.monotonic() + seconds
    while len(found) < number:
        assert time.monotonic() < deadline, f"{len(found)} of {number} groups: {buffer.counts()}"
        for one in buffer.claim_scored(incarnation, number - len(found), 1.0):
            group = decode_group(buffer.read([one.group_id])[0])
            assert [header.reward for header in one.headers] == [row.reward for row in group.scored_rows]
            found[one.group_id] = group
    return found


def rewards(group: TrajectoryGroup) -> list[float | None]:
    return [row.reward for row in group.scored_rows]


def run_of(redis_url: str, **options: int) -> Buffer:
    return new_run(redis_url, **{"groups_per_batch": 20, "infrastructure": 3, "data": 3, **options})
