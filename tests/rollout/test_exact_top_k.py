"""vLLM's truncation on CPUs, changed so that top-k leaves k tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.rollout.vllm.exact_top_k import without_equals


def with_equals(logits_BV: Tensor, k_B: Tensor | None, p_B: Tensor | None) -> Tensor:
    """Leaves all tokens that equal the k-th largest, as vLLM does."""
    if k_B is None:
        return logits_BV
    smallest_B1 = logits_BV.sort(descending=True).values.gather(1, (k_B - 1)[:, None])
    return logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)


def test_equals_beyond_k_are_cut_off_and_other_rows_stay() -> None:
    logits_BV = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0], [5.0, 4.0, 3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    left_BV = without_equals(with_equals)(logits_BV.clone(), torch.tensor([2, 3, 5]), None)
    assert left_BV.isfinite().sum(-1).tolist() == [2, 3, 5], "a k of the whole vocabulary cuts off nothing"
    assert left_BV[0, 0] == 3.0 and (left_BV[0] == 2.0).sum() == 1
    assert torch.equal(left_BV[1:], with_equals(logits_BV, torch.tensor([2, 3, 5]), None)[1:])
    assert torch.equal(without_equals(with_equals)(logits_BV, None, None), logits_BV)
