"""Adapters: only they are trained, and the merged model is published under the base model's parameter names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tandem.protos.errors import ConfigError
from tandem.protos.manifest import encode_manifest
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.trainer.checkpoints.export import write_export
from tandem.trainer.checkpoints.state import read_state
from tandem.trainer.config import LoraOptions, TrainerConfig
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.lora import insert_adapters
from tandem.trainer.weight_sender import WeightSender
from tests.support.adapter_policy import TrainedPolicy
from tests.support.engine_inputs import (
    equal,
    load,
    logprobs_of,
    make_micro_batches,
    plain_model,
    policy_step,
    save,
    weights_of,
)
from tests.support.weight_pair import wait
from tests.trainer.conftest import Settings, every_engine

pytestmark = pytest.mark.usefixtures("process_group")
OPTIONS = LoraOptions(rank=4, alpha=12)
PolicyOf = Callable[..., TrainedPolicy]


@pytest.fixture
def policy_of(model: Path) -> Iterator[PolicyOf]:
    """Builds policies and closes their engines at the end."""
    made: list[TrainedPolicy] = []

    def build(options: LoraOptions = OPTIONS, *, folder: Path = model, seed: int = 0, **settings: Any) -> TrainedPolicy:
        made.append(TrainedPolicy(folder, TrainerConfig(**settings), options, seed))
        return made[-1]

    yield build
    for policy in made:
        policy.engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_engine
def test_only_adapters_are_trained_and_sent_and_merged_weights_compute_the_same(
    policy_of: PolicyOf, model: Path, engine_settings: Settings, dtype: str, tmp_path: Path
) -> None:
    policy = policy_of(**engine_settings, dtype=dtype)
    batches = make_micro_batches(rows_each=4)
    base = plain_model(model, dtype=dtype)
    specs = [(name, dtype, tuple(tensor.shape)) for name, tensor in base.named_parameters()]
    assert policy.adapters.specs() == specs
    assert logprobs_of(policy.engine, batches).equal(logprobs_of(base, batches))  # B is 0
    before, frozen = weights_of(policy.engine), weights_of(policy.engine, trained=False)
    sender = WeightSender(policy, bucket_bytes=1 << 13, adapters=policy.adapters)
    receiver = StagedReceiver(torch.device("cpu"), 0, None, frozenset(), model)
    for version in range(3):
        assert policy_step(policy.engine, batches) > 0
        location = str(tmp_path / str(version))
        sent = sender.broadcast(sender.manifest(1, version, "disk", location=location), 10.0)
        receiver.start_receive(encode_manifest(sent), "", 10.0)
        assert wait(receiver)["error"] is None
        assert equal(dict(receiver.take()), policy.merged())
    after = weights_of(policy.engine)
    assert all(not before[name].equal(after[name]) for name in before)
    assert equal(weights_of(policy.engine, trained=False), frozen)

    adapted = logprobs_of(policy.engine, batches)
    assert (adapted - logprobs_of(base, batches)).abs().max() > 0.05
    merged = logprobs_of(plain_model(model, policy.merged(), dtype), batches)
    # Merged weights are rounded to bfloat16; the adapters' contribution to a layer's output is not.
    tolerance = 2e-6 if dtype == "float32" else 0.05
    torch.testing.assert_close(merged, adapted, atol=tolerance, rtol=0)
    with policy.adapters.disabled():
        assert logprobs_of(policy.engine, batches).equal(logprobs_of(base, batches))
    assert logprobs_of(policy.engine, batches).equal(adapted)


def test_merged_weights_follow_the_papers_formula_in_float64(policy_of: PolicyOf, model: Path) -> None:
    policy = policy_of()
    for _ in range(3):
        policy_step(policy.engine, make_micro_batches())
    adapters, merged = weights_of(policy.engine), policy.merged()
    start = dict(plain_model(model).named_parameters())
    touched = {name.partition(".lora_")[0] for name in adapters}
    assert touched == {
        name.removesuffix(".weight") for name in start if "_proj.weight" in name
    }  # every linear layer but the head
    for name in start:
        expected = start[name].detach().double()
        place = name.removesuffix(".weight")
        if place in touched and name.endswith(".weight"):
            matrix_a, matrix_b = (adapters[f"{place}.lora_{x}.default.weight"].double() for x in "AB")
            expected = expected + 12 / 4 * matrix_b @ matrix_a
        torch.testing.assert_close(merged[name].double(), expected, atol=1e-6, rtol=0)


def test_merged_and_adapter_exports_both_load(policy_of: PolicyOf, model: Path, tmp_path: Path) -> None:
    policy = policy_of()
    batches = make_micro_batches()
    policy_step(policy.engine, batches)
    expected = logprobs_of(policy.engine, batches)
    write_export(policy.model, policy.merged(), model, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logprobs_of(merged, batches), expected, atol=2e-6, rtol=0)
    assert {file.name for file in (tmp_path / "merged").iterdir()} == {file.name for file in model.iterdir()}
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()

    policy.adapters.export(model, tmp_path / "adapters", writes=True)
    assert {file.name for file in (tmp_path / "adapters").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    adapted = PeftModel.from_pretrained(plain_model(model), str(tmp_path / "adapters"))
    assert logprobs_of(adapted, batches).equal(expected)


@every_engine
def test_resume_is_bit_exact_and_the_base_is_not_in_the_checkpoint(
    policy_of: PolicyOf, model: Path, tmp_path: Path, engine_settings: Settings
) -> None:
    folder = tmp_path / "000002"
    policy = policy_of(**engine_settings)
    for version in (1, 2):
        policy_step(policy.engine, make_micro_batches(version))
    save({"engine": policy.engine}, folder, policy.config)
    policy_step(policy.engine, make_micro_batches(3))
    expected = policy.merged()
    num_trained = sum(tensor.numel() for tensor in weights_of(policy.engine).values())
    assert read_state(folder).trained_elements == {"engine": num_trained}
    size = sum(file.stat().st_size for file in (folder / "engine").iterdir())
    assert size < 4 * 4 * num_trained + 100_000  # weights, master weights and two moments of the adapters

    resumed = policy_of(seed=7, **engine_settings)
    load({"engine": resumed.engine}, folder, policy.config)
    policy_step(resumed.engine, make_micro_batches(3))
    assert equal(resumed.merged(), expected)
    other = policy_of(LoraOptions(rank=2), **engine_settings)
    with pytest.raises(ConfigError, match=r"trained weights of the policy, .* the same LoRA settings"):
        load({"engine": other.engine}, folder, policy.config)


def test_adapter_initialization_depends_only_on_the_seed(model: Path) -> None:
    def begin(seed: int) -> dict[str, torch.Tensor]:
        module = load_model(model, "float32")
        insert_adapters(module, OPTIONS, seed=seed)
        return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    state = torch.get_rng_state()
    first = begin(3)
    assert torch.get_rng_state().equal(state)
    torch.rand(5)
    assert equal(begin(3), first) and not equal(begin(4), first)


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        (("no_such_layer",), "no_such_layer"),
        (("q_proj", "v_porj"), "no layer v_porj"),
        (("q_proj", "embed_tokens"), "embed_tokens shares its weight with lm_head"),
        (("lm_head",), "lm_head shares its weight with model.embed_tokens"),
    ],
)
def test_layers_that_cannot_have_adapters_are_refused(model: Path, targets: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"target_modules: .*{complaint}"):
        insert_adapters(load_model(model, "float32"), LoraOptions(target_modules=targets), seed=0)


def test_an_untied_head_can_have_adapters_and_an_embedding_cannot(policy_of: PolicyOf, untied_model: Path) -> None:
    policy = policy_of(LoraOptions(rank=2, target_modules=("lm_head", "q_proj")), folder=untied_model)
    batches = make_micro_batches()
    policy_step(policy.engine, batches)
    merged = logprobs_of(plain_model(untied_model, policy.merged()), batches)
    torch.testing.assert_close(merged, logprobs_of(policy.engine, batches), atol=2e-6, rtol=0)
    assert {name.split(".")[-4] for name in weights_of(policy.engine)} == {"lm_head", "q_proj"}
    with pytest.raises(ConfigError, match="embed_tokens is not a linear layer"):
        insert_adapters(load_model(untied_model, "float32"), LoraOptions(target_modules=("embed_tokens",)), seed=0)
