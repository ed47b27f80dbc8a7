"""The critic: its values align with log-probs, it has its own engine and checkpoint folder, and it is deterministic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tandem.protos.errors import ConfigError, ModelError
from tandem.trainer.backend.registry import load_backend
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.checkpoints.state import read_state
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.critic import Critic
from tandem.trainer.models.loading import load_value_model
from tests.support.engine_inputs import (
    NUM_TOKENS,
    RATE,
    advantages,
    engine_of,
    equal,
    load,
    make_micro_batches,
    policy_step,
    save,
    weights_of,
)
from tests.trainer.conftest import Settings

pytestmark = pytest.mark.usefixtures("process_group")
CONFIG = TrainerConfig()


@pytest.fixture(scope="module")
def reward_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a one-logit sequence head that is not 0."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("reward")
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, pad_token_id=0).save_pretrained(folder)
    return folder


def make_critic(config: TrainerConfig, folder: Path) -> Critic:
    return Critic(load_backend(config), config, folder)


def learn(critic: Critic, batches: Sequence[MicroBatch], learning_rate: float = RATE) -> tuple[float, float | None]:
    """One step with the advantages as targets; returns (squared error before it, gradient norm)."""
    total = 0.0
    for batch in batches:
        loss = ((critic.values(batch) - advantages(batch)) ** 2).sum() / NUM_TOKENS
        critic.engine.backward(loss)
        total += float(loss.detach())
    return total, critic.engine.step(learning_rate)


@torch.no_grad()
def values_of(critic: Critic, batches: Sequence[MicroBatch]) -> Tensor:
    return torch.cat([critic.values(batch) for batch in batches])


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_of_a_language_model_start_at_zero_and_learn(model: Path, dtype: str, backend: str) -> None:
    critic = make_critic(TrainerConfig(dtype=dtype, backend=backend), model)
    batches = make_micro_batches(rows_each=8)
    values = [critic.values(batch) for batch in batches]
    assert [each.shape for each in values] == [batch.target_N.shape for batch in batches]
    assert all(each.dtype == torch.float32 and each.requires_grad and not each.any() for each in values)
    losses = [learn(critic, batches)[0] for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]
    critic.engine.close()


def test_a_saved_head_is_kept_and_values_precede_their_tokens(model: Path, reward_model: Path) -> None:
    critic = make_critic(CONFIG, reward_model)
    plain = AutoModelForTokenClassification.from_pretrained(reward_model, num_labels=1).eval()
    torch.nn.init.zeros_(plain.score.bias)  # a reward model has none
    for batch in make_micro_batches():
        with torch.no_grad():
            values_BT = plain(batch.ids_BT).logits[..., 0]
            got_N = critic.values(batch)
        expected = [
            values_BT[row, batch.columns_K[column]] for row, column in zip(batch.row_N, batch.column_N, strict=True)
        ]
        torch.testing.assert_close(got_N, torch.stack(expected), atol=1e-6, rtol=0)
        assert all(
            batch.ids_BT[row, batch.columns_K[column] + 1] == token
            for row, column, token in zip(batch.row_N, batch.column_N, batch.target_N, strict=True)
        )
    critic.engine.close()


def test_values_keep_float32_precision_in_bfloat16(reward_model: Path) -> None:
    critic = make_critic(TrainerConfig(dtype="bfloat16"), reward_model)
    values = values_of(critic, make_micro_batches())
    assert not values.bfloat16().float().equal(values)
    critic.engine.close()


def test_critics_train_the_same_for_any_split_into_micro_batches(reward_model: Path) -> None:
    ends = []
    for rows_each, rng in ((2, 0), (2, 9), (8, 0)):
        torch.manual_seed(rng)
        state = torch.get_rng_state()
        critic = make_critic(CONFIG, reward_model)
        assert torch.get_rng_state().equal(state)
        for seed in (1, 2):
            learn(critic, make_micro_batches(seed, rows_each=rows_each))
        ends.append(weights_of(critic.engine))
        critic.engine.close()
    assert equal(ends[0], ends[1])
    assert all((ends[0][name] - ends[2][name]).abs().max() < 1e-4 for name in ends[0])


@pytest.mark.parametrize("settings", [{"zero_stage": 1}, {"backend": "fsdp"}], ids=["stage1", "fsdp"])
def test_a_critic_does_not_change_the_policy_and_both_resume_bit_exactly(
    model: Path, tmp_path: Path, settings: Settings
) -> None:
    folder = tmp_path / "000002"
    config = TrainerConfig(**settings)

    def both_step(policy: Any, critic: Critic, version: int) -> None:
        learn(critic, make_micro_batches(version), learning_rate=1e-3 * version)
        policy_step(policy, make_micro_batches(version))

    alone = engine_of(model, config)
    policy, critic = engine_of(model, config), make_critic(config, model)
    for version in (1, 2):
        policy_step(alone, make_micro_batches(version))
        both_step(policy, critic, version)
    assert equal(weights_of(alone), weights_of(policy))
    save({"engine": policy, "critic": critic.engine}, folder, config)
    assert read_state(folder).trained_elements.keys() == {"engine", "critic"}
    both_step(policy, critic, 3)
    expected = weights_of(policy), weights_of(critic.engine)
    for engine in (alone, policy, critic.engine):
        engine.close()

    policy, critic = engine_of(model, config), make_critic(config, model)
    with pytest.raises(ConfigError, match="holds the policy and the critic, this run trains the policy: "):
        load({"engine": policy}, folder, config)
    load({"engine": policy, "critic": critic.engine}, folder, config)
    both_step(policy, critic, 3)
    assert equal(weights_of(policy), expected[0])
    assert equal(weights_of(critic.engine), expected[1])
    save({"engine": policy}, folder, config)
    with pytest.raises(ConfigError, match="holds the policy, this run trains the policy and the critic: "):
        load({"engine": policy, "critic": critic.engine}, folder, config)
    policy.close()
    critic.engine.close()


def test_a_folder_without_a_value_model_is_refused(model: Path, tmp_path: Path) -> None:
    AutoModelForTokenClassification.from_pretrained(model, num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match="three cannot be loaded"):
        load_value_model(tmp_path / "three", "float32")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 3, "layer_types": None})
    )
    (tmp_path / "deeper" / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"deeper lacks \d+ weights of a value model"):
        load_value_model(tmp_path / "deeper", "float32")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_value_model(tmp_path, "float32")
