"""The critic's explained variance in metrics.jsonl."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.trainer.batch.rewards import explained_variance

RETURNS = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (RETURNS, 1.0),
        (RETURNS + 7.0, 1.0),  # a constant error explains all of the variance
        (torch.full_like(RETURNS, 5.0), 0.0),
        (2.0 * RETURNS, 0.0),
        (-RETURNS, -3.0),
    ],
)
def test_explained_variance_compares_errors_with_the_variance_of_the_returns(
    values: torch.Tensor, expected: float
) -> None:
    assert explained_variance(values, RETURNS) == pytest.approx(expected)


def test_explained_variance_is_undefined_for_constant_returns() -> None:
    assert math.isnan(explained_variance(RETURNS, torch.ones_like(RETURNS)))
