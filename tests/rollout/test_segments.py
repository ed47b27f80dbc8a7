"""Segments that grow: sampling masks stay at their tokens."""

from __future__ import annotations

import numpy as np

from tandem.protos.types import SamplingMask, VersionSpan
from tandem.rollout.segments import first_tokens, unsampled, with_given, with_sampled

SPAN = VersionSpan(0, 1, 0)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_sampling_masks_stay_at_their_tokens_over_turns_and_cuts() -> None:
    turn = with_sampled(unsampled(int32(9, 9)), [3, 4], [-1.0, -2.0], [SPAN], SamplingMask(int32(3, 7, 4), int32(2, 1)))
    grown = with_given(turn, int32(8, 8, 8))
    both = with_sampled(grown, [5], [-0.5], [SPAN], SamplingMask(int32(1, 5), int32(2)))
    assert both.sampling_mask is not None
    assert both.sampling_mask.counts.tolist() == [0, 0, 2, 1, 0, 0, 0, 2]
    assert both.sampling_mask.ids.tolist() == [3, 7, 4, 1, 5]
    cut = first_tokens(both, 3).sampling_mask
    assert cut is not None and (cut.ids.tolist(), cut.counts.tolist()) == ([3, 7], [0, 0, 2])
    assert with_given(unsampled(int32(9)), int32(8)).sampling_mask is None
    assert first_tokens(with_sampled(unsampled(int32(9)), [3], [-1.0], [SPAN]), 2).sampling_mask is None
