"""Headers of a scored group's rows: the fields that the trainer plans a batch from, as JSON text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from tandem.protos.types import RowHeader, TrajectoryGroup, VersionSpan, version_span

_FIELDS = tuple(RowHeader.__dataclass_fields__)
_SPANS = _FIELDS.index("spans")
_header_values = attrgetter(*_FIELDS)
span_values = attrgetter(*VersionSpan.__dataclass_fields__)
_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def group_headers(group: TrajectoryGroup) -> tuple[RowHeader, ...]:
    """One header per segment of a scored group, in the order of the payload."""
    return tuple(
        RowHeader(
            group_id=group.group_id,
            trajectory_id=row.trajectory.trajectory_id,
            segment=number,
            role=row.trajectory.role,
            num_tokens=len(segment.ids),
            num_loss_tokens=segment.num_loss_tokens,
            reward=row.reward,
            spans=segment.spans,
            finish_reason=row.trajectory.finish_reason,
            temperature=row.trajectory.sampling.temperature,
            num_prompt_tokens=(num_prompt_tokens := segment.num_prompt_tokens),
            prompt_digest=_digest(segment.ids[:num_prompt_tokens]),
        )
        for row in group.scored_rows
        for number, segment in enumerate(row.trajectory.segments)
    )


def _digest(ids: NDArray[np.int32]) -> int:
    """48 bits, which JSON numbers hold in every language."""
    return int.from_bytes(blake2b(ids.tobytes(), digest_size=6).digest())


def encode_headers(headers: Sequence[RowHeader]) -> str:
    """Headers as compact JSON text: a list of lists in the order of `RowHeader`'s fields."""
    return _JSON.encode(header_lists(headers))


def header_lists(headers: Sequence[RowHeader]) -> list[list[object]]:
    """The JSON value of `encode_headers`."""
    rows: list[list[object]] = [[*_header_values(header)] for header in headers]
    for row, header in zip(rows, headers, strict=True):
        row[_SPANS] = [*map(span_values, header.spans)]
    return rows


def decode_headers(text: str) -> tuple[RowHeader, ...]:
    """Decodes the output of `encode_headers`. Headers of older runs lack the last fields."""
    rows = json.loads(text)
    for row in rows:
        row[_SPANS] = tuple([version_span(*span) for span in row[_SPANS]])
    return tuple([RowHeader(*row) for row in rows])
