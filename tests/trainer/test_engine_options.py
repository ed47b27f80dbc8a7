"""Offload, gradient checkpointing and ZeRO stages: every combination learns the same, or is refused."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tandem.protos.errors import ConfigError
from tandem.trainer.checkpoint import CheckpointState
from tandem.trainer.checkpoint_io import load_checkpoint, save_checkpoint
from tandem.trainer.config import TrainerConfig
from tandem.trainer.engine import build_engine, leave_process_group, start_process_group
from tandem.trainer.engine_options import check_engine
from tandem.trainer.micro_batch import token_logprobs
from tandem.trainer.model import load_model
from tests.support.engine_inputs import equal, make_micro_batches, policy_step, relative_error, weights_of
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SWITCHES = ("offload_optimizer", "offload_parameters", "gradient_checkpointing")


def combinations(stage: int, dtype: str) -> Iterator[dict[str, bool]]:
    """What check_engine lets through, the plain one first."""
    for chosen in itertools.product((False, True), repeat=len(SWITCHES)):
        settings = dict(zip(SWITCHES, chosen, strict=True))
        try:
            check_engine(TrainerConfig(zero_stage=stage, dtype=dtype, **settings))
        except ConfigError:
            continue
        yield settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    start_process_group(60)
    yield
    leave_process_group()


def engine_of(model: Path, config: TrainerConfig) -> Any:
    return build_engine(config, load_model(model, config.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_combination_learns_the_same(model: Path, stage: int, dtype: str) -> None:
    """Including after a step that is skipped because its gradient is not finite."""
    plain = None
    settings = list(combinations(stage, dtype))
    assert len(settings) == ({0: 2, 1: 4, 2: 4, 3: 8} if dtype == "float32" else {0: 2, 1: 2, 2: 2, 3: 8})[stage]
    for chosen in settings:
        config = TrainerConfig(zero_stage=stage, dtype=dtype, **chosen)
        engine = engine_of(model, config)
        if stage:
            assert engine.zero_use_cpu_optimizer() == chosen["offload_optimizer"]
            assert (engine.zero_offload_param() is not None) == chosen["offload_parameters"]
        start = weights_of(engine, config)
        norm = policy_step(engine, make_micro_batches(1))
        before = weights_of(engine, config)
        engine.backward((token_logprobs(engine, make_micro_batches(2)[0]) * math.inf).sum(), scale_wrt_gas=False)
        engine.step()
        assert not engine.was_step_applied() and equal(weights_of(engine, config), before)
        policy_step(engine, make_micro_batches(3))
        after = weights_of(engine, config)
        engine.destroy()
        if plain is None:
            plain = norm, after
            assert not equal(after, before)
        assert norm == pytest.approx(plain[0], rel=1e-6)
        # Offload sums the gradient's norm in another order, so clipping differs in its last bit.
        assert relative_error(after, plain[1], start) <= 1e-4


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"zero_stage": 0, "offload_optimizer": True}, "set trainer.zero_stage to 1, 2 or 3"),
        ({"zero_stage": 0, "offload_parameters": True}, "set trainer.zero_stage to 3"),
        ({"zero_stage": 2, "offload_parameters": True}, "set trainer.zero_stage to 3"),
        ({"zero_stage": 1, "dtype": "bfloat16", "offload_optimizer": True}, "in bfloat16 needs trainer.zero_stage = 3"),
    ],
)
def test_what_deepspeed_would_ignore_is_refused(model: Path, settings: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as failure:
        engine_of(model, TrainerConfig(**settings))
    assert "\n" not in str(failure.value)


def test_a_model_without_gradient_checkpointing_is_named() -> None:
    with pytest.raises(ConfigError, match="gradient_checkpointing: Linear does not support it"):
        build_engine(TrainerConfig(gradient_checkpointing=True), nn.Linear(2, 2))


@pytest.mark.parametrize("stage", [0, 3])
def test_gradient_checkpointing_computes_a_layer_twice(model: Path, stage: int) -> None:
    calls = []
    for chosen in (False, True):
        engine = engine_of(model, TrainerConfig(zero_stage=stage, gradient_checkpointing=chosen))
        counted: list[None] = []
        engine.module.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=counted: seen.append(None))
        policy_step(engine, make_micro_batches(rows_each=8))
        calls.append(len(counted))
        engine.destroy()
    assert calls == [1, 2]


def test_a_checkpoint_from_before_there_were_other_engines_still_loads(model: Path, tmp_path: Path) -> None:
    known: dict[str, Any] = {"world_size": 1, "zero_stage": 3, "dtype": "float32"}
    engine = engine_of(model, TrainerConfig())
    state = CheckpointState(batch_version=1, optimizer_step=1, trainer={}, **known)
    save_checkpoint(engine, tmp_path / "000001", state, rank=0, barrier=lambda: None)
    file = tmp_path / "000001" / "state.json"
    values = {key: value for key, value in json.loads(file.read_text()).items() if key != "trained_elements"}
    file.write_text(json.dumps({**values, "format": 1}))
    assert load_checkpoint(engine, tmp_path / "000001", rank=0, **known) == state
    with pytest.raises(ConfigError, match="holds the policy, this run trains the policy and the critic"):
        load_checkpoint(engine, tmp_path / "000001", rank=0, **known, beside={"critic": engine})
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_offload_resumes_bit_exactly_and_may_be_switched_over_a_resume(model: Path, tmp_path: Path, stage: int) -> None:
    known: dict[str, Any] = {"world_size": 1, "zero_stage": stage, "dtype": "float32"}
    offloaded = TrainerConfig(zero_stage=stage, offload_optimizer=True, offload_parameters=stage == 3)
    engine = engine_of(model, offloaded)
    policy_step(engine, make_micro_batches(1))
    state = CheckpointState(batch_version=1, optimizer_step=1, trainer={}, **known)
    save_checkpoint(engine, tmp_path / "000001", state, rank=0, barrier=lambda: None)
    policy_step(engine, make_micro_batches(2))
    expected = weights_of(engine, offloaded)
    engine.destroy()
    for config in (offloaded, TrainerConfig(zero_stage=stage)):
        engine = engine_of(model, config)
        load_checkpoint(engine, tmp_path / "000001", rank=0, **known)
        policy_step(engine, make_micro_batches(2))
        weights = weights_of(engine, config)
        assert (
            equal(weights, expected)
            if config is offloaded
            else all(torch.allclose(weights[name], expected[name], atol=1e-6) for name in expected)
        )
        engine.destroy()
