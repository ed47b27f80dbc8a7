"""The Arrow codec: round trips, and refusal of later schemas."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos import codec, row_headers
from tandem.protos.errors import DataError, SchemaVersionError
from tandem.protos.types import (
    Prompt,
    SamplingMask,
    SamplingParameters,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)

texts = st.text(max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts, lambda v: st.lists(v, max_size=3), max_leaves=5
)
floats = st.floats(-1e6, 1e6)
samplings = st.builds(
    SamplingParameters,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(0, 50),
    min_p=st.floats(0, 1),
    max_tokens=st.integers(1, 4096),
    seed=st.none() | st.integers(0, 2**31),
    stop=st.lists(texts, max_size=2).map(tuple),
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    num_tokens = draw(st.integers(0, 9))
    spans = st.builds(VersionSpan, st.integers(0, 9), st.integers(0, 3), st.integers(0, 99))
    return Segment(
        ids=np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=num_tokens, max_size=num_tokens)), np.int32),
        behavior_logprobs=np.asarray(
            draw(st.lists(st.floats(-50, 0, width=32), min_size=num_tokens, max_size=num_tokens)), np.float32
        ),
        loss_mask=np.asarray(draw(st.lists(st.integers(0, 1), min_size=num_tokens, max_size=num_tokens)), np.uint8),
        spans=tuple(draw(st.lists(spans, max_size=3))),
        sampling_mask=draw(masks(num_tokens)) if draw(st.booleans()) else None,
    )


@st.composite
def masks(draw: st.DrawFn, num_tokens: int) -> SamplingMask:
    counts = draw(st.lists(st.integers(0, 3), min_size=num_tokens, max_size=num_tokens))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=sum(counts), max_size=sum(counts)))
    return SamplingMask(np.asarray(ids, np.int32), np.asarray(counts, np.int32))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory | ScoredTrajectory:
    parts = tuple(draw(st.lists(segments(), min_size=1, max_size=3)))
    trajectory = Trajectory(
        trajectory_id=draw(st.integers(0, 99)),
        role=draw(st.sampled_from(["policy", "baseline"])),
        segments=parts,
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        text=draw(texts),
        sampling=draw(samplings),
        earned_reward=draw(floats),
        metadata=draw(st.dictionaries(texts, json_values, max_size=2)),
        token_rewards=(
            tuple(np.linspace(0, 1, len(s.ids), dtype=np.float32) for s in parts) if draw(st.booleans()) else None
        ),
    )
    kind = draw(st.sampled_from(["plain", "scored", "unscored"]))
    if kind == "plain":
        return trajectory
    if kind == "unscored":
        return ScoredTrajectory(trajectory, None, unscored_reason="timeout", unscored_detail=draw(texts))
    return ScoredTrajectory(trajectory, draw(floats), draw(st.dictionaries(texts, floats, max_size=2)))


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    prompt = Prompt(
        epoch=draw(st.integers(0, 9)),
        index=draw(st.integers(0, 2**40)),
        token_ids=np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), max_size=9)), np.int32),
        num_samples=draw(st.integers(1, 64)),
        sampling=draw(samplings),
        data_source=draw(texts),
        ground_truth=draw(json_values),
        messages=tuple(draw(st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=2))),
        extra_info=draw(st.dictionaries(texts, json_values, max_size=2)),
    )
    return TrajectoryGroup(prompt, tuple(draw(st.lists(trajectories(), max_size=4))))


def plain(value: object) -> object:
    """Dataclasses and arrays as nested values with dtypes, so that `==` compares everything."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *(plain(getattr(value, field.name)) for field in dataclasses.fields(value)))
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return value


@given(groups())
@settings(max_examples=60, deadline=None)
def test_a_group_survives_the_round_trip(group: TrajectoryGroup) -> None:
    assert plain(codec.decode_group(codec.encode_group(group))) == plain(group)


@given(st.lists(groups(), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_groups_decoded_together_are_those_decoded_one_by_one(several: list[TrajectoryGroup]) -> None:
    payloads = {str(number): codec.encode_group(group) for number, group in enumerate(several)}
    together = codec.EncodedGroups.of(payloads).decode()
    assert list(together) == list(payloads)
    for number, group in enumerate(several):
        assert plain(together[str(number)]) == plain(group)


@given(groups().filter(lambda group: group.rows))
@settings(max_examples=50, deadline=None)
def test_scores_added_to_a_payload_give_the_bytes_of_the_scored_group(group: TrajectoryGroup) -> None:
    scored = [
        row if isinstance(row, ScoredTrajectory) else ScoredTrajectory(row, 0.5, {"a": 0.5}) for row in group.rows
    ]
    unscored = TrajectoryGroup(group.prompt, tuple(row.trajectory for row in scored))
    whole = codec.encode_group(TrajectoryGroup(group.prompt, tuple(scored)))
    assert codec.encode_scored(codec.group_to_batch(unscored), scored) == whole


@given(groups())
@settings(max_examples=50, deadline=None)
def test_headers_survive_the_round_trip(group: TrajectoryGroup) -> None:
    headers = row_headers.group_headers(group)
    assert row_headers.decode_headers(row_headers.encode_headers(headers)) == headers
    assert len(headers) == sum(len(row.trajectory.segments) for row in group.scored_rows)


def example_group() -> TrajectoryGroup:
    return TrajectoryGroup(Prompt(0, 1, np.asarray([1, 2], np.int32), 2, SamplingParameters()))


def test_a_future_schema_version_is_refused_with_both_versions_named() -> None:
    batch = codec.group_to_batch(example_group())
    metadata = {**batch.schema.metadata, b"tandem.schema_version": b"7"}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema.with_metadata(metadata)) as writer:
        writer.write_batch(batch.replace_schema_metadata(metadata))
    with pytest.raises(SchemaVersionError, match=r"version 7.*up to 2"):
        codec.decode_group(sink.getvalue().to_pybytes())


def test_a_group_of_schema_version_1_has_no_sampling_mask_and_gets_scores() -> None:
    segment = Segment(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.ones(3, np.uint8), ())
    row = Trajectory(0, "policy", (segment,), "stop", "a", SamplingParameters())
    group = dataclasses.replace(example_group(), rows=(row,))
    batch = codec.group_to_batch(group)
    batch = batch.drop_columns(["sampling_mask"]).replace_schema_metadata(
        {**batch.schema.metadata, codec.VERSION_KEY: b"1"}
    )
    payload = codec.batch_to_payload(batch)
    assert plain(codec.decode_group(payload)) == plain(group)
    scored = ScoredTrajectory(row, 0.5)
    again = codec.decode_group(codec.encode_scored(codec.payload_to_batch(payload), [scored]))
    assert plain(again) == plain(dataclasses.replace(group, rows=(scored,)))


def test_of_several_groups_one_that_begins_with_a_later_segment_is_refused() -> None:
    segment = Segment(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.ones(3, np.uint8), ())
    row = Trajectory(0, "policy", (segment, segment), "stop", "a", SamplingParameters())
    batch = codec.group_to_batch(dataclasses.replace(example_group(), rows=(row,)))
    payloads = {"0-1": codec.batch_to_payload(batch), "0-2": codec.batch_to_payload(batch.slice(1))}
    with pytest.raises(DataError, match="not the first one of a trajectory"):
        codec.EncodedGroups.of(payloads).decode()


def test_a_prompt_of_schema_version_1_has_no_rows() -> None:
    batch = codec.group_to_batch(example_group()).drop_columns(["sampling_mask"])
    batch = batch.replace_schema_metadata({**batch.schema.metadata, codec.VERSION_KEY: b"1"})
    assert plain(codec.decode_group(codec.batch_to_payload(batch))) == plain(example_group())


def test_rewards_of_zero_keep_their_sign() -> None:
    segment = Segment(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.ones(3, np.uint8), ())
    for zero in (0.0, -0.0, 0.0):
        row = Trajectory(0, "policy", (segment,), "stop", "", SamplingParameters(), earned_reward=zero)
        group = dataclasses.replace(example_group(), rows=(ScoredTrajectory(row, zero),))
        (found,) = codec.decode_group(codec.encode_group(group)).scored_rows
        assert (str(found.reward), str(found.trajectory.earned_reward)) == (str(zero), str(zero))


@pytest.mark.parametrize("payload", [b"", b"nonsense", codec.encode_group(example_group())[:-40]])
def test_bytes_that_are_not_a_group_are_a_data_error(payload: bytes) -> None:
    with pytest.raises(DataError):
        codec.decode_group(payload)


def test_a_prompt_that_json_cannot_hold_names_its_row() -> None:
    prompt = dataclasses.replace(example_group().prompt, ground_truth=b"bytes")
    with pytest.raises(DataError, match="row 1"):
        codec.encode_group(TrajectoryGroup(prompt))
