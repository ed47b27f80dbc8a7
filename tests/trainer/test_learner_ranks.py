"""Two and four ranks of either backend train, send and resume like one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.protos.errors import ConfigError
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner
from tests.support import learner_rank
from tests.support.engine_inputs import equal, logprobs_of, make_micro_batches, plain_model, relative_error
from tests.support.engine_rank import STEPS, Ring
from tests.support.learner_rank import NUM_BATCHES, WHOLE_BATCH, all_weights
from tests.support.weight_pair import wait
from tests.trainer.conftest import Ranks

pytestmark = pytest.mark.timeout(600)  # for every scenario of all ranks together
Weights = dict[str, Tensor]
each_backend = pytest.mark.parametrize("backend", ["deepspeed", "fsdp"])
two_ranks = pytest.mark.parametrize("ranks", [2], indirect=True)


def policy(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if not name.startswith("critic.")}


def check_update(got: Weights, want: Weights, start: Weights) -> None:
    """Compares the updates of the policy and of the critic, if there is one."""
    assert got.keys() == want.keys()
    for part in (policy(want).keys(), want.keys() - policy(want).keys()):
        assert not part or relative_error({n: got[n] for n in part}, {n: want[n] for n in part}, start) <= 1e-4


@pytest.fixture(scope="module")
def alone(model: Path) -> tuple[Weights, Weights, dict[str, float]]:
    """(first weights, last weights, last metrics) of one rank with DeepSpeed on the batches of `learner_rank`."""
    learner = Learner(
        learner_rank.CONFIG, model_path=str(model), total_batches=NUM_BATCHES, seed=0, max_response_tokens=16
    )
    start = all_weights(learner)
    metrics = [learner_rank.train_version(learner, version) for version in range(1, NUM_BATCHES + 1)][-1]
    weights = all_weights(learner)
    learner.close()
    return start, weights, metrics


@each_backend
def test_several_ranks_of_either_backend_agree_with_one_of_deepspeed(
    ranks: Ranks, backend: str, alone: tuple[Weights, Weights, dict[str, float]]
) -> None:
    start, weights, metrics = alone
    got = load_file(ranks.folder / backend / "weights.safetensors")
    assert max(float((got[name] - weights[name]).abs().max()) for name in weights) <= 1e-5
    assert relative_error(got, weights, start) <= 1e-4
    num_elements = sum(tensor.numel() for tensor in start.values())
    # DeepSpeed keeps the shards outside the parameters.
    most_held = 0.01 if backend == "deepspeed" else 1 / len(ranks.reports) + 0.01
    for report in ranks.reports:
        assert report[backend]["held_elements"] < most_held * num_elements, "the rest is partitioned"
        for name in ("loss", "grad_norm", "effective_sample_size", "behavior_proximal_kl", "clipped_fraction"):
            assert report[backend]["metrics"][name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6), name


@each_backend
def test_several_ranks_resume_bit_exactly_and_export(ranks: Ranks, model: Path, backend: str) -> None:
    folder, width = ranks.folder / backend, len(ranks.reports)
    for report in ranks.reports:
        assert report[backend]["resumed_equal"]
        assert (report[backend]["resumed_at"], report[backend]["optimizer_step"]) == (2, 4)
    exported = AutoModelForCausalLM.from_pretrained(folder / "export")
    weights = {name: parameter.detach() for name, parameter in exported.named_parameters()}
    assert equal(weights, load_file(folder / "weights.safetensors"))
    config = learner_rank.CONFIG.model_copy(update={"backend": backend})
    learner = Learner(config, model_path=str(model), total_batches=10, seed=0, max_response_tokens=16)
    with pytest.raises(ConfigError, match=rf"num_ranks × trainer\.num_nodes = {width}, not 1: resume with {width}"):
        learner.load(folder / "checkpoints" / "000002")
    learner.close()


@each_backend
def test_several_ranks_agree_on_votes_values_and_refusals(ranks: Ranks, backend: str) -> None:
    *others, last = (report[backend] for report in ranks.reports)
    for report in (*others, last):
        assert report["agree"] == [True, False]
        assert report["told"] == {"answer": [42, "é"]}
        assert report["specs"] == last["specs"]
    assert all("another rank" in report["bad_rows"] for report in others)
    assert "only temperature > 0" in last["bad_rows"]


HOW_IT_WAS_CUT = {"padding_fraction", "shared_fraction", "num_micro_batches"}
HOW_IT_WAS_CUT |= {"seconds_train", "seconds_forward_proximal"}


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(case.num_ranks, name, marks=[pytest.mark.slow] if case.num_ranks > 2 else [])
        for name, case in WHOLE_BATCH.items()
    ],
    indirect=["ranks"],
)
def test_whole_batch_operations_do_not_depend_on_ranks(ranks: Ranks, model: Path, name: str) -> None:
    start, weights, metrics = learner_rank.train_whole_batch(WHOLE_BATCH[name], "deepspeed", model)
    for backend in ("deepspeed", "fsdp"):
        got = load_file(ranks.folder / backend / f"whole{list(WHOLE_BATCH).index(name)}.safetensors")
        check_update(got, weights, start)
        for report in ranks.reports:
            figures = report[backend]["whole_batch"][name]
            assert figures.keys() == metrics.keys()
            for figure in metrics.keys() - HOW_IT_WAS_CUT:
                assert figures[figure] == pytest.approx(metrics[figure], rel=1e-4, abs=1e-6), figure


@two_ranks
def test_adapters_and_critic_of_two_ranks_train_like_one_unpartitioned_rank(ranks: Ranks, model: Path) -> None:
    """With DeepSpeed the two ranks also offload."""
    one = Ring(model, TrainerConfig(zero_stage=0))
    start = one.weights()
    assert all(one.step(version) for version in range(1, STEPS + 1))
    expected = one.weights()
    one.close()
    for backend in ("deepspeed", "fsdp"):
        check_update(load_file(ranks.folder / backend / "adapted.safetensors"), expected, start)
        for report in ranks.reports:
            adapters = report[backend]["adapters"]
            assert adapters["references_agree"] == [True] * STEPS and adapters["resumed_equal"]
            assert all(held < adapters["most_held"] for held in adapters["held_fractions"]), "the rest is partitioned"


@two_ranks
@each_backend
def test_two_ranks_send_their_merged_adapters_and_export_them(ranks: Ranks, model: Path, backend: str) -> None:
    folder = ranks.folder / backend
    merged = policy(load_file(folder / "adapted.safetensors"))
    receiver = StagedReceiver(torch.device("cpu"), 0, None, frozenset(), model)
    receiver.start_receive((folder / "manifest.json").read_bytes(), "", 10.0)
    assert wait(receiver)["error"] is None
    assert equal(dict(receiver.take()), merged)

    adapted = PeftModel.from_pretrained(plain_model(model), str(folder / "adapters"))
    batches = make_micro_batches()
    plain = plain_model(model, merged)
    assert (logprobs_of(adapted, batches) - logprobs_of(plain, batches)).abs().max() <= 2e-6
    assert (logprobs_of(adapted, batches) - logprobs_of(plain_model(model), batches)).abs().max() > 0.05
