"""The reference policy: equal to the policy before it learns, and the same for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.trainer.config import TrainerConfig
from tandem.trainer.engine import build_engine, leave_process_group, start_process_group
from tandem.trainer.engine_options import LoraOptions
from tandem.trainer.lora import Adapters
from tandem.trainer.model import load_model
from tandem.trainer.reference import ReferencePolicy
from tests.support.engine_inputs import equal, logprobs_of, make_micro_batches, plain_model, policy_step, weights_of
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    start_process_group(60)
    yield
    leave_process_group()


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16"}, {"offload_reference": True}, {"zero_stage": 0}, {"zero_stage": 2}]
)
def test_a_frozen_copy_starts_as_the_policy_and_stays(model: Path, settings: dict[str, Any]) -> None:
    config = TrainerConfig(**settings)
    policy = build_engine(config, load_model(model, config.dtype))
    reference = ReferencePolicy.frozen_copy(config, model)
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
    policy.destroy()


def test_a_frozen_copy_has_neither_gradients_nor_an_optimizer(model: Path) -> None:
    config = TrainerConfig()
    reference = ReferencePolicy.frozen_copy(config, model)
    reference.logprobs(make_micro_batches())
    engine = reference._engine
    assert engine.zero_optimization_stage() == 3
    assert not any(parameter.requires_grad for parameter in engine.module.parameters())
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    assert not hasattr(engine.optimizer, "param_groups")
    reference.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_with_adapters_the_base_weights_are_the_reference(model: Path, stage: int) -> None:
    """And asking for it between two steps changes nothing of what the policy learns."""
    batches, base = make_micro_batches(), plain_model(model)
    ends = []
    for asked in (True, False):
        config = TrainerConfig(zero_stage=stage, gradient_checkpointing=True)
        module = load_model(model, "float32")
        adapters = Adapters(module, LoraOptions(rank=4), seed=0, zero_stage=stage)
        engine = build_engine(config, module)
        reference = ReferencePolicy.base_weights(engine, adapters)
        for _ in range(3):
            if asked:
                assert torch.cat(reference.logprobs(batches)).equal(logprobs_of(base, batches))
            policy_step(engine, batches)
        reference.close()  # the engine is the policy's
        policy_step(engine, batches)
        ends.append(weights_of(engine, config))
        engine.destroy()
    assert len(ends[0]) > 0 and equal(*ends)
