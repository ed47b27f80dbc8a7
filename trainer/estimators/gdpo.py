"""GDPO: normalises each reward component within its group before adding them up."""

from __future__ import annotations

import torch

from tandem.protos.errors import DataError
from tandem.trainer.estimators.group_relative import EPSILON
from tandem.trainer.estimators.groups import centred, deviations
from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import GdpoOptions
from tandem.trainer.estimators.whitening import whiten_rows


def gdpo(batch: EstimatorBatch, options: GdpoOptions) -> Estimate:
    """Wh(Σ_c w_c·(R_ic − μ_c)/(σ_c + 1e-6)), every component c normalised over its group as in GRPO. arXiv:2601.05242.

    `rewards_N` is not read. In a group of one, the components keep their values; a component without variance in a
    group contributes 0.

    Raises:
        DataError: the number of components differs from the number of weights.
    """
    assert batch.components_RC is not None
    components_CR = batch.components_RC.double().unbind(1)
    weights = options.weights or (1.0,) * len(components_CR)
    if len(weights) != len(components_CR):
        raise DataError(f"gdpo has {len(weights)} weights for {len(components_CR)} reward components")
    total_R = torch.zeros_like(batch.scores_R)
    for weight, component_R in zip(weights, components_CR, strict=True):
        centred_R = centred(component_R, batch.groups)
        if options.divide_by_std:
            centred_R = centred_R / (deviations(centred_R, batch.groups) + EPSILON)
        total_R = total_R + weight * centred_R
    return Estimate(batch.spread(whiten_rows(total_R, batch.lengths_R) if options.whiten else total_R))
