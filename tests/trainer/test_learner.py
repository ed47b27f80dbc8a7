"""The learner on real engines of both backends, alone and over several ranks."""

from __future__ import annotations

import errno
import gc
import math
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.protos.codec import EncodedGroups
from tandem.protos.errors import ConfigError, DataError, EnvironmentLackError, ModelError
from tandem.protos.types import Segment, TrajectoryGroup
from tandem.trainer.batch.record import write_record
from tandem.trainer.checkpoints.state import checkpoint_folder, latest_checkpoint, list_checkpoints
from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner
from tests.support.engine_inputs import equal, relative_error
from tests.support.learner_rank import all_weights, untrainable
from tests.support.reference_loop import train_reference
from tests.support.training_groups import make_batch, make_group, make_payloads
from tests.trainer.conftest import ENGINES, Settings, every_engine

MakeLearner = Callable[..., Learner]


def train(
    learner: Learner, version: int, groups: Sequence[TrajectoryGroup] | None = None, **options: int
) -> dict[str, float]:
    batch, by_id = make_batch(
        groups or [make_group(i, seed=version, versions=(version - 1,)) for i in range(4)],
        policy_version=version,
        **{"tokens_per_micro_batch": 1000, **options},
    )
    return dict(learner.train(learner.prepare(batch, by_id)).metrics)


def test_every_backend_and_stage_trains_in_bfloat16_like_stage_3(make_learner: MakeLearner) -> None:
    losses = {}
    for name, chosen in ENGINES.items():
        learner = make_learner(**chosen, dtype="bfloat16")
        losses[name] = [train(learner, version)["loss"] for version in (1, 2, 3)]
    assert all(losses["stage3"] == pytest.approx(found, abs=5e-3) for found in losses.values()), losses


def test_metrics_of_a_batch(make_learner: MakeLearner) -> None:
    learner = make_learner(warmup_batches=4)
    metrics = train(learner, 1)
    assert metrics["learning_rate"] == pytest.approx(1e-3 / 4)
    assert metrics["entropy"] > 0
    assert metrics["behavior_proximal_kl"] > 0
    assert 0 < metrics["effective_sample_size"] < 1
    assert 0 < metrics["truncated_fraction"] < 1
    assert metrics["behavior_weight_max"] == 2.0
    assert metrics["clipped_fraction"] == 0  # one optimizer step: the ratio is 1
    assert metrics["grad_norm"] > 0 and metrics["skipped_steps"] == 0
    assert learner.optimizer_step == 1
    several = train(make_learner(optimizer_steps_per_batch=4, learning_rate=0.05), 1, optimizer_steps=4)
    assert several["clipped_fraction"] > 0  # later steps use changed weights


def test_a_rank_has_the_threads_of_its_configuration(make_learner: MakeLearner) -> None:
    before = torch.get_num_threads()
    try:
        make_learner(num_threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_learning_rate_zero_changes_nothing(make_learner: MakeLearner) -> None:
    learner = make_learner(learning_rate=0.0, weight_decay=0.1)
    start = all_weights(learner)
    train(learner, 1)
    assert equal(all_weights(learner), start)


@every_engine
@pytest.mark.parametrize(("dtype", "clip"), [("float32", 1.0), ("float32", 0.0), ("bfloat16", 1.0)])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(
    make_learner: MakeLearner, engine_settings: Settings, dtype: str, clip: float
) -> None:
    learner = make_learner(**engine_settings, dtype=dtype, gradient_clip=clip, advantage="dr_grpo")
    train(learner, 1)
    before = all_weights(learner)
    batch, by_id = make_batch([make_group(0, rewards=[1e200, 0.0, 1.0, 0.0])], policy_version=2)  # overflows float32
    result = learner.train(learner.prepare(batch, by_id))
    assert not result.changed and result.optimizer_step == 1
    assert result.metrics["skipped_steps"] == 1
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert equal(all_weights(learner), before)
    train(learner, 3)
    after = all_weights(learner)
    assert not equal(after, before) and all(bool(tensor.isfinite().all()) for tensor in after.values())


def test_a_batch_prepared_by_another_thread_while_the_one_before_it_is_trained_gives_the_same_bits(
    make_learner: MakeLearner,
) -> None:
    ends = []
    for ahead in (False, True):
        learner = make_learner()
        before, after = (make_batch([make_group(0, seed=version)], policy_version=version) for version in (1, 2))
        with ThreadPoolExecutor(1) as other:
            first = learner.prepare(*before)
            second = other.submit(learner.prepare, *after) if ahead else None
            learner.train(first)
            learner.train(second.result() if second else learner.prepare(*after))
        ends.append(all_weights(learner))
    assert equal(*ends)


@pytest.mark.parametrize(
    ("settings", "is_known"),
    [
        ({}, True),
        ({"epochs_per_batch": 2}, False),
        ({"kl": {"loss": {"estimator": "k3", "coefficient": 0.1}}}, False),
        ({"advantage": {"name": "gae"}}, False),
    ],
)
def test_targets_are_computed_ahead_if_they_need_no_model(
    make_learner: MakeLearner, settings: Settings, is_known: bool
) -> None:
    learner = make_learner(**settings)
    prepared = learner.prepare(*make_batch([make_group(0)]))
    assert (prepared.start is not None) == is_known
    result = learner.train(prepared)
    refused = learner.prepare(*make_batch([make_group(0, rewards=[math.inf, 0.0, 1.0, 0.0])], policy_version=2))
    assert refused.start is None
    with pytest.raises(DataError, match="a reward is not finite"):
        learner.train(refused)
    other = make_learner(**settings)
    prepared = other.prepare(*make_batch([make_group(0)]))
    prepared.start = None
    assert other.train(prepared).advantages == result.advantages and equal(all_weights(other), all_weights(learner))
    other.world_size = 2
    assert other.prepare(*make_batch([make_group(0)])).start is None, "it has a part of the columns"


def test_a_prepared_batch_holds_its_micro_batches_until_they_are_trained(make_learner: MakeLearner) -> None:
    learner = make_learner()
    prepared = learner.prepare(*make_batch([make_group(0)]))
    assert isinstance(prepared._steps, list)
    held = [weakref.ref(one.ids_BT) for parts in prepared._steps for one in parts]
    assert held and all(one() is not None for one in held)
    learner.train(prepared)
    gc.collect()
    assert all(one() is None for one in held), "exports need the memory, and so do snapshots of partitioned weights"


def without_first_prompt_token(group: TrajectoryGroup) -> TrajectoryGroup:
    row = group.scored_rows[0]
    ids = row.trajectory.segments[0].ids
    segment = Segment(ids, np.zeros(len(ids), np.float32), np.ones(len(ids), np.uint8), ())
    return replace(group, rows=(replace(row, trajectory=replace(row.trajectory, segments=(segment,))), *group.rows[1:]))


def test_batches_that_cannot_be_trained_are_refused(make_learner: MakeLearner) -> None:
    learner = make_learner()
    start = all_weights(learner)
    batch, by_id = make_batch([make_group(0)])
    for groups, refusal in (
        ({"0-0": untrainable(by_id["0-0"])}, "only temperature > 0"),
        ({"0-0": without_first_prompt_token(by_id["0-0"])}, "first place"),
        ({}, "0-0 is planned for this rank"),
        ({"0-0": make_group(0, seed=5)}, "differ in length"),
    ):
        with pytest.raises(DataError, match=refusal):
            learner.train(learner.prepare(batch, groups))
    with pytest.raises(DataError, match="a reward is not finite"):
        learner.train(learner.prepare(*make_batch([make_group(0, rewards=[math.inf, 0.0, 1.0, 0.0])])))
    assert equal(all_weights(learner), start)


@every_engine
def test_resume_is_bit_exact(make_learner: MakeLearner, tmp_path: Path, engine_settings: Settings) -> None:
    settings = {**engine_settings, "keep_checkpoints": 2, "schedule": "cosine"}
    learner = make_learner(**settings)
    for version in (1, 2, 3):
        train(learner, version)
        learner.save(checkpoint_folder(tmp_path / "checkpoints", version, 1), version, 1)
    train(learner, 4)
    expected = all_weights(learner)
    assert [version for version, _, _ in list_checkpoints(tmp_path / "checkpoints")] == [2, 3]
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    resumed = make_learner(**settings)
    assert resumed.load(newest[2]) == 3
    assert resumed.optimizer_step == 3
    train(resumed, 4)
    assert equal(all_weights(resumed), expected)


def test_a_checkpoint_of_another_engine_is_refused(make_learner: MakeLearner, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "000001"
    make_learner(zero_stage=1).save(folder, 1, 1)
    with pytest.raises(ConfigError, match=r"trainer\.zero_stage = 1, not 0: resume with 1"):
        make_learner().load(folder)
    with pytest.raises(ConfigError, match=r"trainer\.backend = deepspeed, not fsdp: resume with deepspeed") as failure:
        make_learner(backend="fsdp").load(folder)
    assert "\n" not in str(failure.value)
    with pytest.raises(DataError, match="000007"):
        make_learner().load(tmp_path / "checkpoints" / "000007")
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_a_full_disk_leaves_no_checkpoint(
    make_learner: MakeLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("tandem.trainer.checkpoints.durable.os.fsync", full)
        with pytest.raises(EnvironmentLackError, match="no space left"):
            learner.save(tmp_path / "000001-1", 1, 1)
        with pytest.raises(EnvironmentLackError, match="no space left"):
            learner.export(tmp_path / "hf")
    assert list_checkpoints(tmp_path) == [] and not (tmp_path / "hf").exists()
    learner.save(tmp_path / "000001-1", 1, 1)
    assert [version for version, _, _ in list_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_in_transformers(
    make_learner: MakeLearner, tmp_path: Path, model: Path, untied_model: Path, tied: bool
) -> None:
    source = model if tied else untied_model
    learner = make_learner(source)
    names = [name for name, _, _ in learner.parameter_specs()]
    assert ("lm_head.weight" in names) is not tied and len(set(names)) == len(names)
    train(learner, 1)
    learner.export(tmp_path / "export")
    first = load_file(tmp_path / "export" / "model.safetensors")
    train(learner, 2)
    learner.export(tmp_path / "export")  # replaces the previous one
    assert not equal(first, load_file(tmp_path / "export" / "model.safetensors"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["export"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert equal({name: parameter.detach() for name, parameter in loaded.named_parameters()}, all_weights(learner))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert loaded.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.decode(tokenizer("1 + 1 = 2\n").input_ids) == "1 + 1 = 2\n"
    assert tokenizer.chat_template
    files = {entry.name for entry in (tmp_path / "export").iterdir()}
    assert files == {entry.name for entry in source.iterdir()}


@pytest.mark.gpu
def test_a_gpu_trains_in_bfloat16(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner(dtype="bfloat16")
    assert learner.device.type == "cuda"
    start = all_weights(learner)
    assert train(learner, 1)["grad_norm"] > 0
    assert not equal(all_weights(learner), start)
    learner.export(tmp_path / "export")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == torch.bfloat16


def test_a_missing_or_broken_model_is_a_one_line_error(make_learner: MakeLearner, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model folder .*nowhere does not exist"):
        make_learner(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded") as failure:
        make_learner(tmp_path)
    assert "\n" not in str(failure.value)


# ---- the reference loop ----


NUM_BATCHES = 3

CONFIGS = {
    "default": TrainerConfig(learning_rate=1e-3, tokens_per_micro_batch=96),
    "several steps and epochs, sequence mean": TrainerConfig(
        learning_rate=2e-3,
        tokens_per_micro_batch=64,
        optimizer_steps_per_batch=3,
        epochs_per_batch=2,
        aggregation="seq-mean-token-mean",
        advantage="dr_grpo",
        warmup_batches=2,
        schedule="cosine",
        weight_decay=0.01,
    ),
    "uncorrected, stage 0": TrainerConfig(
        learning_rate=1e-3, correction="none", zero_stage=0, gradient_clip=0.1, loss={"clip_high": 0.3}
    ),
    "shared prompts, epochs of one step": TrainerConfig(
        learning_rate=1e-3, tokens_per_micro_batch=96, packing="shared", epochs_per_batch=3
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
        groups = [make_group(i, seed=version, versions=(version - 1, version), temperature=0.8) for i in range(3)]
        groups.append(make_group(9, seed=version, num_segments=2, baseline=True, rewards=[1.0, None, 0.0, 0.5]))
        batch, by_id = make_batch(
            groups,
            policy_version=version,
            tokens_per_micro_batch=config.tokens_per_micro_batch,
            optimizer_steps=config.optimizer_steps_per_batch,
            packing="shared" if config.packing == "shared" else "padded",
        )
        write_record(tmp_path, batch, EncodedGroups.of(make_payloads(groups)))
        assert learner.train(learner.prepare(batch, by_id)).changed
    trained = all_weights(learner)
    learner.close()

    assert equal(train_reference(tmp_path, path, config, NUM_BATCHES, "deepspeed"), trained)
    twin = train_reference(tmp_path, path, config, NUM_BATCHES, "torch")
    assert relative_error(trained, twin, start) <= 1e-4
