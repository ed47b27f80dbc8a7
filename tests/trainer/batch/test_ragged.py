"""Operations on rows of different lengths without padding: values against a plain loop and golden ones,
gradients, empty rows, and whitening."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from tandem.trainer.batch.ragged import keep_tokens, row_means, row_sums, spread
from tandem.trainer.estimators.groups import whiten, whiten_rows
from tests.support.golden_cases import GoldenCase, flatten, golden_cases, unflatten

LENGTHS = torch.tensor([0, 3, 0, 1, 2, 0])
laws = settings(max_examples=60, deadline=None)
any_rows = given(lengths=st.lists(st.integers(0, 7), min_size=0, max_size=8), seed=st.integers(0, 99))


def rows_of(lengths: list[int], seed: int) -> tuple[list[list[float]], Tensor, Tensor]:
    """(rows as lists, values_N, lengths_B) of random values."""
    values_N = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    return [row.tolist() for row in values_N.split(lengths)] if lengths else [], values_N, lengths_B


def float64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@laws
@any_rows
def test_sums_means_and_their_gradients_equal_those_of_a_loop(lengths: list[int], seed: int) -> None:
    rows, values_N, lengths_B = rows_of(lengths, seed)
    values_N.requires_grad_()
    sums_B, means_B = row_sums(values_N, lengths_B), row_means(values_N, lengths_B)
    torch.testing.assert_close(sums_B, float64([math.fsum(row) for row in rows]))
    torch.testing.assert_close(means_B, float64([math.fsum(row) / len(row) if row else 0.0 for row in rows]))
    factors_B = torch.arange(1.0, len(lengths) + 1.0, dtype=torch.float64)
    (sums_N,) = torch.autograd.grad((sums_B * factors_B).sum(), values_N)
    (means_N,) = torch.autograd.grad((means_B * factors_B).sum(), values_N)
    want = [(row + 1.0, length) for row, length in enumerate(lengths) for _ in range(length)]
    torch.testing.assert_close(sums_N, float64([factor for factor, _ in want]))
    torch.testing.assert_close(means_N, float64([factor / length for factor, length in want]))


@laws
@any_rows
def test_spread_repeats_and_its_gradient_sums(lengths: list[int], seed: int) -> None:
    _, factors_N, lengths_B = rows_of(lengths, seed)
    values_B = torch.arange(len(lengths), dtype=torch.float64).requires_grad_()
    values_N = spread(values_B, lengths_B)
    assert values_N.tolist() == [float(row) for row, length in enumerate(lengths) for _ in range(length)]
    (got_B,) = torch.autograd.grad((values_N * factors_N).sum(), values_B)
    torch.testing.assert_close(got_B, row_sums(factors_N, lengths_B))


@laws
@any_rows
def test_kept_tokens_can_be_summed_by_their_new_lengths(lengths: list[int], seed: int) -> None:
    rows, values_N, lengths_B = rows_of(lengths, seed)
    kept_B = keep_tokens(lengths_B, values_N > 0)
    assert kept_B.dtype == torch.int64
    assert kept_B.tolist() == [sum(value > 0 for value in row) for row in rows]
    want = [math.fsum(value for value in row if value > 0) for row in rows]
    torch.testing.assert_close(row_sums(values_N[values_N > 0], kept_B), float64(want))


def test_first_and_second_order_gradients_agree_with_finite_differences() -> None:
    _, values_N, _ = rows_of([6], 0)
    values_N.requires_grad_()
    assert gradcheck(lambda values: row_means(values, LENGTHS), values_N)
    assert gradcheck(lambda values: spread(row_means(values, LENGTHS).exp(), LENGTHS), values_N)
    assert gradgradcheck(lambda values: row_sums(values, LENGTHS).exp(), values_N)
    assert gradgradcheck(lambda values: spread(values, LENGTHS).exp(), values_N)  # six rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_and_strides_are_kept(dtype: torch.dtype) -> None:
    values_N = torch.arange(12.0).to(dtype)[::2]
    sums_B, means_B = row_sums(values_N, LENGTHS), row_means(values_N, LENGTHS)
    assert sums_B.dtype == dtype and sums_B.tolist() == [0.0, 6.0, 0.0, 6.0, 18.0, 0.0]
    assert means_B.dtype == dtype and means_B.tolist() == [0.0, 2.0, 0.0, 6.0, 9.0, 0.0]
    spread_N = spread(sums_B, LENGTHS)
    assert spread_N.dtype == dtype and spread_N.tolist() == [6.0, 6.0, 6.0, 6.0, 18.0, 18.0]
    assert spread(LENGTHS > 1, LENGTHS).tolist() == [True, True, True, False, True, True]
    spread_N[0] = -1.0
    assert sums_B[1] == 6.0, "a copy, even where every row has one token"
    alone_N = spread(values_N, torch.ones(6, dtype=torch.int64))
    alone_N[0] = -1.0
    assert values_N[0] == 0.0


def test_a_long_row_is_summed_precisely() -> None:
    values_N = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    total = row_sums(values_N, torch.tensor([200_000]))
    torch.testing.assert_close(total.double(), values_N.double().sum()[None], rtol=1e-6, atol=0)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    values_N = float64([1.0, math.nan, 2.0, math.inf, 1e300, 1.0])
    sums_B = row_sums(values_N, torch.tensor([1, 1, 1, 1, 1, 0, 1]))
    assert sums_B[[0, 2, 5, 6]].tolist() == [1.0, 2.0, 0.0, 1.0]
    assert sums_B[1].isnan() and sums_B[3].isinf()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_batches_without_rows_or_tokens(lengths: list[int]) -> None:
    values_N, lengths_B = torch.zeros(0, requires_grad=True), torch.tensor(lengths, dtype=torch.int64)
    means_B = row_means(values_N, lengths_B)
    assert means_B.tolist() == row_sums(values_N, lengths_B).tolist() == lengths
    spread(means_B, lengths_B).sum().backward()
    assert values_N.grad is not None and values_N.grad.shape == (0,)


@pytest.mark.parametrize("case", golden_cases("masked_ops/masked/"), ids=lambda case: case.name)
def test_masked_operations_agree_with_golden_values(case: GoldenCase) -> None:
    mask = case.inputs["mask"]
    values_N, lengths_B = flatten(case.inputs["values"], mask)
    case.check("mean", values_N.mean())
    case.check("row_mean", row_means(values_N, lengths_B))
    case.check("row_sum", row_sums(values_N, lengths_B))
    case.check("var_unbiased", values_N.var())
    case.check("var_biased", values_N.var(correction=0))
    case.check("whiten", unflatten(whiten(values_N), mask))
    case.check("whiten_keep_mean", unflatten(whiten(values_N) + values_N.mean(), mask))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_values_without_variance_are_whitened_to_zero(count: int) -> None:
    same_N = torch.full((count,), 0.3, dtype=torch.float64)
    torch.testing.assert_close(whiten(same_N), torch.zeros_like(same_N), rtol=0.0, atol=1e-12)
    ones = torch.ones(count, dtype=torch.int64)
    torch.testing.assert_close(whiten_rows(same_N, ones), torch.zeros_like(same_N), rtol=0.0, atol=1e-12)


def test_whitening_rows_equals_whitening_their_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    values_R = torch.randn(20, generator=generator, dtype=torch.float64)
    lengths_R = torch.randint(0, 9, (20,), generator=generator)
    whole_N = whiten(spread(values_R, lengths_R))
    torch.testing.assert_close(spread(whiten_rows(values_R, lengths_R), lengths_R), whole_N)
