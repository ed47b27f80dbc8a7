"""The learner against the reference loop: bit-identical with the same engine, the same update with plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.trainer.batch.record import write_record
from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner
from tests.support.engine_inputs import equal, relative_error
from tests.support.learner_rank import all_weights
from tests.support.reference_loop import train_reference
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


@pytest.mark.parametrize("name", CONFIGS)
def test_the_reference_loop_reproduces_the_learners_weights(
    name: str, tmp_path: Path, model: Path, untied_model: Path
) -> None:
    config = CONFIGS[name]
    path = untied_model if name == "uncorrected, stage 0" else model
    learner = Learner(config, model_path=str(path), total_batches=NUM_BATCHES, seed=0, max_response_tokens=16)
    start = all_weights(learner)
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
    trained = all_weights(learner)
    learner.close()

    assert equal(train_reference(tmp_path, path, config, NUM_BATCHES, "deepspeed"), trained)
    twin = train_reference(tmp_path, path, config, NUM_BATCHES, "torch")
    assert relative_error(trained, twin, start) <= 1e-4
