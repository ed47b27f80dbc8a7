"""The version of each loss token, by the spans of its row."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.types import Segment, VersionSpan
from tandem.trainer.batch.micro_batch import TrainingRow, stack


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    num_tokens = draw(st.integers(2, 9))
    firsts = sorted(draw(st.sets(st.integers(1, num_tokens), max_size=3)))
    mask = [0, *draw(st.lists(st.integers(0, 1), min_size=num_tokens - 1, max_size=num_tokens - 1))]
    return Segment(
        ids=np.arange(num_tokens, dtype=np.int32),
        behavior_logprobs=np.zeros(num_tokens, np.float32),
        loss_mask=np.array(mask, np.uint8),
        spans=tuple(VersionSpan(first, 0, draw(st.integers(0, 50))) for first in firsts),
    )


@given(st.lists(segments(), min_size=1, max_size=5), st.sampled_from(["padded", "flat", "shared"]))
@settings(max_examples=150, deadline=None)
def test_a_token_has_the_version_of_the_last_span_that_begins_at_it_or_before(
    rows: list[Segment], packing: str
) -> None:
    expected = []
    for row in rows:
        for place in np.flatnonzero(row.loss_mask):
            begun = [span for span in row.spans if span.first_token <= place] or row.spans[:1]
            expected.append(begun[-1].policy_version if begun else 0)
    found = stack([TrainingRow(row) for row in rows], torch.device("cpu"), packing=packing)  # type: ignore[arg-type]
    assert found.versions_N.tolist() == expected
