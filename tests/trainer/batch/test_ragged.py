"""Sums, means and spreading over rows of different lengths: values, gradients and empty rows."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tandem.trainer.batch.ragged import flatten, keep_tokens, row_means, row_sums, spread, unflatten

LENGTHS = torch.tensor([0, 3, 0, 1, 2, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_are_summed_averaged_and_spread(dtype: torch.dtype) -> None:
    values_N = torch.arange(1.0, 7.0).to(dtype)
    sums_B = row_sums(values_N, LENGTHS)
    assert sums_B.dtype == dtype
    assert sums_B.tolist() == [0, 6, 0, 4, 11, 0]
    assert row_means(values_N, LENGTHS).tolist() == [0, 2, 0, 4, 5.5, 0]
    assert spread(sums_B, LENGTHS).dtype == dtype
    assert spread(sums_B, LENGTHS).tolist() == [6, 6, 6, 4, 11, 11]
    assert spread(LENGTHS > 1, LENGTHS).tolist() == [True, True, True, False, True, True]
    assert keep_tokens(LENGTHS, values_N > 2).tolist() == [0, 1, 0, 1, 2, 0]


def test_first_and_second_order_gradients_are_correct() -> None:
    generator = torch.Generator().manual_seed(0)
    values_N = torch.randn(6, dtype=torch.float64, generator=generator, requires_grad=True)
    values_B = torch.randn(6, dtype=torch.float64, generator=generator, requires_grad=True)
    assert gradcheck(lambda values: row_means(values, LENGTHS), values_N)
    assert gradcheck(lambda values: spread(values, LENGTHS), values_B)
    assert gradgradcheck(lambda values: row_sums(values, LENGTHS).exp(), values_N)
    assert gradgradcheck(lambda values: spread(values, LENGTHS).exp(), values_B)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_empty_rows_sum_to_zero(lengths: list[int]) -> None:
    values_N = torch.zeros(0, requires_grad=True)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    means_B = row_means(values_N, lengths_B)
    assert means_B.tolist() == lengths
    spread(means_B, lengths_B).sum().backward()
    assert values_N.grad is not None and values_N.grad.shape == (0,)


def test_a_long_row_is_summed_precisely() -> None:
    values_N = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    total = row_sums(values_N, torch.tensor([200_000]))
    torch.testing.assert_close(total.double(), values_N.double().sum()[None], rtol=1e-6, atol=0)


def test_lengths_that_do_not_match_fail_an_assertion() -> None:
    with pytest.raises(AssertionError):
        row_sums(torch.ones(5), LENGTHS)
    with pytest.raises(AssertionError):
        spread(torch.ones(5), LENGTHS)


def test_a_matrix_survives_flatten_and_unflatten() -> None:
    mask_BT = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.uint8)
    values_BT = torch.arange(9.0).reshape(3, 3).requires_grad_()
    values_N, lengths_B = flatten(values_BT, mask_BT)
    assert values_N.tolist() == [0, 2, 6, 7] and lengths_B.tolist() == [2, 0, 2]
    torch.testing.assert_close(unflatten(values_N, mask_BT), values_BT * mask_BT)
    (2 * values_N).sum().backward()
    torch.testing.assert_close(values_BT.grad, 2.0 * mask_BT)
