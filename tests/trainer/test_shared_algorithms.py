"""Every algorithm gives the same gradients and metrics whether the rows of a group share their prompt or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from tandem.trainer.batch.planning import Packing
from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner
from tandem.trainer.policy_losses.options import loss_models
from tests.support.algorithm_groups import groups_of, plain_policy
from tests.support.training_groups import make_batch
from tests.trainer.test_algorithms import ALGORITHMS

TOLERANCE = 1e-5
"""Of the gradients' norm, and of each figure, in float32."""
OF_THE_PLAN = {"padding_fraction", "shared_fraction", "num_micro_batches"}
CASES: dict[str, Mapping[str, Any]] = {
    **ALGORITHMS,
    **{f"adapters, {loss}": {"lora": {"rank": 4}, "loss": loss} for loss in loss_models()},
    "adapters and a reference": {"lora": {"rank": 4}, "kl": {"loss": {"coefficient": 0.1}}},
    "adapters and a critic": {"lora": {"rank": 4}, "advantage": {"name": "gae"}},
}
Gradients = dict[str, dict[str, Tensor]]
"""By model (`engine`, the policy's, and `critic`) and parameter."""


def gradients(settings: Mapping[str, Any], model: Path, packing: Packing) -> tuple[Gradients, dict[str, float]]:
    """The gradients of the first optimizer step, and the metrics of the batch."""
    config = TrainerConfig(**{"zero_stage": 0, "learning_rate": 1e-3, "packing": packing, **settings})
    learner = Learner(config, model_path=str(model), total_batches=10, seed=0, max_response_tokens=12)
    found: Gradients = {}
    random = torch.Generator().manual_seed(0)
    for name, each in learner._engine.module.named_parameters():
        if "lora_B" in name:  # it begins as 0, with which the gradient of A is 0, too
            each.data.normal_(std=0.02, generator=random)

    def keep() -> None:
        for part, engine in learner._trained_engines().items():
            named = [(name, each) for name, each in engine.module.named_parameters() if each.requires_grad]
            whole = safe_get_full_grad if part == "critic" else attrgetter("grad")  # the critic's are partitioned
            found[part] = {name: whole(each).detach().clone() for name, each in named}

    try:
        batch, by_id = make_batch(groups_of(1, plain_policy(model)), tokens_per_micro_batch=2000, packing=packing)
        metrics = dict(learner.train(learner.prepare(batch, by_id), before_step=keep).metrics)
    finally:
        learner.close()
    return found, metrics


def norm(tensors: Iterable[Tensor]) -> float:
    return sum(float(each.double().square().sum()) for each in tensors) ** 0.5


@pytest.mark.parametrize("name", CASES)
def test_shared_prompts_change_no_gradient_and_no_metric(name: str, model: Path) -> None:
    expected, padded = gradients(CASES[name], model, "padded")
    found, shared = gradients(CASES[name], model, "shared")
    assert padded["shared_fraction"] == 0 < shared["shared_fraction"]
    assert found.keys() == expected.keys() == ({"engine", "critic"} if "critic_grad_norm" in shared else {"engine"})
    for part in expected:
        assert found[part].keys() == expected[part].keys()
        size = norm(expected[part].values())
        apart = norm(found[part][name] - wanted for name, wanted in expected[part].items())
        assert 0 < size and apart <= TOLERANCE * size, f"{part}: {apart / size}"
    assert shared.keys() == padded.keys()
    for figure in shared.keys() - OF_THE_PLAN:
        if not figure.startswith("seconds"):
            assert shared[figure] == pytest.approx(padded[figure], rel=TOLERANCE, abs=TOLERANCE), figure
