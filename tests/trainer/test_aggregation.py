"""Shares of tokens: all golden values, and batches without tokens."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.trainer.aggregation import Aggregation, token_shares
from tandem.trainer.batch.ragged import spread
from tandem.trainer.policy_losses.inputs import LossTerms, policy_loss_sum
from tests.support.golden_cases import GoldenCase, flatten, golden_cases

MODES: tuple[Aggregation, ...] = get_args(Aggregation)


def golden_shares(lengths_B: Tensor, aggregation: Aggregation, hyper: dict[str, int], columns: int) -> Tensor:
    """Token shares, (N,). The golden convention averages gradients over ranks and ours sums them, hence the factor
    `dp_size`.
    """
    shares_B = token_shares(
        lengths_B,
        aggregation,
        length_constant=hyper.get("loss_scale_factor", columns),
        num_tokens=hyper.get("batch_num_tokens"),
        num_sequences=hyper.get("global_batch_size"),
    )
    return spread(shares_B * hyper.get("dp_size", 1), lengths_B)


@pytest.mark.parametrize("case", golden_cases("aggregation/"), ids=lambda case: case.name)
def test_aggregation_agrees_with_golden_values(case: GoldenCase) -> None:
    loss_BT = case.inputs["loss_mat"].clone().requires_grad_()
    loss_N, lengths_B = flatten(loss_BT, case.inputs["loss_mask"])
    mode = next(mode for mode in MODES if mode == case.name.split("/")[1])
    loss = policy_loss_sum(LossTerms(loss_N), golden_shares(lengths_B, mode, case.hyper, loss_BT.shape[1]))
    loss.backward()
    case.check("loss", loss)
    assert loss_BT.grad is not None
    case.check("grad", loss_BT.grad)


def test_every_mode_has_golden_cases_and_no_other() -> None:
    assert {case.name.split("/")[1] for case in golden_cases("aggregation/")} == set(MODES)


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 9), max_size=8))
def test_a_sequence_without_loss_tokens_is_not_counted(mode: Aggregation, counts: list[int]) -> None:
    shares_R = token_shares(counts, mode, length_constant=7.0)
    assert shares_R.shape == (len(counts),) and shares_R.dtype == torch.float64
    assert torch.isfinite(shares_R).all()
    assert ((shares_R > 0) == torch.tensor([count > 0 for count in counts])).all()
    kept = [count for count in counts if count]
    torch.testing.assert_close(shares_R[shares_R > 0], token_shares(kept, mode, length_constant=7.0))


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 9), max_size=8), cut=st.integers(0, 8))
def test_a_rank_needs_only_the_totals_and_its_own_counts(mode: Aggregation, counts: list[int], cut: int) -> None:
    whole_R = token_shares(counts, mode, length_constant=7.0)
    totals = {"num_tokens": sum(counts), "num_sequences": sum(1 for count in counts if count)}
    parts = [token_shares(part, mode, length_constant=7.0, **totals) for part in (counts[:cut], counts[cut:])]
    assert torch.equal(torch.cat(parts), whole_R)
