"""Means, variances and whitening over loss tokens, for rows stored flat."""

from __future__ import annotations

import pytest
import torch

from tandem.trainer.batch.ragged import row_means, row_sums, spread
from tandem.trainer.estimators.groups import whiten, whiten_rows
from tests.support.golden_cases import GoldenCase, golden_cases
from tests.support.padded import flatten, unflatten


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


def test_whitened_values_have_mean_zero_and_variance_one() -> None:
    values_N = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 7 + 3
    whitened_N = whiten(values_N)
    assert float(whitened_N.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(whitened_N.var()) == pytest.approx(1.0, rel=1e-6)
