"""Segments that grow: by what the policy samples, and by what an environment puts between its turns.

A turn is sampled after the tokens before it, never after a text that was encoded again. So every sampled token is in a
trajectory once, with the log-prob of the context in which it is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tandem.protos.types import SamplingMask, Segment, VersionSpan, version_span


def unsampled(ids: NDArray[np.int32]) -> Segment:
    """A segment of given tokens (T,), none of which is trained."""
    return Segment(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.uint8), ())


def with_sampled(
    begun: Segment,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[VersionSpan],
    mask: SamplingMask | None = None,
) -> Segment:
    """The segment and tokens that were sampled after it. `spans` and `mask` count from the first of these tokens."""
    sampled = np.asarray(token_ids, np.int32)
    values = np.asarray(logprobs, np.float32)
    assert len(values) == len(sampled), "one log-prob a sampled token"
    before = len(begun.ids)
    shifted = [version_span(before + one.first_token, one.incarnation, one.policy_version) for one in spans]
    if begun.spans and shifted and replace(shifted[0], first_token=begun.spans[-1].first_token) == begun.spans[-1]:
        del shifted[0]  # the same version
    return Segment(
        ids=np.concatenate([begun.ids, sampled]),
        behavior_logprobs=np.concatenate([begun.behavior_logprobs, values]),
        loss_mask=np.concatenate([begun.loss_mask, np.ones(len(sampled), np.uint8)]),
        spans=(*begun.spans, *shifted),
        sampling_mask=None if mask is None else _joined(_mask_of(begun), mask),
    )


def with_given(begun: Segment, ids: NDArray[np.int32]) -> Segment:
    """The segment and given tokens (T,) after it, which are not trained."""
    given = unsampled(ids)
    return Segment(
        ids=np.concatenate([begun.ids, given.ids]),
        behavior_logprobs=np.concatenate([begun.behavior_logprobs, given.behavior_logprobs]),
        loss_mask=np.concatenate([begun.loss_mask, given.loss_mask]),
        spans=begun.spans,
        sampling_mask=begun.sampling_mask and _joined(begun.sampling_mask, _mask_of(given)),
    )


def first_tokens(segment: Segment, length: int) -> Segment:
    """The first tokens of a segment, with their spans."""
    spans = tuple(span for span in segment.spans if span.first_token < length)
    mask = segment.sampling_mask
    if mask is not None:
        counts = mask.counts[:length]
        mask = SamplingMask(mask.ids[: counts.sum()], counts)
    return Segment(segment.ids[:length], segment.behavior_logprobs[:length], segment.loss_mask[:length], spans, mask)


def without_unread(segment: Segment) -> Segment:
    """The segment, which has a sampled token, up to its last one: the policy has read no token after it."""
    return first_tokens(segment, len(segment.ids) - int(segment.loss_mask[::-1].argmax()))


def _mask_of(segment: Segment) -> SamplingMask:
    """The segment's mask; if it has none, one without tokens."""
    return segment.sampling_mask or SamplingMask(np.zeros(0, np.int32), np.zeros(len(segment.ids), np.int32))


def _joined(first: SamplingMask, second: SamplingMask) -> SamplingMask:
    return SamplingMask(np.concatenate([first.ids, second.ids]), np.concatenate([first.counts, second.counts]))
