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
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.token_model import TokenHead, add_token_statistics
from tests.support.ranks import reports_of_ranks
from tests.support.tiny_model import ONE_LAYER, VOCABULARY, build_tiny_model
from tests.support.token_model_rank import CPU, RATE, STEPS, answers, loss_of, make_batches, train

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model(place / name, tied=name == "tied") for name in ("tied", "untied")}


@pytest.fixture(params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, models: dict[str, Path]) -> Path:
    return models[request.param]


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, int]]]:
    """Runs two ranks at stage 3; returns their output folder and the number of elements of each model that each rank
    held.
    """
    folder = tmp_path_factory.mktemp("ranks")
    return folder, reports_of_ranks("tests.support.token_model_rank", *models.values(), folder=folder, seconds=90)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.trainer.models.token_logprobs, "_CHUNK_LOGITS", 5 * len(VOCABULARY))


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_the_same_as_by_logits(model: Any) -> None:
    """Compares statistics and gradients of this model with those computed from the logits of the same model."""
    for batch in make_batches(0):
        found, got = answers(model, batch), None
        loss_of(found, batch).backward()
        got = gradients(model)
        model.zero_grad()
        model.gives_token_statistics = False
        want = answers(model, batch)
        loss_of(want, batch).backward()
        model.gives_token_statistics = True
        for got_N, want_N in zip(found, want, strict=True):
            torch.testing.assert_close(got_N, want_N, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got, gradients(model), rtol=1e-5, atol=1e-6)
        model.zero_grad()


def test_token_statistics_equal_those_computed_from_logits(folder: Path, small_chunks: None) -> None:
    model = load_model(folder, "float32")
    names = [name for name, _ in model.named_parameters()]
    logits = model(input_ids=torch.arange(5)[None]).logits
    add_token_statistics(model)
    assert isinstance(model.get_output_embeddings(), TokenHead)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model(input_ids=torch.arange(5)[None]).logits, logits)  # calls without targets are unchanged
    check_the_same_as_by_logits(model)


def test_no_loss_token_gives_zero_gradients(folder: Path) -> None:
    model = load_model(folder, "float32")
    add_token_statistics(model)
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


def relative_error(got: dict[str, Tensor], folder: Path) -> float:
    """Relative L2 error of the accumulated update."""
    start, want = trained_plainly(folder)
    assert got.keys() == want.keys()
    error = sum(float((got[name] - want[name]).square().sum()) for name in want)
    return (error / sum(float((want[name] - start[name]).square().sum()) for name in want)) ** 0.5


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_trains_like_plain_torch(folder: Path, stage: int, small_chunks: None) -> None:
    weights, _ = train(folder, TrainerConfig(zero_stage=stage, gradient_clip=0.0))
    assert relative_error(weights, folder) <= 1e-4


def test_two_partitioned_ranks_train_like_plain_torch(
    folder: Path, two_ranks: tuple[Path, list[dict[str, int]]]
) -> None:
    place, held = two_ranks
    whole = sum(tensor.numel() for tensor in trained_plainly(folder)[0].values())
    for rank in range(2):
        assert relative_error(load_file(place / f"{folder.name}{rank}.safetensors"), folder) <= 1e-4
        assert held[rank][folder.name] < 0.01 * whole, "the rest is partitioned"
