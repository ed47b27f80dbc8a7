"""What one rank of a learner does in tests/trainer/test_learner_ranks.py, and batches to train there."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tandem.protos.errors import DataError
from tandem.protos.types import SamplingParameters, ScoredTrajectory, TrajectoryGroup
from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner
from tests.support.algorithm_groups import groups_of, plain_policy
from tests.support.engine_inputs import equal, held_elements, weights_of
from tests.support.training_groups import make_batch, make_group, with_broken_row

CONFIG = TrainerConfig(
    learning_rate=1e-3, tokens_per_micro_batch=96, optimizer_steps_per_batch=2, collective_timeout_seconds=60
)
NUM_BATCHES = 3

_WHOLE = {"learning_rate": 1e-3, "tokens_per_micro_batch": 48, "optimizer_steps_per_batch": 2}


@dataclass(frozen=True)
class WholeBatch:
    """An algorithm that uses the whole batch at once; its result must not depend on its split over `num_ranks`.
    `broken`: one row has a log-prob that is not finite.
    """

    config: TrainerConfig
    num_ranks: int = 2
    broken: bool = False


WHOLE_BATCH = {
    "critic, rejected rows, clip_cov, adaptive KL": WholeBatch(
        TrainerConfig(
            **_WHOLE,
            advantage={"name": "gae", "gamma": 0.99, "lam": 0.95, "whiten": True},
            critic={"learning_rate": 1e-2, "value_clip": 0.01},
            correction={
                "weights": {"level": "token", "normalize": True},
                "rejections": [{"level": "sequence", "measure": "ratio", "low": 0.7, "high": 1.4}],
            },
            loss={"name": "clip_cov", "fraction": 0.3, "covariance_low": -10.0, "covariance_high": 10.0},
            kl={
                "reward": {"coefficient": 0.1, "target": 0.01, "horizon": 100},
                "loss": {"coefficient": 0.1, "target": 5.0, "horizon": 100},
            },
            entropy_coefficient=0.01,
            aggregation="seq-mean-token-mean",
        )
    ),
    "components, m2po, geometric rejection, filtration, epochs": WholeBatch(
        TrainerConfig(
            **_WHOLE,
            epochs_per_batch=2,
            advantage="gdpo",
            correction={"rejections": [{"level": "geometric", "measure": "k3", "high": 0.02}]},
            loss={"name": "m2po", "threshold": 0.001},
            selection={"filtration": {"method": "best_random", "resample": True}, "overlong_filter": True},
            aggregation="seq-mean-token-sum-norm",
        )
    ),
    "token baselines, kl_cov, bypassed, rows end to end": WholeBatch(
        TrainerConfig(
            **_WHOLE,
            packing="flat",
            advantage="optimal_token_baseline",
            correction={"preset": "bypass_geo_rs", "rejections": [{"level": "geometric", "low": 0.9, "high": 1.1}]},
            # At 0.2 one weight's gradient cancels to rounding error, which Adam turns into a step.
            loss={"name": "kl_cov", "fraction": 0.25},
        )
    ),
    "token rejection, m2po, normalized weights, a broken row": WholeBatch(
        TrainerConfig(
            **_WHOLE,
            correction={
                "weights": {"level": "token", "normalize": True},
                "rejections": [{"level": "token", "measure": "k3", "high": 0.01}],
            },
            loss={"name": "m2po", "threshold": 0.001},
            aggregation="seq-mean-token-mean",
        ),
        num_ranks=4,
        broken=True,
    ),
}


def train_version(learner: Learner, version: int) -> dict[str, float]:
    """Trains batch `version`, the same for any number of ranks. Its number of rows is odd, so one rank has fewer."""
    groups = [make_group(i, seed=version, num_samples=3, versions=(version - 1,)) for i in range(5)]
    batch, by_id = make_batch(
        groups,
        policy_version=version,
        world_size=learner.world_size,
        tokens_per_micro_batch=CONFIG.tokens_per_micro_batch,
        optimizer_steps=CONFIG.optimizer_steps_per_batch,
    )
    own = {row.group_id for row in batch.plan if row.rank == learner.rank}
    return dict(learner.train(learner.prepare(batch, {group_id: by_id[group_id] for group_id in own})).metrics)


def train_whole_batch(
    case: WholeBatch, backend: str, model: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Trains a new learner on two batches; returns all weights of policy and critic before and after, and the last
    batch's metrics.
    """
    config = _on_all_ranks(case.config.model_copy(update={"collective_timeout_seconds": 60}), backend)
    learner = Learner(config, model_path=str(model), total_batches=10, seed=0, max_response_tokens=12)
    start = _policy_and_critic(learner)
    metrics: dict[str, float] = {}
    for version in (1, 2):
        first, *groups = groups_of(version, plain_policy(model), num_groups=6, num_samples=3)
        batch, by_id = make_batch(
            [with_broken_row(first) if case.broken else first, *groups],
            policy_version=version,
            world_size=learner.world_size,
            tokens_per_micro_batch=config.tokens_per_micro_batch,
            optimizer_steps=config.optimizer_steps_per_batch,
            packing=learner.packings[-1],
        )
        own = {row.group_id for row in batch.plan if learner.rank in (0, row.rank)}
        trains_all = learner.rank == 0 or version == 1 or config.packing == "flat" or case.broken
        assert trains_all or len(own) < len(by_id), "a rank hears of groups it does not train"
        metrics = dict(learner.train(learner.prepare(batch, {group_id: by_id[group_id] for group_id in own})).metrics)
    weights = _policy_and_critic(learner)
    if learner.world_size == 1:  # several ranks leave their process group together at the end
        learner.close()
    return start, weights, metrics


def _on_all_ranks(config: TrainerConfig, backend: str) -> TrainerConfig:
    """The configuration for this backend and this process' number of ranks, on which the ZeRO stage depends."""
    return config.model_copy(update={"backend": backend, "num_ranks": int(os.environ.get("WORLD_SIZE", "1"))})


def _policy_and_critic(learner: Learner) -> dict[str, Tensor]:
    critic = {} if learner._critic is None else weights_of(learner._critic.engine)
    return all_weights(learner) | {f"critic.{name}": weight for name, weight in critic.items()}


def all_weights(learner: Learner) -> dict[str, Tensor]:
    """Every parameter, whole."""
    names = [name for name, _, _ in learner.parameter_specs()]
    with learner.gather(names) as tensors:
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def untrainable(group: TrajectoryGroup) -> TrajectoryGroup:
    """The same group as if it was sampled with top-p."""
    rows = tuple(
        ScoredTrajectory(replace(row.trajectory, sampling=SamplingParameters(top_p=0.9)), row.reward)
        for row in group.scored_rows
    )
    return replace(group, rows=rows)


def bad_rows_error(learner: Learner) -> str:
    """The training error when only the last rank holds rows that cannot be trained."""
    groups = [make_group(i, seed=1) for i in range(4)]
    batch, by_id = make_batch(groups, policy_version=1, world_size=learner.world_size)
    if learner.rank == learner.world_size - 1:
        by_id = {group_id: untrainable(group) for group_id, group in by_id.items()}
    try:
        learner.train(learner.prepare(batch, by_id))
    except DataError as error:
        return str(error)
    return "trained"


def run(model: Path, backend: str, folder: Path) -> dict[str, Any]:
    """Trains, saves, resumes and exports; returns this rank's report."""
    config = _on_all_ranks(CONFIG, backend)
    learner = Learner(config, model_path=str(model), total_batches=NUM_BATCHES, seed=0, max_response_tokens=16)
    report: dict[str, Any] = {
        "bad_rows": bad_rows_error(learner),
        "agree": [learner.all_agree(True), learner.all_agree(learner.rank == 0)],
        "told": learner.broadcast_object({"answer": [42, "é"]} if learner.rank == 0 else None),
        "held_elements": held_elements(learner._model),
        "specs": learner.parameter_specs(),
    }
    checkpoint = folder / "checkpoints" / f"{NUM_BATCHES - 1:06d}"
    for version in range(1, NUM_BATCHES):
        train_version(learner, version)
    learner.save(checkpoint, NUM_BATCHES - 1, 1)
    report["metrics"] = train_version(learner, NUM_BATCHES)
    weights = all_weights(learner)
    learner.export(folder / "export")
    if learner.rank == 0:
        save_file(weights, folder / "weights.safetensors")
    report |= {"resumed_at": learner.load(checkpoint), "optimizer_step": learner.optimizer_step}
    train_version(learner, NUM_BATCHES)
    return report | {"resumed_equal": equal(all_weights(learner), weights)}
