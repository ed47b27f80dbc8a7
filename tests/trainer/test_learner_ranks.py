"""The learner over several ranks, on both backends, trains like one rank and resumes bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.protos.errors import ConfigError
from tandem.trainer.learner import Learner
from tests.support import learner_rank
from tests.support.engine_inputs import equal, relative_error
from tests.support.learner_rank import all_weights
from tests.support.ranks import reports_of_ranks
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.timeout(240)  # for all ranks of a fixture together


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@dataclass(frozen=True)
class Ranks:
    """The output folder of a learner's ranks and each rank's report."""

    backend: str
    folder: Path
    reports: list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    backend, num_ranks = request.param
    folder = tmp_path_factory.mktemp("ranks")
    reports = reports_of_ranks(
        "tests.support.learner_rank", model, backend, folder=folder, seconds=170, num_ranks=num_ranks
    )
    return Ranks(backend, folder, reports)


TWO_RANKS = [("deepspeed", 2), ("fsdp", 2)]
two_ranks = pytest.mark.parametrize("ranks", TWO_RANKS, ids=str, indirect=True)


@pytest.fixture(scope="module")
def alone(model: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """(first weights, last weights, last metrics) of one rank with DeepSpeed on the batches of `learner_rank`."""
    learner = Learner(
        learner_rank.CONFIG,
        model_path=str(model),
        total_batches=learner_rank.NUM_BATCHES,
        seed=0,
        max_response_tokens=16,
    )
    start = all_weights(learner)
    metrics = [learner_rank.train_version(learner, version) for version in range(1, learner_rank.NUM_BATCHES + 1)][-1]
    weights = all_weights(learner)
    learner.close()
    return start, weights, metrics


@pytest.mark.parametrize("ranks", [*TWO_RANKS, ("fsdp", 4)], ids=str, indirect=True)
def test_several_ranks_of_either_backend_agree_with_one_of_deepspeed(
    ranks: Ranks, alone: tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]
) -> None:
    start, weights, metrics = alone
    got = load_file(ranks.folder / "weights.safetensors")
    assert max(float((got[name] - weights[name]).abs().max()) for name in weights) <= 1e-5
    assert relative_error(got, weights, start) <= 1e-4
    num_elements = sum(tensor.numel() for tensor in start.values())
    # DeepSpeed keeps the shards outside the parameters.
    most_held = 0.01 if ranks.backend == "deepspeed" else 1 / len(ranks.reports) + 0.01
    for report in ranks.reports:
        assert report["held_elements"] < most_held * num_elements, "the rest is partitioned"
        assert report["resumed_equal"] and report["resumed_at"] == 2
        for name in ("loss", "grad_norm", "effective_sample_size", "behavior_proximal_kl", "clipped_fraction"):
            assert report["metrics"][name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6), name


HOW_IT_WAS_CUT = {"padding_fraction", "num_micro_batches", "seconds_train", "seconds_forward_proximal"}


@pytest.mark.parametrize("name", learner_rank.WHOLE_BATCH)
@two_ranks
def test_whole_batch_operations_do_not_depend_on_ranks(ranks: Ranks, model: Path, name: str) -> None:
    folder = ranks.folder
    config = learner_rank.WHOLE_BATCH[name]
    start, _ = learner_rank.train_whole_batch(config, str(model), num_batches=0)
    weights, metrics = learner_rank.train_whole_batch(config, str(model))
    number = list(learner_rank.WHOLE_BATCH).index(name)
    of_two = load_file(folder / f"whole{number}.safetensors")
    assert of_two.keys() == weights.keys()
    for part in {key.partition(".")[0] for key in weights}:  # the policy's and the critic's
        mine, theirs = (
            {key: weight for key, weight in each.items() if key.startswith(part)} for each in (weights, of_two)
        )
        assert relative_error(theirs, mine, start) <= 1e-4, part
    for report in ranks.reports:
        theirs = report["whole_batch"][name]
        assert theirs.keys() == metrics.keys()
        for figure in metrics.keys() - HOW_IT_WAS_CUT:
            assert theirs[figure] == pytest.approx(metrics[figure], rel=1e-4, abs=1e-6), figure


@two_ranks
def test_two_ranks_resume_bit_exactly_and_export(ranks: Ranks, model: Path) -> None:
    folder = ranks.folder
    for report in ranks.reports:
        assert report["resumed_equal"] and report["resumed_at"] == 2 and report["optimizer_step"] == 4
    exported = AutoModelForCausalLM.from_pretrained(folder / "export")
    weights = {name: parameter.detach() for name, parameter in exported.named_parameters()}
    assert equal(weights, load_file(folder / "weights.safetensors"))
    config = learner_rank.CONFIG.model_copy(update={"backend": ranks.backend})
    learner = Learner(config, model_path=str(model), total_batches=10, seed=0, max_response_tokens=16)
    with pytest.raises(ConfigError, match=r"num_ranks × trainer\.num_nodes = 2, not 1: resume with 2"):
        learner.load(folder / "checkpoints" / "000002")
    learner.close()


@two_ranks
def test_two_ranks_agree_on_votes_values_and_refusals(ranks: Ranks) -> None:
    first, second = ranks.reports
    for report in ranks.reports:
        assert report["agree"] == [True, False]
        assert report["told"] == {"answer": [42, "é"]}
    assert first["specs"] == second["specs"]
    assert "another rank" in first["bad_rows"]
    assert "only temperature > 0" in second["bad_rows"]
