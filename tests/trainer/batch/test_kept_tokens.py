"""Sampling masks of the loss tokens of several rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.types import SamplingMask, Segment
from tandem.trainer.batch.kept_tokens import KeptTokens, holds_its_tokens

VOCABULARY = 7
CPU = torch.device("cpu")


@st.composite
def segments(draw: st.DrawFn) -> tuple[Segment, list[set[int]]]:
    """A segment, and what was left at each of its loss tokens: the whole vocabulary without a mask."""
    loss_mask = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    sets = [draw(st.sets(st.integers(0, VOCABULARY - 1), min_size=1)) if is_loss else set() for is_loss in loss_mask]
    ids = np.array([min(kept, default=0) for kept in sets], np.int32)
    counts = np.array([len(kept) for kept in sets], np.int32)
    mask = SamplingMask(np.array([token for kept in sets for token in kept], np.int32), counts)
    segment = Segment(ids, np.zeros(len(ids), np.float32), np.array(loss_mask, np.uint8), (), mask)
    found = [kept for kept in sets if kept]
    if draw(st.booleans()):
        return segment, found
    return replace(segment, sampling_mask=None), [set(range(VOCABULARY))] * len(found)


@given(st.lists(segments(), min_size=1, max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_each_loss_token_has_its_own_tokens(rows: list[tuple[Segment, list[set[int]]]], data: st.DataObject) -> None:
    kept = KeptTokens.of([segment for segment, _ in rows], CPU)
    sets = [one for _, of_row in rows for one in of_row]
    if all(segment.sampling_mask is None for segment, _ in rows):
        assert kept is None
        return
    assert kept is not None
    first = data.draw(st.integers(0, len(sets)))
    last = data.draw(st.integers(first, len(sets)))
    cut_CV = kept.cut_off(slice(first, last), VOCABULARY)
    assert [set((~cut_V).nonzero()[:, 0].tolist()) for cut_V in cut_CV] == sets[first:last]


def one_token(*, kept: tuple[int, ...] = (3, 4), token: int = 4, logprob: float = -0.5) -> Segment:
    """A prompt of one token and a sampled one."""
    mask = SamplingMask(np.array(kept, np.int32), np.array([0, len(kept)], np.int32))
    ids, logprobs = np.array([1, token], np.int32), np.array([0, logprob], np.float32)
    return Segment(ids, logprobs, np.array([0, 1], np.uint8), (), mask)


@pytest.mark.parametrize(
    ("segment", "holds"),
    [
        (one_token(), True),
        (one_token(token=5), False),
        (one_token(kept=()), False),
        (one_token(kept=(1,), token=1), True),
        (one_token(token=5, logprob=float("nan")), True),  # the row is rejected
        (replace(one_token(), sampling_mask=None), False),
        (replace(one_token(), sampling_mask=None, loss_mask=np.zeros(2, np.uint8)), True),
        (replace(one_token(), sampling_mask=SamplingMask(np.array([4], np.int32), np.array([1], np.int32))), False),
    ],
)
def test_a_mask_without_a_trained_token_is_noticed(segment: Segment, holds: bool) -> None:
    assert holds_its_tokens(segment) == holds
