"""A model that returns token statistics gives the same results as one that returns logits, on one rank and partitioned
over two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

import tandem.trainer.models.token_logprobs
from tandem.trainer.batch.micro_batch import stack
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.token_logprobs import statistics_from_logits
from tandem.trainer.models.token_model import TokenHead, add_token_statistics
from tests.support.engine_inputs import CPU, relative_error
from tests.support.tiny_model import ONE_LAYER, VOCABULARY
from tests.support.token_model_rank import RATE, STEPS, answers, loss_of, make_batches
from tests.trainer.conftest import Ranks


@pytest.fixture(params=["tied", "untied"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str, model: Path, untied_model: Path) -> Path:
    return model if name == "tied" else untied_model


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.trainer.models.token_logprobs, "_CHUNK_LOGITS", 5 * len(VOCABULARY))


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_the_same_as_by_logits(model: Any) -> None:
    """Compares statistics and gradients of this model with those computed from its logits."""
    for batch in make_batches(0):
        logits_NV = model(**batch.inputs).logits[batch.row_N, batch.columns_K[batch.column_N]]
        want = statistics_from_logits(logits_NV, batch.target_N, batch.temperature_N, entropy=True, squared_probs=True)
        got, grown = answers(model, batch), []
        torch.testing.assert_close(list(got), list(want), rtol=1e-5, atol=1e-5)
        for found in (got, want):
            loss_of(found, batch).backward()
            grown.append(gradients(model))
            model.zero_grad()
        torch.testing.assert_close(*grown, rtol=1e-5, atol=1e-6)


def test_token_statistics_equal_those_computed_from_logits(folder: Path, small_chunks: None) -> None:
    plain, model = AutoModelForCausalLM.from_pretrained(folder), load_model(folder, "float32")
    names = [name for name, _ in plain.named_parameters()]
    logits = plain(input_ids=torch.arange(5)[None]).logits
    assert isinstance(model.get_output_embeddings(), TokenHead)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model(input_ids=torch.arange(5)[None]).logits, logits)  # calls without targets are unchanged
    check_the_same_as_by_logits(model)


def test_no_loss_token_gives_zero_gradients(folder: Path) -> None:
    model = load_model(folder, "float32")
    batch = stack([], CPU)
    loss_of(answers(model, batch), batch).backward()
    assert all(gradient is not None and not gradient.any() for gradient in gradients(model).values())


def test_logit_transformations_after_the_head_are_applied() -> None:
    config = Gemma2Config(**ONE_LAYER, head_dim=32, final_logit_softcapping=0.05)
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config)
    add_token_statistics(model)
    assert not isinstance(model.get_output_embeddings(), TokenHead)
    check_the_same_as_by_logits(model)


def trained_plainly(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains the same steps on logits without an engine; returns (weights before, weights after)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(STEPS):
        for batch in make_batches(step):
            loss_of(answers(model, batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return start, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.timeout(600)  # for every scenario of the ranks together
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_two_partitioned_ranks_train_like_plain_torch(folder: Path, name: str, ranks: Ranks) -> None:
    start, want = trained_plainly(folder)
    for rank, report in enumerate(ranks.reports):
        assert relative_error(load_file(ranks.folder / f"{name}{rank}.safetensors"), want, start) <= 1e-4
        assert report[name] < 0.01 * sum(tensor.numel() for tensor in start.values()), "the rest is partitioned"
