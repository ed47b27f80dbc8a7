"""Every algorithm in the real learner: training does not depend on micro-batches, and every part takes effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.protos.types import RowHeader, TrainBatch
from tandem.trainer.config import TrainerConfig
from tandem.trainer.estimators.options import estimator_models
from tandem.trainer.learner import Learner
from tandem.trainer.off_policy.options import CorrectionOptions
from tandem.trainer.off_policy.presets import PRESETS
from tandem.trainer.policy_losses.options import loss_models
from tests.support.algorithm_groups import groups_of, plain_policy
from tests.support.engine_inputs import equal, weights_of
from tests.support.figures_page import unnamed
from tests.support.learner_rank import all_weights
from tests.support.training_groups import make_batch

Settings = Mapping[str, Any]
Train = Callable[..., tuple[dict[str, Tensor], dict[str, float]]]


def combined() -> Iterator[tuple[str, Settings]]:
    """Combinations in which every estimator, every loss and every preset occurs."""
    advantages, losses = cycle(estimator_models()), cycle(loss_models())
    without_ratio = cycle(name for name, model in loss_models().items() if not model.has_ratio)
    for preset in PRESETS:
        advantage = next(advantages)
        loss = next(without_ratio if CorrectionOptions(preset=preset).needs_ratio_free_loss else losses)
        options = {"name": advantage, **({"k": 2} if advantage == "pkpo" else {})}
        yield f"{advantage}, {loss}, {preset}", {"advantage": options, "loss": loss, "correction": preset}


ALGORITHMS: dict[str, Settings] = {
    **dict(combined()),
    "normalized weights": {"correction": {"weights": {"level": "sequence", "normalize": True}}},
    "clip_cov, half the rows rejected": {
        "loss": {"name": "clip_cov", "fraction": 0.2},
        "correction": {"rejections": [{"level": "token", "measure": "k3", "high": 0.01}]},
    },
    "kl in reward and loss, entropy": {
        "kl": {"reward": {"coefficient": 0.1}, "loss": {"coefficient": 0.1, "estimator": "k2", "target": 0.1}},
        "entropy_coefficient": 0.01,
    },
    "unbiased kl, seq-mean-token-sum-norm": {
        "kl": {"loss": {"coefficient": 0.5, "unbiased": True}},
        "aggregation": "seq-mean-token-sum-norm",
    },
    "overlong, clips, filtration": {
        "selection": {
            "overlong_filter": True,
            "overlong_penalty": {"buffer_tokens": 4},
            "reward_clip": [0.0, 0.8],
            "advantage_clip": 1.0,
            "filtration": {"method": "best_random"},
        },
        "aggregation": "seq-mean-token-mean",
    },
    "critic, clipped values": {
        "advantage": {"name": "gae", "lam": 0.95, "gamma": 0.99},
        "critic": {"learning_rate": 1e-2, "value_clip": 0.5},
    },
}


@pytest.fixture(scope="module")
def policy(model: Path) -> PreTrainedModel:
    return plain_policy(model)


@pytest.fixture(scope="module")
def start(policy: PreTrainedModel) -> dict[str, Tensor]:
    """The weights before the first batch."""
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


@pytest.fixture
def train(model: Path, policy: PreTrainedModel) -> Iterator[Train]:
    """Trains two batches with these settings and closes the learner; returns (weights, metrics of the last batch)."""
    open_learners: list[Learner] = []

    def run(
        settings: Settings,
        budget: int = 2000,
        num_batches: int = 2,
        arrange: Callable[[TrainBatch], TrainBatch] = lambda batch: batch,
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        config = TrainerConfig(**{"learning_rate": 1e-3, "zero_stage": 0, "optimizer_steps_per_batch": 2, **settings})
        learner = Learner(config, model_path=str(model), total_batches=10, seed=0, max_response_tokens=12)
        open_learners.append(learner)
        metrics: dict[str, float] = {}
        num_steps = config.optimizer_steps_per_batch
        for version in range(1, num_batches + 1):
            groups = groups_of(version, policy)
            batch, by_id = make_batch(
                groups, policy_version=version, tokens_per_micro_batch=budget, optimizer_steps=num_steps
            )
            metrics = dict(learner.train(learner.prepare(arrange(batch), by_id)).metrics)
        weights = all_weights(learner)
        open_learners.pop().close()
        return weights, metrics

    yield run
    for learner in open_learners:
        learner.close()


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(sum((one[name] - other[name]).double().square().sum() for name in one) ** 0.5)


def check_close(found: dict[str, float], metrics: dict[str, float], without: Set[str] = frozenset()) -> None:
    for figure in metrics.keys() - {"seconds_train", "seconds_forward_proximal"} - without:
        assert found[figure] == pytest.approx(metrics[figure], rel=5e-3, abs=2e-4), figure


@pytest.mark.parametrize("name", ALGORITHMS)
def test_training_does_not_depend_on_micro_batches(name: str, train: Train, start: dict[str, Tensor]) -> None:
    whole, metrics = train(ALGORITHMS[name])
    cut, cut_metrics = train(ALGORITHMS[name], budget=40)
    assert distance(whole, start) > 0, "it learned nothing"
    assert distance(cut, whole) <= 1e-3 * distance(whole, start)
    assert metrics["skipped_steps"] == 0
    check_close(cut_metrics, metrics, without={"padding_fraction", "num_micro_batches"})
    assert unnamed(metrics) == set(), "docs/metrics.md names every figure"


def shuffled(batch: TrainBatch) -> TrainBatch:
    """Shuffles groups (within their optimizer step), trajectories, micro-batches and the rows of each."""
    random = np.random.default_rng(batch.policy_version)

    def mixed(values: Sequence[Any]) -> list[Any]:
        return [values[place] for place in random.permutation(len(values))]

    steps = {row.group_id: row.optimizer_step for row in batch.plan}
    trajectories: dict[tuple[str, int], list[RowHeader]] = {}
    for header in batch.headers:
        trajectories.setdefault((header.group_id, header.trajectory_id), []).append(header)
    numbers = [mixed(range(count)) for count in batch.num_micro_batches]
    return replace(
        batch,
        group_ids=tuple(sorted(mixed(batch.group_ids), key=steps.__getitem__)),
        headers=tuple(header for segments in mixed(list(trajectories.values())) for header in segments),
        plan=tuple(replace(row, micro_batch=numbers[row.optimizer_step][row.micro_batch]) for row in mixed(batch.plan)),
    )


IN_ANY_ORDER: dict[str, Settings] = {
    "default": {},
    "rejections, m2po, filtration": {
        "loss": {"name": "m2po", "threshold": 0.01},
        "correction": {
            "rejections": [{"level": "token", "measure": "k3", "high": 0.01}],
            "weights": {"normalize": True},
        },
        "selection": {"filtration": {"method": "best_worst"}},
        "aggregation": "seq-mean-token-mean",
    },
    "critic, geometric rejection, kl_cov, kl": {
        "advantage": {"name": "gae", "lam": 0.95},
        "critic": {"learning_rate": 1e-2},
        "loss": {"name": "kl_cov", "fraction": 0.2},
        "correction": {"rejections": [{"level": "geometric", "measure": "k3", "high": 0.02}]},
        "kl": {"reward": {"coefficient": 0.1}, "loss": {"coefficient": 0.1}},
    },
    "token baselines, gspo": {"advantage": "tir_optimal_token_baseline", "loss": "gspo"},
}


@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_training_does_not_depend_on_row_order(name: str, train: Train, start: dict[str, Tensor]) -> None:
    """Shuffles rows and plan together, so that columns, micro-batches and the rows of each micro-batch are in another
    order.
    """
    planned, metrics = train(IN_ANY_ORDER[name], budget=80)
    other, other_metrics = train(IN_ANY_ORDER[name], budget=80, arrange=shuffled)
    assert distance(planned, start) > 0, "it learned nothing"
    assert distance(other, planned) <= 1e-3 * distance(planned, start)
    check_close(other_metrics, metrics)


def test_metrics_are_split_by_staleness(train: Train, policy: PreTrainedModel) -> None:
    _, metrics = train({})
    batch, _ = make_batch(groups_of(2, policy))
    num_loss_tokens = sum(header.num_loss_tokens for header in batch.headers if header.role == "policy")
    assert metrics["staleness_0/num_loss_tokens"] + metrics["staleness_1/num_loss_tokens"] == num_loss_tokens
    assert "staleness_2/num_loss_tokens" not in metrics


def test_a_loss_is_a_mean_over_the_optimizer_steps(train: Train) -> None:
    settings = {"advantage": "gae", "learning_rate": 1e-9, "critic": {"learning_rate": 1e-9}}
    (_, one), (_, two) = (train({**settings, "optimizer_steps_per_batch": n}, num_batches=1) for n in (1, 2))
    assert two["value_loss"] == pytest.approx(one["value_loss"], rel=0.3)
    assert two["loss"] == pytest.approx(one["loss"], abs=0.3 * abs(one["loss"]) + 0.01)


def test_the_critic_warms_up_while_the_policy_is_frozen(train: Train, start: dict[str, Tensor]) -> None:
    settings = {"advantage": "gae", "critic": {"learning_rate": 1e-2, "warmup_batches": 2}}
    still, metrics = train(settings)
    assert distance(still, start) == 0 and metrics["value_loss"] > 0 and metrics["skipped_steps"] == 0
    moved, _ = train(settings, num_batches=3)
    assert distance(moved, start) > 0


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
def test_critic_and_kl_coefficients_resume_bit_for_bit(
    model: Path, policy: PreTrainedModel, tmp_path: Path, stage: int, lora: Mapping[str, int] | None
) -> None:
    penalty = {"coefficient": 0.1, "target": 5.0, "horizon": 100}
    config = TrainerConfig(
        learning_rate=1e-3,
        zero_stage=stage,
        optimizer_steps_per_batch=2,
        advantage="gae",
        critic={"learning_rate": 1e-2, "warmup_batches": 1},
        kl={"reward": penalty, "loss": {**penalty, "coefficient": 0.2}},
        lora=lora,
    )

    def learner_trains(
        versions: range, resumed: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Mapping[str, float]]:
        learner = Learner(config, model_path=str(model), total_batches=10, seed=0, max_response_tokens=12)
        try:
            assert learner._critic is not None
            if resumed:
                assert learner.load(tmp_path / "000002") == 2
            for version in versions:
                batch, by_id = make_batch(
                    groups_of(version, policy), policy_version=version, tokens_per_micro_batch=2000, optimizer_steps=2
                )
                metrics = learner.train(learner.prepare(batch, by_id)).metrics
                if version == 2:
                    learner.save(tmp_path / "000002", 2, 1)
            critic = weights_of(learner._critic.engine)
            return all_weights(learner), critic, metrics
        finally:
            learner.close()

    weights, critic, metrics = learner_trains(range(1, 4), resumed=False)
    again, critic_again, metrics_again = learner_trains(range(3, 4), resumed=True)
    assert equal(again, weights) and equal(critic_again, critic)
    figures = {name for name in metrics if not name.startswith("seconds")}
    assert {name: metrics_again[name] for name in figures} == {name: metrics[name] for name in figures}
    steered = (1 - 0.2 * 16 / 100) ** 2
    assert metrics_again["reward_kl_coefficient"] == pytest.approx(0.1 * steered)
    assert metrics_again["loss_kl_coefficient"] == pytest.approx(0.2 * steered**0.5), (
        "the critic warmed up alone in the first"
    )


def test_adapters_are_exported_under_the_base_models_names(
    model: Path, policy: PreTrainedModel, tmp_path: Path
) -> None:
    config = TrainerConfig(learning_rate=1e-2, lora={"rank": 2}, kl={"loss": {"coefficient": 0.1}})
    learner = Learner(config, model_path=str(model), total_batches=10, seed=0, max_response_tokens=12)
    try:
        start = all_weights(learner)
        batch, by_id = make_batch(groups_of(1, policy), policy_version=1)
        metrics = learner.train(learner.prepare(batch, by_id)).metrics
        assert metrics["reference_kl"] == pytest.approx(0.0, abs=1e-6), "the base weights are the reference"
        trained = all_weights(learner)
        learner.export(tmp_path / "hf")
    finally:
        learner.close()
    moved = {name for name in start if not torch.equal(start[name], trained[name])}
    assert moved and all("proj" in name for name in moved)
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    assert (tmp_path / "hf-adapter" / "adapter_model.safetensors").is_file()
