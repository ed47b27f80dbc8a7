"""Finds and calls the advantage estimator that its options name, after checking what all estimators require."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tandem.protos.errors import DataError
from tandem.protos.plugins import load_function
from tandem.trainer.batch.ragged import row_sums
from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import EstimatorOptions, Need, estimator_models

_COLUMNS: dict[Need, tuple[str, str]] = {
    "values": ("values_N", "a value of the critic"),
    "baselines": ("baselines_R", "a greedy baseline"),
    "components": ("components_RC", "a reward component"),
    "logprobs": ("logprobs_N", "a proximal log-prob"),
    "squared_probs": ("squared_probs_N", "a Σπ²"),
    "columns": ("columns_N", "a position"),
    "turns": ("turns_N", "a turn"),
}
"""The column of `EstimatorBatch` that each need is about, and what an error calls one of its values."""


@cache
def find_estimator(name: str) -> Callable[[EstimatorBatch, Any], Estimate]:
    """The estimator of that name. Raises PluginError if another package's estimator does not import."""
    return load_function(estimator_models()[name].function, f"advantage {name}")


@torch.no_grad()
def estimate(batch: EstimatorBatch, options: EstimatorOptions) -> Estimate:
    """The advantages of a batch. An empty batch gives empty advantages. Raises DataError if an input or an advantage of
    a row is not finite (the error names the row), a group is smaller than the estimator requires, or the estimator
    itself refuses the batch.
    """
    # A row's sum is finite only if all its rewards are, so checking R sums covers N rewards.
    if not bool(batch.scores_R.isfinite().all()):
        _check_tokens(batch, "a reward", batch.rewards_N)
    for need, (name, what) in _COLUMNS.items():
        if need in options.needs:
            column: Tensor | None = getattr(batch, name)
            assert column is not None, f"{options.name} needs {need}"
            if name.endswith("_N"):
                _check_tokens(batch, what, column)
            else:
                finite = column.isfinite()
                _check_rows(batch, what, finite if finite.ndim == 1 else finite.all(1))
    if options.weighs_tokens and batch.behavior_weights_N is not None:
        _check_tokens(batch, "a behavior weight", batch.behavior_weights_N)
    _check_groups(batch, options)
    result = find_estimator(options.name)(batch, options)
    assert result.advantages_N.shape == batch.rewards_N.shape, result.advantages_N.shape
    _check_tokens(batch, "an advantage", result.advantages_N)
    return result


def _check_tokens(batch: EstimatorBatch, what: str, values_N: Tensor) -> None:
    # A sum is finite only if its terms are. This takes one pass and no temporary. Integers are always finite.
    if values_N.is_floating_point() and not bool(values_N.sum().isfinite()):
        _check_rows(batch, what, row_sums((~values_N.isfinite()).double(), batch.lengths_R) == 0)


def _check_rows(batch: EstimatorBatch, what: str, finite_R: Tensor) -> None:
    if not bool(finite_R.all()):
        row = int(finite_R.long().argmin())
        raise DataError(f"row {row} (group {int(batch.groups_R[row])}): {what} is not finite")


def _check_groups(batch: EstimatorBatch, options: EstimatorOptions) -> None:
    fewest, sizes_R = options.min_group_size, batch.groups.sizes_R
    if fewest > 1 and bool((sizes_R < fewest).any()):
        row = int((sizes_R < fewest).nonzero()[0, 0])
        raise DataError(
            f"row {row} (group {int(batch.groups_R[row])}): a group of {int(sizes_R[row])}, but {options.name} "
            f"compares at least {fewest} answers to a prompt: sample more, or raise min_scored_samples so that no "
            "group shrinks below that"
        )
