"""Finds and calls the advantage estimator that its options name. `estimate` first checks what all estimators require.

To add one, write a function and an options model in `options.py`.
"""

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

_FIELDS: dict[Need, str] = {
    "values": "values_N",
    "baselines": "baselines_R",
    "components": "components_RC",
    "logprobs": "logprobs_N",
    "squared_probs": "squared_probs_N",
    "columns": "columns_N",
}


@cache
def find_estimator(name: str) -> Callable[[EstimatorBatch, Any], Estimate]:
    """The estimator of that name. Raises PluginError if another package's estimator does not import."""
    return load_function(estimator_models()[name].function, f"advantage {name}")


@torch.no_grad()
def estimate(batch: EstimatorBatch, options: EstimatorOptions) -> Estimate:
    """The advantages of a batch. An empty batch gives empty advantages.

    Raises:
        DataError: an input or an advantage of a row is not finite (the error names the row); a group is smaller than
            the estimator requires; or the estimator itself refuses the batch.
    """
    for need in options.needs:
        assert getattr(batch, _FIELDS[need]) is not None, f"{options.name} needs {need}"
    _check_inputs(batch, options.needs)
    _check_groups(batch, options)
    result = find_estimator(options.name)(batch, options)
    assert result.advantages_N.shape == batch.rewards_N.shape, result.advantages_N.shape
    _check_tokens(batch, "an advantage", result.advantages_N)
    return result


def _check_inputs(batch: EstimatorBatch, needs: frozenset[Need]) -> None:
    # A row's sum is finite only if all its rewards are, so checking R sums covers N rewards.
    if not bool(batch.scores_R.isfinite().all()):
        _check_tokens(batch, "a reward", batch.rewards_N)
    if batch.values_N is not None and "values" in needs:
        _check_tokens(batch, "a value of the critic", batch.values_N)
    if batch.logprobs_N is not None and "logprobs" in needs:
        _check_tokens(batch, "a proximal log-prob", batch.logprobs_N)
    if batch.squared_probs_N is not None and "squared_probs" in needs:
        _check_tokens(batch, "a Σπ²", batch.squared_probs_N)
        if batch.behavior_weights_N is not None:
            _check_tokens(batch, "a behavior weight", batch.behavior_weights_N)
    if batch.baselines_R is not None and "baselines" in needs:
        _check_rows(batch, "a greedy baseline", batch.baselines_R.isfinite())
    if batch.components_RC is not None and "components" in needs:
        _check_rows(batch, "a reward component", batch.components_RC.isfinite().all(1))


def _check_tokens(batch: EstimatorBatch, what: str, values_N: Tensor) -> None:
    # A sum is finite only if its terms are. This takes one pass and no temporary.
    if not bool(values_N.sum().isfinite()):
        finite_R = row_sums((~values_N.isfinite()).double(), batch.lengths_R) == 0
        _check_rows(batch, what, finite_R)


def _check_rows(batch: EstimatorBatch, what: str, finite_R: Tensor) -> None:
    if not bool(finite_R.all()):
        row = int(finite_R.long().argmin())
        raise DataError(f"row {row} (group {int(batch.groups_R[row])}): {what} is not finite")


def _check_groups(batch: EstimatorBatch, options: EstimatorOptions) -> None:
    fewest = options.min_group_size
    if fewest > 1 and bool((batch.groups.sizes_R < fewest).any()):
        row = int((batch.groups.sizes_R < fewest).nonzero()[0, 0])
        raise DataError(
            f"row {row} (group {int(batch.groups_R[row])}): a group of {int(batch.groups.sizes_R[row])}, "
            f"but {options.name} compares at least {fewest} answers to a prompt: "
            "sample more, or raise min_scored_samples so that no group shrinks below that"
        )
