"""Tests specific to the transformers engine: batches of any architecture, and a failing thread."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Gemma3TextConfig, GPT2Config, Lfm2Config, MambaConfig

from tandem.protos.errors import ConfigError, EnvironmentLackError, ModelError, UnavailableError
from tandem.protos.types import SamplingParameters
from tandem.rollout import engine as engines
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments, find_engine, usable_engine
from tandem.rollout.sampler import SamplingRequest
from tandem.rollout.transformers.batch import Batch, LanguageModel, Row
from tests.support.tiny_model import build_tiny_model

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = ["sliding_attention", "full_attention"]
ARCHITECTURES = {
    "gpt2": GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4),
    "no position ids": BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4),
    "sliding window": Gemma3TextConfig(vocab_size=101, head_dim=8, sliding_window=8, layer_types=LAYERS, **SIZES),
    "convolutions": Lfm2Config(vocab_size=101, layer_types=["conv", "full_attention"], block_ff_dim=64, **SIZES),
}


class NoTokenizer:
    eos_token_id = None


def language_model(config: Any) -> LanguageModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return LanguageModel(model, NoTokenizer())  # type: ignore[arg-type]


def make_rows(number: int, num_prompt_tokens: int) -> list[Row]:
    """Two rows per prompt; each prompt and each answer is one token longer than the previous one."""
    rows = []
    for place in range(number):
        prompt = np.arange(5, 5 + num_prompt_tokens + place // 2, dtype=np.int32)
        rows.append(Row(SamplingRequest("", prompt, SamplingParameters(max_tokens=20 + place), seed=place)))
    return rows


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_rows_that_join_and_leave_a_batch_have_the_log_probs_of_the_model_alone(name: str) -> None:
    chosen = language_model(ARCHITECTURES[name])
    first = Batch(chosen, make_rows(4, 3), (1, 0))
    for _ in range(5):
        first.step((1, 0))
    second = Batch(chosen, make_rows(4, 12), (1, 1))
    batches = [first, second]
    assert first.is_mergeable == second.is_mergeable == (name in ("gpt2", "no position ids"))
    if first.is_mergeable:
        first.merge(second)
        batches = [first]
    ended: list[Row] = []
    while batches := [batch for batch in batches if batch.rows]:
        for batch in batches:
            batch.step((1, 1))
            ended += batch.remove_ended()
    assert len(ended) == 8
    for row in ended:
        num_prompt = len(row.request.prompt_ids)
        ids = torch.tensor([[*row.request.prompt_ids.tolist(), *row.token_ids]])
        logprobs = chosen.model(ids).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 1:, None])[num_prompt - 1 :, 0]
        assert (expected - torch.tensor(row.logprobs)).abs().max() <= 1e-5
        assert len(row.token_ids) == row.request.sampling.max_tokens and row.finish_reason == "length"
    spans = {tuple((span.first_token, span.policy_version) for span in row.spans) for row in ended}
    assert spans == {((0, 0), (6, 1)), ((0, 1),)}


def test_a_model_without_a_kv_cache_is_refused() -> None:
    with pytest.raises(ModelError, match="MambaForCausalLM has no KV cache"):
        language_model(MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=1))


def test_a_step_that_fails_ends_the_engine_and_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny_model(tmp_path / "model", hidden=64)
    config = RolloutConfig(engine="transformers", kv_cache_bytes=4 << 20)

    async def work() -> None:
        sampler = await find_engine("transformers").start(SamplerArguments(config, str(folder), "float32", 256, seed=1))
        await sampler.check()
        monkeypatch.setattr(Batch, "step", Mock(side_effect=RuntimeError("out of memory")))
        with pytest.raises(UnavailableError, match="out of memory"):
            await sampler.sample([5, 6, 7], 2, SamplingParameters(max_tokens=8))
        with pytest.raises(UnavailableError, match="out of memory"):
            await sampler.check()
        sampler.close()
        assert sampler.is_dead

    asyncio.run(work())


def test_rows_whose_prompts_fail_end_with_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny_model(tmp_path / "model", hidden=64)
    config = RolloutConfig(engine="transformers", kv_cache_bytes=4 << 20)

    async def work() -> None:
        sampler = await find_engine("transformers").start(SamplerArguments(config, str(folder), "float32", 256, seed=1))
        monkeypatch.setattr(Batch, "__init__", Mock(side_effect=RuntimeError("out of memory")))
        with pytest.raises(UnavailableError, match="out of memory"):
            async with asyncio.timeout(60.0):
                await sampler.sample([5, 6, 7], 2, SamplingParameters(max_tokens=8))
        sampler.close()

    asyncio.run(work())


def test_tensor_parallel_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.tensor_parallel_size=2.*rollout.num_replicas"):
        find_engine("transformers").check(RolloutConfig(engine="transformers", tensor_parallel_size=2))


def test_a_missing_library_is_named_with_its_pip_command_and_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = engines.importlib.util.find_spec
    assert usable_engine() == "vllm"
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    assert usable_engine() == "transformers"
    said = r"vllm is not installed; install it: pip install 'tandem-rl\[cpu\]'.*set rollout.engine=\"transformers\""
    with pytest.raises(EnvironmentLackError, match=said):
        find_engine("vllm").check(RolloutConfig())
