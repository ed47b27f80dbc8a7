"""Adapters, reference and critic partitioned over two ranks (with DeepSpeed also offloaded) match one unpartitioned
rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tandem.rollout.weight_receiver import StagedReceiver
from tandem.trainer.config import TrainerConfig
from tests.protos.test_weight_group import wait
from tests.support.engine_inputs import logprobs_of, make_micro_batches, plain_model, relative_error
from tests.support.engine_rank import STEPS, Ring
from tests.support.ranks import reports_of_ranks
from tests.support.tiny_model import build_tiny_model

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["deepspeed", "fsdp"])
def two_ranks(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """Runs two ranks; returns their output folder and their reports."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, reports_of_ranks("tests.support.engine_rank", model, request.param, folder=folder, seconds=170)


def test_two_ranks_train_like_one(two_ranks: tuple[Path, list[dict[str, Any]]], model: Path) -> None:
    folder, seen = two_ranks
    alone = Ring(model, TrainerConfig(zero_stage=0))
    start = alone.weights()
    assert all(alone.step(version) for version in range(1, STEPS + 1))
    expected = alone.weights()
    alone.close()
    got = load_file(folder / "weights.safetensors")
    for part in (True, False):
        ours, theirs, begin = (
            {name: tensor for name, tensor in each.items() if name.startswith("critic.") is part}
            for each in (got, expected, start)
        )
        assert relative_error(ours, theirs, begin) <= 1e-4
    for rank in seen:
        assert rank["references_agree"] == [True] * STEPS
        assert all(held < rank["most_held"] for held in rank["held_fractions"]), "the rest is partitioned"


def test_two_ranks_merge_their_adapters_into_the_sent_weights(
    two_ranks: tuple[Path, list[dict[str, Any]]], model: Path
) -> None:
    folder, _ = two_ranks
    receiver = StagedReceiver(torch.device("cpu"), 0, None, frozenset(), model)
    receiver.start_receive((folder / "manifest.json").read_bytes(), "", 10.0)
    assert wait(receiver)["error"] is None
    received, expected = dict(receiver.take()), load_file(folder / "weights.safetensors")
    assert received.keys() == {name for name in expected if not name.startswith("critic.")}
    assert all(tensor.equal(expected[name]) for name, tensor in received.items())


def test_two_ranks_resume_bit_exactly_and_export_adapters(
    two_ranks: tuple[Path, list[dict[str, Any]]], model: Path
) -> None:
    folder, seen = two_ranks
    assert all(rank["resumed_equal"] for rank in seen)
    merged = {
        name: tensor for name, tensor in load_file(folder / "weights.safetensors").items() if "critic." not in name
    }
    adapted = PeftModel.from_pretrained(plain_model(model), str(folder / "adapters"))
    batches = make_micro_batches()
    plain = plain_model(model, merged)
    assert (logprobs_of(adapted, batches) - logprobs_of(plain, batches)).abs().max() <= 2e-6
    assert (logprobs_of(adapted, batches) - logprobs_of(plain_model(model), batches)).abs().max() > 0.05
