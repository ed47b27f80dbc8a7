"""Every combination of offload, gradient checkpointing and ZeRO stage trains the same weights or is refused."""

from __future__ import annotations

import gc
import itertools
import math
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from tandem.protos.errors import ConfigError
from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.backend.deepspeed.engine import DeepSpeedEngine, _engine_config
from tandem.trainer.backend.deepspeed.options import check
from tandem.trainer.backend.registry import check_backend, load_backend
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.token_model import token_logprobs
from tests.support.engine_inputs import (
    NUM_TOKENS,
    RATE,
    advantages,
    engine_of,
    equal,
    load,
    make_micro_batches,
    plain_model,
    policy_step,
    relative_error,
    save,
    weights_of,
)
from tests.trainer.conftest import Settings, every_engine

pytestmark = pytest.mark.usefixtures("process_group")
SWITCHES = ("offload_optimizer", "offload_parameters", "gradient_checkpointing")


def combinations(stage: int, dtype: str) -> Iterator[dict[str, bool]]:
    """All combinations that check_engine accepts; the plain one comes first."""
    for chosen in itertools.product((False, True), repeat=len(SWITCHES)):
        settings = dict(zip(SWITCHES, chosen, strict=True))
        try:
            check(TrainerConfig(zero_stage=stage, dtype=dtype, **settings))
        except ConfigError:
            continue
        yield settings


def gradients_of(engine: TrainingEngine) -> dict[str, Tensor]:
    """Full gradients before a step, read through DeepSpeed or FSDP. DeepSpeed exposes none at stage 2."""
    named = dict(engine.module.named_parameters())
    if isinstance(engine, DeepSpeedEngine) and engine.deepspeed.zero_optimization_stage() == 2:
        return {}
    if isinstance(engine, DeepSpeedEngine):
        return {name: deepspeed.utils.safe_get_full_grad(each).clone() for name, each in named.items()}
    return {name: each.grad.full_tensor() for name, each in named.items()}


@every_engine
def test_gradients_and_weights_equal_those_of_plain_torch(model: Path, engine_settings: Settings) -> None:
    engine = engine_of(model, TrainerConfig(**engine_settings))
    plain = plain_model(model).train()
    named = dict(plain.named_parameters())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    for version in range(3):
        for batch in make_micro_batches(version):
            for each in (engine, plain):
                loss = -torch.dot(token_logprobs(each, batch), advantages(batch)) / NUM_TOKENS
                loss.backward() if each is plain else each.backward(loss)
        for name, gradient in gradients_of(engine).items():
            torch.testing.assert_close(gradient, named[name].grad, atol=1e-5, rtol=0)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert engine.step(1e-3) == pytest.approx(float(norm), rel=1e-5)
    weights = weights_of(engine)
    assert max(float((weights[name] - named[name]).detach().abs().max()) for name in named) <= 1e-5
    engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_combination_trains_the_same_weights(model: Path, stage: int, dtype: str) -> None:
    """One of the steps is skipped because its gradient is not finite."""
    plain = None
    settings = list(combinations(stage, dtype))
    assert len(settings) == ({0: 2, 1: 4, 2: 4, 3: 8} if dtype == "float32" else {0: 2, 1: 2, 2: 2, 3: 8})[stage]
    for chosen in settings:
        config = TrainerConfig(zero_stage=stage, dtype=dtype, **chosen)
        engine = engine_of(model, config)
        if stage:
            assert engine.deepspeed.zero_use_cpu_optimizer() == chosen["offload_optimizer"]
            assert (engine.deepspeed.zero_offload_param() is not None) == chosen["offload_parameters"]
        start = weights_of(engine)
        norm = policy_step(engine, make_micro_batches(1, rows_each=4))
        before = weights_of(engine)
        engine.backward((token_logprobs(engine, make_micro_batches(2)[0]) * math.inf).sum())
        assert engine.step(RATE) is None and equal(weights_of(engine), before)
        policy_step(engine, make_micro_batches(3, rows_each=4))
        after = weights_of(engine)
        engine.close()
        if plain is None:
            plain = norm, after
            assert not equal(after, before)
        assert norm == pytest.approx(plain[0], rel=1e-6)
        # Offload sums the gradient norm in another order, so clipping differs in the last bit.
        assert relative_error(after, plain[1], start) <= 1e-4


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({}, 0),
        ({"dtype": "bfloat16"}, 1),
        ({"num_ranks": 2}, 3),
        ({"num_nodes": 2}, 3),
        ({"offload_parameters": True}, 3),
        ({"offload_optimizer": True, "dtype": "bfloat16"}, 3),
        ({"backend": "fsdp"}, 3),
        ({"num_ranks": 2, "zero_stage": 1}, 1),
    ],
)
def test_auto_partitions_where_there_are_several_ranks_or_an_offload(settings: dict[str, Any], stage: int) -> None:
    config = TrainerConfig(**settings)
    check_backend(config)
    assert config.resolved_zero_stage == stage


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_sums_the_gradients_of_micro_batches_in_float32(model: Path, dtype: str) -> None:
    engine = engine_of(model, TrainerConfig(dtype=dtype))
    assert engine.deepspeed.get_data_types() == (getattr(torch, dtype), torch.float32)
    engine.close()


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"zero_stage": 0, "offload_optimizer": True}, "set trainer.zero_stage to 1, 2 or 3"),
        ({"zero_stage": 0, "offload_parameters": True}, "set trainer.zero_stage to 3"),
        ({"zero_stage": 2, "offload_parameters": True}, "set trainer.zero_stage to 3"),
        ({"zero_stage": 1, "dtype": "bfloat16", "offload_optimizer": True}, "in bfloat16 needs trainer.zero_stage = 3"),
        ({"backend": "fsdp", "zero_stage": 2}, "trainer.zero_stage = 2 is DeepSpeed's"),
        ({"backend": "fsdp", "offload_parameters": True}, "FSDP offloads parameters and optimizer together"),
        pytest.param(
            {"backend": "fsdp", "offload_parameters": True, "offload_optimizer": True},
            "this machine has no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the offload works"),
        ),
    ],
)
def test_settings_that_the_backend_does_not_support_are_refused(
    model: Path, settings: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy) as failure:
        engine_of(model, TrainerConfig(**settings))
    assert "\n" not in str(failure.value)


def test_a_model_without_gradient_checkpointing_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="gradient_checkpointing: Linear does not support it"):
        config = TrainerConfig(gradient_checkpointing=True)
        load_backend(config).build_engine(config, nn.Linear(2, 2))


def test_an_unknown_backend_suggests_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="no training backend 'fdsp'; did you mean fsdp"):
        TrainerConfig(backend="fdsp")


def test_a_backend_whose_package_is_missing_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.trainer.backend.deepspeed.options.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install deepspeed"):
        check_backend(TrainerConfig())
    check_backend(TrainerConfig(backend="fsdp"))


def test_fsdp_runs_where_deepspeed_cannot_be_imported(model: Path) -> None:
    program = """
import sys
sys.modules["deepspeed"] = None
from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner
config = TrainerConfig(backend="fsdp", lora={"rank": 2}, advantage="gae")
Learner(config, model_path=sys.argv[1], total_batches=1, seed=0, max_response_tokens=4).close()
"""
    done = subprocess.run([sys.executable, "-c", program, str(model)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@every_engine
def test_a_closed_engine_frees_its_weights(model: Path, engine_settings: Settings) -> None:
    engine = engine_of(model, TrainerConfig(**engine_settings))
    policy_step(engine, make_micro_batches(rows_each=8))
    weight = weakref.ref(next(engine.module.parameters()))
    engine.close()
    del engine
    gc.collect()
    assert weight() is None


@every_engine
def test_gradient_checkpointing_runs_each_layer_forward_twice(model: Path, engine_settings: Settings) -> None:
    calls = []
    for chosen in (False, True):
        engine = engine_of(model, TrainerConfig(**engine_settings, gradient_checkpointing=chosen))
        counted: list[None] = []
        engine.module.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=counted: seen.append(None))
        policy_step(engine, make_micro_batches(rows_each=8))
        calls.append(len(counted))
        engine.close()
    assert calls == [1, 2]


@pytest.mark.parametrize("stage", [1, 3])
def test_offload_resumes_bit_exactly_and_can_be_changed_on_resume(model: Path, tmp_path: Path, stage: int) -> None:
    offloaded = TrainerConfig(zero_stage=stage, offload_optimizer=True, offload_parameters=stage == 3)
    engine = engine_of(model, offloaded)
    policy_step(engine, make_micro_batches(1))
    save({"engine": engine}, tmp_path / "000001", offloaded)
    policy_step(engine, make_micro_batches(2))
    expected = weights_of(engine)
    engine.close()
    for config in (offloaded, TrainerConfig(zero_stage=stage)):
        engine = engine_of(model, config)
        load({"engine": engine}, tmp_path / "000001", config)
        policy_step(engine, make_micro_batches(2))
        weights = weights_of(engine)
        assert all(torch.allclose(weights[name], expected[name], atol=1e-6) for name in expected)
        assert config is not offloaded or equal(weights, expected)
        engine.close()


@pytest.mark.parametrize("stage", range(4))
def test_communication_overlaps_only_where_gradients_are_partitioned(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = _engine_config(TrainerConfig(zero_stage=stage), 1000, 1000)
    assert settings["zero_optimization"]["overlap_comm"] == (stage >= 2)  # DeepSpeed refuses it below
