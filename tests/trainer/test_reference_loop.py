"""The learner against the reference loop: bit-identical with the same engine, the same update with plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.trainer.batch.record import write_record
from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner
from tests.support.reference_loop import train_reference
from tests.support.tiny_model import build_tiny_model
from tests.support.training_groups import make_batch, make_group, make_payloads

NUM_BATCHES = 3

CONFIGS = {
    "default": TrainerConfig(learning_rate=1e-3, tokens_per_micro_batch=96),
    "several steps, sequence mean": TrainerConfig(
        learning_rate=2e-3,
        tokens_per_micro_batch=64,
        optimizer_steps_per_batch=3,
        aggregation="seq-mean-token-mean",
        advantage="dr_grpo",
        warmup_batches=2,
        schedule="cosine",
        weight_decay=0.01,
    ),
    "uncorrected, stage 0": TrainerConfig(
        learning_rate=1e-3, correction="none", zero_stage=0, gradient_clip=0.1, loss={"clip_high": 0.3}
    ),
}


def relative_update_error(got: dict[str, Tensor], want: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """|got − want| / |want − start|, L2 over all parameters."""
    error = sum((got[name] - want[name]).double().square().sum() for name in want)
    update = sum((want[name] - start[name]).double().square().sum() for name in want)
    return float((error / update) ** 0.5)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_reference_loop_reproduces_the_learners_weights(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    model = build_tiny_model(tmp_path / "model", tied=name != "uncorrected, stage 0")
    learner = Learner(config, model_path=str(model), total_batches=NUM_BATCHES, seed=0, max_response_tokens=16)
    names = [spec[0] for spec in learner.parameter_specs()]
    with learner.gather(names) as tensors:
        start = {name: tensor.clone() for name, tensor in tensors.items()}
    for version in range(1, NUM_BATCHES + 1):
        groups = [make_group(i, seed=version, versions=(version - 1, version), temperature=0.8) for i in range(5)]
        groups.append(make_group(9, seed=version, num_segments=2, baseline=True, rewards=[1.0, None, 0.0, 0.5]))
        batch, by_id = make_batch(
            groups,
            policy_version=version,
            tokens_per_micro_batch=config.tokens_per_micro_batch,
            optimizer_steps=config.optimizer_steps_per_batch,
        )
        write_record(tmp_path, batch, make_payloads(groups))
        assert learner.train(batch, by_id).changed
    with learner.gather(names) as tensors:
        trained = {name: tensor.clone() for name, tensor in tensors.items()}
    learner.close()

    same = train_reference(tmp_path, model, config, NUM_BATCHES, "deepspeed")
    assert all(torch.equal(same[name], trained[name]) for name in names)
    twin = train_reference(tmp_path, model, config, NUM_BATCHES, "torch")
    assert relative_update_error(trained, twin, start) <= 1e-4
