"""Operations on rows of different lengths without padding: values against a plain loop, gradients and empty rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.trainer.batch.ragged import flatten, keep_tokens, row_means, row_sums, spread, unflatten

LENGTHS = st.lists(st.integers(0, 7), min_size=0, max_size=8)
MASKS = st.integers(0, 6).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=1, max_size=6)
)


def rows_of(lengths: list[int], seed: int) -> tuple[list[list[float]], Tensor, Tensor]:
    """(rows as lists, values_N, lengths_B) of random values."""
    values_N = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    return [row.tolist() for row in values_N.split(lengths)] if lengths else [], values_N, lengths_B


def float64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(mask=MASKS, seed=st.integers(0, 99))
def test_unflatten_undoes_flatten(mask: list[list[int]], seed: int) -> None:
    mask_BT = torch.tensor(mask)
    values_BT = torch.randn(mask_BT.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values_N, lengths_B = flatten(values_BT, mask_BT)
    assert lengths_B.tolist() == [sum(row) for row in mask]
    assert lengths_B.dtype == torch.int64
    kept = [
        value
        for row, kept_row in zip(values_BT.tolist(), mask, strict=True)
        for value, keep in zip(row, kept_row, strict=True)
        if keep
    ]
    assert values_N.tolist() == kept
    torch.testing.assert_close(unflatten(values_N, mask_BT), values_BT * mask_BT, rtol=0, atol=0)
    again_N, _ = flatten(unflatten(values_N, mask_BT), mask_BT)
    assert torch.equal(again_N, values_N)


@settings(max_examples=30, deadline=None)
@given(mask=MASKS, seed=st.integers(0, 99))
def test_gradients_pass_flatten_and_unflatten_where_the_mask_is_1(mask: list[list[int]], seed: int) -> None:
    mask_BT = torch.tensor(mask)
    generator = torch.Generator().manual_seed(seed)
    values_BT = torch.randn(mask_BT.shape, generator=generator, dtype=torch.float64, requires_grad=True)
    factors_BT = torch.randn(mask_BT.shape, generator=generator, dtype=torch.float64)
    (unflatten(flatten(values_BT, mask_BT)[0], mask_BT) * factors_BT).sum().backward()
    assert values_BT.grad is not None
    torch.testing.assert_close(values_BT.grad, factors_BT * mask_BT, rtol=0, atol=0)


def test_padding_that_is_not_finite_does_not_leak() -> None:
    mask_BT = torch.tensor([[1, 0, 1], [0, 0, 0]])
    values_BT = float64([[1.0, math.nan, 3.0], [math.inf, math.nan, -math.inf]]).requires_grad_()
    values_N, lengths_B = flatten(values_BT, mask_BT)
    assert row_sums(values_N, lengths_B).tolist() == [4.0, 0.0]
    unflatten(values_N, mask_BT).square().sum().backward()
    assert values_BT.grad is not None and values_BT.grad.tolist() == [[2.0, 0.0, 6.0], [0.0, 0.0, 0.0]]


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_sums_and_means_equal_those_of_a_loop(lengths: list[int], seed: int) -> None:
    rows, values_N, lengths_B = rows_of(lengths, seed)
    torch.testing.assert_close(row_sums(values_N, lengths_B), float64([math.fsum(row) for row in rows]))
    means = [math.fsum(row) / len(row) if row else 0.0 for row in rows]
    torch.testing.assert_close(row_means(values_N, lengths_B), float64(means))


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_the_gradient_of_a_row_sum_is_the_factor_of_that_row(lengths: list[int], seed: int) -> None:
    _, values_N, lengths_B = rows_of(lengths, seed)
    factors_B = torch.arange(1.0, len(lengths) + 1.0, dtype=torch.float64)
    values_N.requires_grad_()
    (sums_N,) = torch.autograd.grad((row_sums(values_N, lengths_B) * factors_B).sum(), values_N)
    (means_N,) = torch.autograd.grad((row_means(values_N, lengths_B) * factors_B).sum(), values_N)
    want = [(row + 1.0, length) for row, length in enumerate(lengths) for _ in range(length)]
    torch.testing.assert_close(sums_N, float64([factor for factor, _ in want]))
    torch.testing.assert_close(means_N, float64([factor / length for factor, length in want]))


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_spread_repeats_and_its_gradient_sums(lengths: list[int], seed: int) -> None:
    _, factors_N, lengths_B = rows_of(lengths, seed)
    values_B = torch.arange(len(lengths), dtype=torch.float64).requires_grad_()
    values_N = spread(values_B, lengths_B)
    assert values_N.tolist() == [float(row) for row, length in enumerate(lengths) for _ in range(length)]
    (got_B,) = torch.autograd.grad((values_N * factors_N).sum(), values_B)
    torch.testing.assert_close(got_B, row_sums(factors_N, lengths_B))


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_kept_tokens_can_be_summed_by_their_new_lengths(lengths: list[int], seed: int) -> None:
    rows, values_N, lengths_B = rows_of(lengths, seed)
    kept_B = keep_tokens(lengths_B, values_N > 0)
    assert kept_B.dtype == torch.int64
    assert kept_B.tolist() == [sum(value > 0 for value in row) for row in rows]
    want = [math.fsum(value for value in row if value > 0) for row in rows]
    torch.testing.assert_close(row_sums(values_N[values_N > 0], kept_B), float64(want))


def test_gradients_agree_with_finite_differences() -> None:
    _, values_N, lengths_B = rows_of([3, 0, 2, 1], 5)
    values_N.requires_grad_()
    assert torch.autograd.gradcheck(lambda values_N: row_sums(values_N, lengths_B).exp(), (values_N,))
    assert torch.autograd.gradcheck(
        lambda values_N: spread(row_means(values_N, lengths_B).exp(), lengths_B), (values_N,)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_and_strides_are_kept(dtype: torch.dtype) -> None:
    values_N = torch.arange(12.0).to(dtype)[::2]
    lengths_B = torch.tensor([2, 0, 1, 3])
    sums_B = row_sums(values_N, lengths_B)
    assert sums_B.dtype == dtype and sums_B.tolist() == [2.0, 0.0, 4.0, 24.0]
    spread_N = spread(sums_B, lengths_B)
    assert spread_N.dtype == dtype and spread_N.tolist() == [2.0, 2.0, 4.0, 24.0, 24.0, 24.0]
    spread_N[0] = -1.0
    assert sums_B[0] == 2.0, "a copy, even where every row has one token"
    alone_N = spread(values_N, torch.ones(6, dtype=torch.int64))
    alone_N[0] = -1.0
    assert values_N[0] == 0.0


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    values_N = float64([1.0, math.nan, 2.0, math.inf, 1e300, 1.0])
    sums_B = row_sums(values_N, torch.tensor([1, 1, 1, 1, 1, 0, 1]))
    assert sums_B[[0, 2, 5, 6]].tolist() == [1.0, 2.0, 0.0, 1.0]
    assert sums_B[1].isnan() and sums_B[3].isinf()


def test_batches_without_rows_or_tokens() -> None:
    nothing_N, none_B = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert row_sums(nothing_N, none_B).shape == row_means(nothing_N, none_B).shape == (0,)
    assert spread(torch.zeros(0), none_B).shape == (0,)
    assert row_means(nothing_N, torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    values_N, lengths_B = flatten(torch.zeros(2, 0), torch.zeros(2, 0))
    assert values_N.shape == (0,) and lengths_B.tolist() == [0, 0]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError):
        flatten(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(AssertionError):
        spread(torch.zeros(2), torch.tensor([1, 2, 3]))
    with pytest.raises(AssertionError):
        row_sums(torch.zeros(2, 3), torch.tensor([3, 3]))
    for lengths in ([3], [2, 2], []):
        with pytest.raises(AssertionError):
            row_sums(torch.zeros(5), torch.tensor(lengths, dtype=torch.int64))
