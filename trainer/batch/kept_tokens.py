"""The tokens that truncation left when the loss tokens of a micro-batch were sampled.

The log-probs of the policy and of the reference policy are normalised over the same tokens ("Keep Sampling Mask" in
DeepSeek-V3.2, arXiv:2512.02556, section 3.1). What the present weights would leave is another set: a ratio to it is
biased, and 0 for a token that it lacks.

N loss tokens, E tokens left for all of them, C consecutive loss tokens, P tokens left for these, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.protos.types import SamplingMask, Segment


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Per loss token the ids of the tokens that were left, those of the first one first. They stay on the CPU: of a
    batch with top-k 100 they are a hundred times as large as its tokens.
    """

    ids_E: Tensor
    """int32, on the CPU."""
    is_truncated_N: Tensor
    """bool: False where the whole vocabulary was left."""
    offsets: NDArray[np.int64]
    """(N + 1,), on the CPU: where each loss token's ids begin in E, and their number."""

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> KeptTokens | None:
        """Of the loss tokens of these segments, in their order; None if no segment has a sampling mask."""
        if all(one.sampling_mask is None for one in segments):
            return None
        parts = [_of_loss_tokens(one) for one in segments]
        counts = torch.from_numpy(np.concatenate([one.counts for one in parts]).astype(np.int64))
        return cls(
            ids_E=torch.from_numpy(np.concatenate([one.ids for one in parts]).astype(np.int32)),
            is_truncated_N=(counts > 0).to(device),
            offsets=np.concatenate([[0], np.cumsum(counts.numpy())]),
        )

    def cut_off(self, tokens: slice, vocabulary_size: int) -> Tensor:
        """bool (C, V): True for what truncation cut off, for these loss tokens."""
        counts = torch.from_numpy(np.diff(self.offsets[tokens.start : tokens.stop + 1]))
        row_P = torch.arange(len(counts)).repeat_interleave(counts)
        id_P = self.ids_E[self.offsets[tokens.start] : self.offsets[tokens.stop]].long()
        cut_CV = self.is_truncated_N[tokens, None].repeat(1, vocabulary_size)
        cut_CV[row_P.to(cut_CV.device), id_P.to(cut_CV.device)] = False
        return cut_CV


def holds_its_tokens(segment: Segment) -> bool:
    """Whether the segment's sampling mask holds every loss token that is trained: its sampler's log-prob is finite."""
    mask = segment.sampling_mask
    trained = np.flatnonzero(segment.loss_mask.astype(bool) & np.isfinite(segment.behavior_logprobs))
    if mask is None or not len(trained):
        return not len(trained)
    if len(mask.counts) != len(segment.ids) or mask.counts.sum() != len(mask.ids):
        return False
    place_E = np.repeat(np.arange(len(segment.ids)), mask.counts)
    return bool(np.isin(trained, place_E[mask.ids == segment.ids[place_E]]).all())


def _of_loss_tokens(segment: Segment) -> SamplingMask:
    is_loss_T = segment.loss_mask.astype(bool)
    mask = segment.sampling_mask
    if mask is None:
        return SamplingMask(np.zeros(0, np.int32), np.zeros(segment.num_loss_tokens, np.int32))
    return SamplingMask(mask.ids[np.repeat(is_loss_T, mask.counts)], mask.counts[is_loss_T])
