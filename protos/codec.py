"""TrajectoryGroup ⇄ Arrow: one record batch per group, one row per segment, sent and stored as IPC stream bytes.

The schema's metadata holds the prompt and the schema version. A reader needs only pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tandem.protos.errors import DataError, SchemaVersionError
from tandem.protos.row_headers import span_values
from tandem.protos.types import (
    Prompt,
    SamplingMask,
    SamplingParameters,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
    version_span,
)

SCHEMA_VERSION = 2
"""Version 1 has no sampling masks."""
VERSION_KEY = b"tandem.schema_version"
PROMPT_KEY = b"tandem.prompt"

_REWARDS = pa.list_(pa.float32())
_MASK = pa.list_(pa.list_(pa.int32()))
_SPAN = pa.struct([("first_token", pa.int32()), ("incarnation", pa.int64()), ("policy_version", pa.int64())])
SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.int32(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("role", pa.string(), nullable=False),
        pa.field("ids", pa.list_(pa.int32()), nullable=False),
        pa.field("behavior_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("spans", pa.list_(_SPAN), nullable=False),
        pa.field("sampling", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("earned_reward", pa.float64(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
        pa.field("scored", pa.bool_(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("breakdown", pa.string(), nullable=False),
        pa.field("unscored_reason", pa.string()),
        pa.field("unscored_detail", pa.string(), nullable=False),
        pa.field("token_rewards", _REWARDS),
        pa.field("sampling_mask", _MASK),
    ]
)


_FIELDS = tuple(SCHEMA)
_PLACES = {name: place for place, name in enumerate(SCHEMA.names)}
_NOTHING = ("", "{}", None)
"""Values of a column without any content."""
_NO_ROWS = pa.RecordBatch.from_pydict({name: [] for name in SCHEMA.names}, schema=SCHEMA)
_END_OF_STREAM = bytes.fromhex("ffffffff00000000")


def encode_group(group: TrajectoryGroup) -> bytes:
    """Encodes the group as an Arrow IPC stream of one record batch."""
    return batch_to_payload(group_to_batch(group))


def batch_to_payload(batch: pa.RecordBatch) -> bytes:
    """Encodes a group's record batch as an Arrow IPC stream."""
    return b"".join((batch.schema.serialize(), batch.serialize(), _END_OF_STREAM))


def decode_group(payload: bytes) -> TrajectoryGroup:
    """Decodes the output of `encode_group`. Raises SchemaVersionError if a newer Tandem wrote it, and DataError."""
    batch = payload_to_batch(payload)
    return TrajectoryGroup(decode_prompt(_prompt_text(batch)), tuple(row for _, row in _trajectories(batch)))


@dataclass(frozen=True, slots=True)
class EncodedGroups:
    """Several groups in one record batch. Reading a column takes about as long for all of them as for one."""

    batches: Mapping[str, pa.RecordBatch]
    """Of each group, by its id."""
    segments: pa.RecordBatch
    """Of all groups in their order, without metadata."""

    @classmethod
    def of(cls, payloads: Mapping[str, bytes]) -> EncodedGroups:
        """Of at least one payload, by group id. Raises as `decode_group`."""
        batches = {group_id: payload_to_batch(payload) for group_id, payload in payloads.items()}
        return cls(batches, pa.concat_batches([batch.replace_schema_metadata(None) for batch in batches.values()]))

    @property
    def prompts(self) -> list[str]:
        """Of each group, as JSON."""
        return [_prompt_text(batch) for batch in self.batches.values()]

    @property
    def owners(self) -> NDArray[np.int32]:
        """For each segment, the number of its group."""
        return np.repeat(np.arange(len(self.batches), dtype=np.int32), [one.num_rows for one in self.batches.values()])

    def decode(self) -> dict[str, TrajectoryGroup]:
        """The groups by id, in order. Raises DataError if one does not begin with the first segment of a trajectory."""
        owners = self.owners.tolist()
        rows: list[list[Trajectory | ScoredTrajectory]] = [[] for _ in self.batches]
        begun = set()
        for first_segment, row in _trajectories(self.segments):
            rows[owners[first_segment]].append(row)
            begun.add(first_segment)
        if not begun.issuperset(np.flatnonzero(np.diff(owners, prepend=-1)).tolist()):
            raise DataError("the first segment of a group's payload is not the first one of a trajectory")
        groups = (TrajectoryGroup(decode_prompt(text), tuple(of)) for text, of in zip(self.prompts, rows, strict=True))
        return dict(zip(self.batches, groups, strict=True))


def _prompt_text(batch: pa.RecordBatch) -> str:
    text: bytes = batch.schema.metadata[PROMPT_KEY]
    return text.decode()


def payload_to_batch(payload: bytes) -> pa.RecordBatch:
    """The record batch of an encoded group, whose rows are not decoded. Raises as `decode_group`."""
    try:
        with pa.ipc.open_stream(payload) as reader:
            check_schema_version(reader.schema.metadata)
            return _in_newest_schema(reader.read_next_batch())
    except (pa.ArrowInvalid, pa.ArrowSerializationError, OSError, StopIteration) as error:
        raise DataError(
            f"group payload of {len(payload)} bytes is not an Arrow stream of one group: {error}"
        ) from error


def _in_newest_schema(batch: pa.RecordBatch) -> pa.RecordBatch:
    metadata = batch.schema.metadata
    if int(metadata[VERSION_KEY]) == SCHEMA_VERSION:
        return batch
    columns = {**dict(zip(batch.schema.names, batch.columns, strict=True)), "sampling_mask": [None] * batch.num_rows}
    return _record_batch(columns, SCHEMA.with_metadata({**metadata, VERSION_KEY: str(SCHEMA_VERSION).encode()}))


def check_schema_version(metadata: Mapping[bytes, bytes] | None) -> None:
    """Refuses a payload that has no schema version or a newer one than this software knows."""
    text = (metadata or {}).get(VERSION_KEY)
    if text is None:
        raise DataError("group payload carries no tandem.schema_version; it was not written by Tandem")
    if int(text) > SCHEMA_VERSION:
        raise SchemaVersionError(
            f"group payload has schema version {int(text)}, this software reads up to {SCHEMA_VERSION}: update Tandem"
        )


def group_to_batch(group: TrajectoryGroup) -> pa.RecordBatch:
    """A record batch of one row per segment. The metadata holds prompt and schema version. Only the first segment of a
    trajectory has its text and its metadata.
    """
    metadata = {VERSION_KEY: str(SCHEMA_VERSION).encode(), PROMPT_KEY: encode_prompt(group.prompt).encode()}
    if not group.rows:
        return _NO_ROWS.replace_schema_metadata(metadata)
    rows: list[tuple[Trajectory, ScoredTrajectory | None, int, Segment]] = []
    for row in group.rows:
        trajectory, scored = (row.trajectory, row) if isinstance(row, ScoredTrajectory) else (row, None)
        assert trajectory.segments, "a trajectory has at least one segment"
        rows.extend((trajectory, scored, number, segment) for number, segment in enumerate(trajectory.segments))
    segments = [segment for _, _, _, segment in rows]
    lengths = [len(segment.ids) for segment in segments]
    columns = {
        "trajectory_id": _repeated("trajectory_id", tuple(t.trajectory_id for t, _, _, _ in rows)),
        "segment": _repeated("segment", tuple(number for _, _, number, _ in rows)),
        "role": _repeated("role", tuple(t.role for t, _, _, _ in rows)),
        "ids": _list_array(lengths, [s.ids for s in segments], np.int32),
        "behavior_logprobs": _list_array(lengths, [s.behavior_logprobs for s in segments], np.float32),
        "loss_mask": _list_array(lengths, [s.loss_mask for s in segments], np.uint8),
        "spans": [[*map(span_values, s.spans)] for s in segments],
        "sampling": _repeated("sampling", tuple(_sampling_text(t.sampling) for t, _, _, _ in rows)),
        "finish_reason": _repeated("finish_reason", tuple(t.finish_reason for t, _, _, _ in rows)),
        "text": ["" if number else t.text for t, _, number, _ in rows],
        "earned_reward": pa.array(np.array([t.earned_reward for t, _, _, _ in rows], np.float64)),
        "metadata": ["{}" if number or not t.metadata else json.dumps(dict(t.metadata)) for t, _, number, _ in rows],
        **_score_columns([scored for _, scored, _, _ in rows]),
        "token_rewards": _token_rewards_array([t.token_rewards[n] if t.token_rewards else None for t, _, n, _ in rows]),
        "sampling_mask": _mask_array([s.sampling_mask for s in segments]),
    }
    return _record_batch(columns, SCHEMA.with_metadata(metadata))


def encode_scored(batch: pa.RecordBatch, scored: Sequence[ScoredTrajectory]) -> bytes:
    """Encodes a group's record batch with scores for its trajectories, all of them and in their order."""
    of_segments = [row for row in scored for _ in row.trajectory.segments]
    assert len(of_segments) == batch.num_rows, "every trajectory of the group is scored"
    columns = batch.columns
    for name, values in _score_columns(of_segments).items():
        columns[_PLACES[name]] = _array(SCHEMA.field(name), values)
    return batch_to_payload(pa.RecordBatch.from_arrays(columns, schema=batch.schema))


def _score_columns(rows: Sequence[ScoredTrajectory | None]) -> dict[str, pa.Array | Sequence[object]]:
    """The columns that scoring adds; None for a trajectory that is not scored."""
    return {
        "scored": _repeated("scored", tuple(row is not None for row in rows)),
        "reward": [row.reward if row else None for row in rows],
        "breakdown": [json.dumps(dict(row.breakdown)) if row and row.breakdown else "{}" for row in rows],
        "unscored_reason": _repeated("unscored_reason", tuple(row.unscored_reason if row else None for row in rows)),
        "unscored_detail": [row.unscored_detail if row else "" for row in rows],
    }


@lru_cache(maxsize=1024)  # making an array takes ten times as long as finding one
def _repeated(name: str, values: tuple[object, ...]) -> pa.Array:
    """A column of small values that many groups have alike. Not for floats: 0.0 and −0.0 are one key."""
    return pa.array(values, SCHEMA.field(name).type)


def _record_batch(columns: Mapping[str, pa.Array | Sequence[object]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([_array(field, columns[field.name]) for field in _FIELDS], schema=schema)


def _array(field: pa.Field, values: pa.Array | Sequence[object]) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if values and values[0] in _NOTHING and values.count(values[0]) == len(values):
        return _repeated(field.name, tuple(values))
    return pa.array(values, field.type)


def _trajectories(batch: pa.RecordBatch) -> Iterator[tuple[int, Trajectory | ScoredTrajectory]]:
    """The trajectories of a record batch of segments, each with the number of its first row. A trajectory's segments
    follow one another, and the first one has number 0.
    """
    if not batch.num_rows:
        return
    plain = {name: batch.column(name).to_pylist() for name in _PLAIN_COLUMNS}
    ids, behavior_logprobs, loss_mask = (
        _split(batch.column(name)) for name in ("ids", "behavior_logprobs", "loss_mask")
    )
    spans, masks = _split_spans(batch.column("spans")), _split_masks(batch.column("sampling_mask"))
    rewards = _split_rewards(batch.column("token_rewards"))
    starts = [row for row, number in enumerate(plain["segment"]) if number == 0]
    for start, stop in pairwise([*starts, batch.num_rows]):
        segments = tuple(
            Segment(ids[row], behavior_logprobs[row], loss_mask[row], spans[row], masks[row])
            for row in range(start, stop)
        )
        trajectory = Trajectory(
            trajectory_id=plain["trajectory_id"][start],
            role=plain["role"][start],
            segments=segments,
            finish_reason=plain["finish_reason"][start],
            text=plain["text"][start],
            sampling=_decode_sampling(plain["sampling"][start]),
            earned_reward=plain["earned_reward"][start],
            metadata=_decode_mapping(plain["metadata"][start]),
            token_rewards=tuple(one for one in rewards[start:stop] if one is not None) or None,
        )
        yield start, _scored(trajectory, plain, start) if plain["scored"][start] else trajectory


_ARRAY_COLUMNS = {"ids", "behavior_logprobs", "loss_mask", "spans", "token_rewards", "sampling_mask"}
_PLAIN_COLUMNS = [name for name in SCHEMA.names if name not in _ARRAY_COLUMNS]
"""Read as Python values."""


def _scored(trajectory: Trajectory, plain: Mapping[str, list[Any]], start: int) -> ScoredTrajectory:
    return ScoredTrajectory(
        trajectory=trajectory,
        reward=plain["reward"][start],
        breakdown=_decode_mapping(plain["breakdown"][start]),
        unscored_reason=plain["unscored_reason"][start],
        unscored_detail=plain["unscored_detail"][start],
    )


def _list_array(lengths: Sequence[int], arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> pa.ListArray:
    assert [*map(len, arrays)] == lengths, "all arrays of a segment have its length"
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(np.concatenate(arrays).astype(dtype, copy=False)))


def _token_rewards_array(rewards: Sequence[NDArray[np.float32] | None]) -> pa.Array:
    found = any(each is not None for each in rewards)
    return pa.array(rewards, _REWARDS) if found else pa.nulls(len(rewards), _REWARDS)


def _offsets(lengths: Iterable[int]) -> pa.Array:
    return pa.array(np.fromiter(accumulate(lengths, initial=0), np.int32))


def _split(column: pa.ListArray) -> list[NDArray[Any]]:
    # Views of Arrow's memory are read-only. Groups are never mutated, and computations copy them into tensors.
    values = column.values.to_numpy(zero_copy_only=True)
    return [values[first:last] for first, last in pairwise(column.offsets.to_pylist())]


def _split_rewards(column: pa.ListArray) -> list[NDArray[np.float32] | None]:
    if column.null_count == len(column):
        return [None] * len(column)
    valid = column.is_valid().to_pylist()
    return [values if is_valid else None for values, is_valid in zip(_split(column), valid, strict=True)]


def _split_spans(column: pa.ListArray) -> list[tuple[VersionSpan, ...]]:
    fields = (column.values.field(number).to_numpy().tolist() for number in range(column.values.type.num_fields))
    spans = [*map(version_span, *fields)]
    return [tuple(spans[first:last]) for first, last in pairwise(column.offsets.to_pylist())]


def _mask_array(masks: Sequence[SamplingMask | None]) -> pa.Array:
    found = [mask for mask in masks if mask is not None]
    if not found:
        return pa.nulls(len(masks), _MASK)
    tokens = _offsets([len(mask.counts) if mask is not None else 0 for mask in masks])
    ids = _offsets(np.concatenate([mask.counts for mask in found]))
    values = pa.ListArray.from_arrays(ids, pa.array(np.concatenate([mask.ids for mask in found]), pa.int32()))
    return pa.ListArray.from_arrays(tokens, values, mask=pa.array([mask is None for mask in masks]))


def _split_masks(column: pa.ListArray) -> list[SamplingMask | None]:
    if column.null_count == len(column):
        return [None] * len(column)
    ends = column.values.offsets.to_numpy()
    ids = column.values.values.to_numpy()
    bounds = pairwise(column.offsets.to_numpy())
    return [
        SamplingMask(ids[ends[first] : ends[last]], np.diff(ends[first : last + 1])) if is_valid else None
        for (first, last), is_valid in zip(bounds, column.is_valid().to_pylist(), strict=True)
    ]


def encode_prompt(prompt: Prompt) -> str:
    """The prompt as JSON text. Raises DataError if a field of the dataset row cannot be JSON."""
    fields = {name: getattr(prompt, name) for name in Prompt.__dataclass_fields__}
    fields["token_ids"] = prompt.token_ids.tolist()
    fields["sampling"] = _sampling_json(prompt.sampling)
    fields["messages"] = [dict(message) for message in prompt.messages]
    fields["extra_info"] = dict(prompt.extra_info)
    try:
        return json.dumps(fields)
    except TypeError as error:
        raise DataError(f"row {prompt.index} holds a value that JSON cannot: {error}") from error


def decode_prompt(text: str) -> Prompt:
    """Decodes the output of `encode_prompt`."""
    values = json.loads(text)
    values["token_ids"] = np.asarray(values["token_ids"], np.int32)
    values["sampling"] = _sampling(values["sampling"])
    values["messages"] = tuple(values["messages"])
    return Prompt(**values)


@lru_cache(maxsize=256)  # the rows of a run have few different ones
def _sampling_text(sampling: SamplingParameters) -> str:
    return json.dumps(_sampling_json(sampling))


@lru_cache(maxsize=256)
def _decode_sampling(text: str) -> SamplingParameters:
    return _sampling(json.loads(text))


def _decode_mapping(text: str) -> dict[str, Any]:
    return {} if text == "{}" else json.loads(text)


def _sampling_json(sampling: SamplingParameters) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in SamplingParameters.__dataclass_fields__}


def _sampling(values: Mapping[str, Any]) -> SamplingParameters:
    return SamplingParameters(**{**values, "stop": tuple(values["stop"])})
