"""Every algorithm gives the same gradients and metrics whether the rows of a group share their prompt or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tandem.trainer.batch.planning import Packing
from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner
from tests.support.algorithm_groups import groups_of, plain_policy
from tests.support.training_groups import make_batch
from tests.trainer.test_algorithms import ALGORITHMS

TOLERANCE = 1e-5
"""Of the gradients' norm, and of each figure, in float32."""
OF_THE_PLAN = {"padding_fraction", "shared_fraction", "num_micro_batches"}
CASES: dict[str, Mapping[str, Any]] = {
    **ALGORITHMS,
    "adapters": {"lora": {"rank": 4}},
    "adapters and a reference": {"lora": {"rank": 4}, "kl": {"loss": {"coefficient": 0.1}}},
}


def gradients(settings: Mapping[str, Any], model: Path, packing: Packing) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The policy's gradients of the first optimizer step, and the metrics of the batch, which have the norm of the
    critic's.
    """
    config = TrainerConfig(**{"zero_stage": 0, "learning_rate": 1e-3, "packing": packing, **settings})
    learner = Learner(config, model_path=str(model), total_batches=10, seed=0, max_response_tokens=12)
    found: dict[str, Tensor] = {}

    def keep() -> None:
        parameters = learner._engine.module.named_parameters()
        found.update((name, each.grad.detach().clone()) for name, each in parameters if each.grad is not None)

    try:
        batch, by_id = make_batch(groups_of(1, plain_policy(model)), tokens_per_micro_batch=2000, packing=packing)
        metrics = dict(learner.train(learner.prepare(batch, by_id), before_step=keep).metrics)
    finally:
        learner.close()
    return found, metrics


@pytest.mark.parametrize("name", CASES)
def test_shared_prompts_change_no_gradient_and_no_metric(name: str, model: Path) -> None:
    expected, padded = gradients(CASES[name], model, "padded")
    found, shared = gradients(CASES[name], model, "shared")
    assert padded["shared_fraction"] == 0 < shared["shared_fraction"]
    assert found.keys() == expected.keys() and found
    size = sum(float(each.double().square().sum()) for each in expected.values()) ** 0.5
    apart = sum(float((found[each] - expected[each]).double().square().sum()) for each in found) ** 0.5
    assert 0 < size and apart <= TOLERANCE * size, apart / size
    assert shared.keys() == padded.keys()
    for figure in shared.keys() - OF_THE_PLAN:
        if not figure.startswith("seconds"):
            assert shared[figure] == pytest.approx(padded[figure], rel=TOLERANCE, abs=TOLERANCE), figure
