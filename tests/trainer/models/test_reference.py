"""The reference policy equals the initial policy and never changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.trainer.backend.registry import load_backend
from tandem.trainer.config import LoraOptions, TrainerConfig
from tandem.trainer.models.reference import ReferencePolicy
from tests.support.adapter_policy import TrainedPolicy
from tests.support.engine_inputs import (
    engine_of,
    equal,
    logprobs_of,
    make_micro_batches,
    plain_model,
    policy_step,
    weights_of,
)
from tests.trainer.conftest import Settings, every_engine

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"dtype": "bfloat16"}, {"offload_reference": True}, {"zero_stage": 0}, {"zero_stage": 2}),
        *({"backend": "fsdp"}, {"backend": "fsdp", "dtype": "bfloat16"}),
    ],
)
def test_a_frozen_copy_equals_the_initial_policy_and_never_changes(model: Path, settings: dict[str, Any]) -> None:
    config = TrainerConfig(**settings)
    policy = engine_of(model, config)
    reference = ReferencePolicy.frozen_copy(load_backend(config), config, model)
    batches = make_micro_batches(rows_each=4)
    first = reference.logprobs(batches)
    assert [each.shape for each in first] == [batch.target_N.shape for batch in batches]
    assert all(each.dtype == torch.float32 and not each.requires_grad for each in first)
    assert torch.cat(first).equal(logprobs_of(policy, batches))
    for _ in range(2):
        policy_step(policy, batches)
        assert torch.cat(reference.logprobs(batches)).equal(torch.cat(first))
    assert (torch.cat(first) - logprobs_of(policy, batches)).abs().max() > 0.05
    engine = reference.engine
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in engine.module.parameters())
    if config.backend == "deepspeed":
        assert engine.deepspeed.zero_optimization_stage() == 3
        assert not hasattr(engine.deepspeed.optimizer, "param_groups")
    engine.close()
    policy_step(policy, batches)
    policy.close()


@every_engine
def test_with_adapters_the_base_weights_are_the_reference(model: Path, engine_settings: Settings) -> None:
    """Querying it between two steps does not change the policy's training."""
    batches, base = make_micro_batches(rows_each=4), plain_model(model)
    ends = []
    for asked in (True, False):
        config = TrainerConfig(**engine_settings, gradient_checkpointing=True)
        policy = TrainedPolicy(model, config, LoraOptions(rank=4))
        reference = ReferencePolicy(policy.engine, policy.adapters.disabled)
        for _ in range(2):
            if asked:
                assert torch.cat(reference.logprobs(batches)).equal(logprobs_of(base, batches))
            policy_step(policy.engine, batches)
        ends.append(weights_of(policy.engine))
        policy.engine.close()
    assert len(ends[0]) > 0 and equal(*ends)
