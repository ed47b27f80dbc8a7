"""Changes what a run has recorded, as a faulty sampler or environment would."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tandem.protos.codec import EncodedGroups, decode_group, encode_group
from tandem.protos.types import Segment, Trajectory
from tandem.trainer.batch.record import read_record, record_folder, write_record


def tamper(run_folder: Path, change: Callable[[Trajectory], Trajectory]) -> str:
    """Changes the last trajectory of the first batch. Returns its name, as in messages."""
    batch, payloads = read_record(run_folder, 1)
    group_id = batch.group_ids[-1]
    group = decode_group(payloads[group_id])
    *others, last = group.scored_rows
    changed = replace(group, rows=(*others, replace(last, trajectory=change(last.trajectory))))
    shutil.rmtree(record_folder(run_folder, 1))
    write_record(run_folder, batch, EncodedGroups.of({**payloads, group_id: encode_group(changed)}))
    return f"batch 1, group {group_id}, trajectory {last.trajectory.trajectory_id}"


def with_last_segment(row: Trajectory, change: Callable[[Segment], Segment]) -> Trajectory:
    return replace(row, segments=(*row.segments[:-1], change(row.segments[-1])))


def other_last_token(segment: Segment) -> Segment:
    """A segment whose last token is another one, with the same log-prob."""
    ids = segment.ids.copy()
    ids[-1] = ids[-1] - 1 if ids[-1] else 1
    return replace(segment, ids=ids)


def other_first_logprob(segment: Segment) -> Segment:
    """A segment whose first sampled token has a log-prob that is 0.001 less."""
    logprobs = segment.behavior_logprobs.copy()
    logprobs[segment.num_prompt_tokens] -= 1e-3
    return replace(segment, behavior_logprobs=logprobs)
