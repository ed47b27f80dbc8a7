"""The reference policy equals the initial policy and never changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.trainer.backend.registry import load_backend
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.lora import Adapters, insert_adapters
from tandem.trainer.models.options import LoraOptions
from tandem.trainer.models.reference import ReferencePolicy
from tests.support.backends import Settings, every_engine
from tests.support.engine_inputs import (
    engine_of,
    equal,
    logprobs_of,
    make_micro_batches,
    plain_model,
    policy_step,
    weights_of,
)
from tests.support.tiny_model import build_tiny_model

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("process_group")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"offload_reference": True},
        {"zero_stage": 0},
        {"zero_stage": 2},
        {"backend": "fsdp"},
        {"backend": "fsdp", "dtype": "bfloat16"},
    ],
)
def test_a_frozen_copy_equals_the_initial_policy_and_never_changes(model: Path, settings: dict[str, Any]) -> None:
    config = TrainerConfig(**settings)
    policy = engine_of(model, config)
    reference = ReferencePolicy.frozen_copy(load_backend(config), config, model)
    batches = make_micro_batches()
    first = reference.logprobs(batches)
    assert [each.shape for each in first] == [batch.target_N.shape for batch in batches]
    assert all(each.dtype == torch.float32 and not each.requires_grad for each in first)
    assert torch.cat(first).equal(logprobs_of(policy, batches))
    for _ in range(2):
        policy_step(policy, batches)
        assert torch.cat(reference.logprobs(batches)).equal(torch.cat(first))
    assert (torch.cat(first) - logprobs_of(policy, batches)).abs().max() > 0.05
    reference.close()
    policy_step(policy, batches)
    policy.close()


def test_a_frozen_copy_has_neither_gradients_nor_an_optimizer(model: Path) -> None:
    config = TrainerConfig()
    reference = ReferencePolicy.frozen_copy(load_backend(config), config, model)
    reference.logprobs(make_micro_batches())
    engine = reference._engine
    assert engine.deepspeed.zero_optimization_stage() == 3
    assert not any(parameter.requires_grad for parameter in engine.module.parameters())
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    assert not hasattr(engine.deepspeed.optimizer, "param_groups")
    reference.close()


@every_engine
def test_with_adapters_the_base_weights_are_the_reference(model: Path, engine_settings: Settings) -> None:
    """Querying it between two steps does not change the policy's training."""
    batches, base = make_micro_batches(), plain_model(model)
    ends = []
    for asked in (True, False):
        config = TrainerConfig(**engine_settings, gradient_checkpointing=True)
        module = load_model(model, "float32")
        options = LoraOptions(rank=4)
        adapted = insert_adapters(module, options, seed=0)
        engine = load_backend(config).build_engine(config, module)
        adapters = Adapters(adapted, options, engine)
        reference = ReferencePolicy.base_weights(engine, adapters)
        for _ in range(3):
            if asked:
                assert torch.cat(reference.logprobs(batches)).equal(logprobs_of(base, batches))
            policy_step(engine, batches)
        reference.close()  # the engine is the policy's
        policy_step(engine, batches)
        ends.append(weights_of(engine))
        engine.close()
    assert len(ends[0]) > 0 and equal(*ends)
