"""One rank of a learner as a process, for tests/trainer/test_learner.py: it trains, saves, resumes and reports."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tandem.protos.errors import DataError
from tandem.protos.types import SamplingParameters, ScoredTrajectory, TrajectoryGroup
from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner
from tests.support.algorithm_groups import groups_of, plain_policy
from tests.support.engine_inputs import held_elements, weights_of
from tests.support.training_groups import make_batch, make_group

CONFIG = TrainerConfig(
    learning_rate=1e-3, tokens_per_micro_batch=64, optimizer_steps_per_batch=2, collective_timeout_seconds=60
)
NUM_BATCHES = 3

_WHOLE = {"learning_rate": 1e-3, "tokens_per_micro_batch": 48, "optimizer_steps_per_batch": 2}
WHOLE_BATCH: dict[str, TrainerConfig] = {
    "critic, rejected rows, clip_cov, adaptive KL": TrainerConfig(
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
    ),
    "components, m2po, geometric rejection, filtration": TrainerConfig(
        **_WHOLE,
        advantage="gdpo",
        correction={"rejections": [{"level": "geometric", "measure": "k3", "high": 0.02}]},
        loss={"name": "m2po", "threshold": 0.001},
        selection={"filtration": {"method": "best_random", "resample": True}, "overlong_filter": True},
        aggregation="seq-mean-token-sum-norm",
    ),
    "token baselines, kl_cov, bypassed, rows end to end": TrainerConfig(
        **_WHOLE,
        packing="flat",
        advantage="optimal_token_baseline",
        correction={"preset": "bypass_geo_rs", "rejections": [{"level": "geometric", "low": 0.9, "high": 1.1}]},
        # At 0.2 one weight's gradient cancels to rounding error, which Adam turns into a step.
        loss={"name": "kl_cov", "fraction": 0.25},
    ),
}
"""Algorithms that use the whole batch at once; their result must not depend on its split over the ranks."""


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
    return dict(learner.train(batch, {group_id: by_id[group_id] for group_id in own}).metrics)


def train_whole_batch(
    config: TrainerConfig, model: str, num_batches: int = 2
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Trains a new learner on this rank; returns all weights of policy and critic, and the last batch's metrics."""
    learner = Learner(config, model_path=model, total_batches=10, seed=0, max_response_tokens=12)
    policy = plain_policy(Path(model))
    metrics: dict[str, float] = {}
    for version in range(1, num_batches + 1):
        batch, by_id = make_batch(
            groups_of(version, policy, num_groups=6, num_samples=3),
            policy_version=version,
            world_size=learner.world_size,
            tokens_per_micro_batch=config.tokens_per_micro_batch,
            optimizer_steps=config.optimizer_steps_per_batch,
            packing=learner.packing,
        )
        own = {row.group_id for row in batch.plan if learner.rank in (0, row.rank)}
        hears_of_more = learner.rank == 0 or version == 1 or config.packing == "flat" or len(own) < len(by_id)
        assert hears_of_more, "a rank hears of groups it does not train"
        metrics = dict(learner.train(batch, {group_id: by_id[group_id] for group_id in own}).metrics)
    weights = all_weights(learner)
    if learner._critic is not None:
        critic = weights_of(learner._critic.engine)
        weights |= {f"critic.{name}": weight for name, weight in critic.items()}
    if learner.world_size == 1:  # several ranks leave their process group together at the end
        learner.close()
    return weights, metrics


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
        learner.train(batch, by_id)
    except DataError as error:
        return str(error)
    return "trained"


def main(model: str, backend: str, folder: Path) -> None:
    config = CONFIG.model_copy(update={"backend": backend})
    learner = Learner(config, model_path=model, total_batches=NUM_BATCHES, seed=0, max_response_tokens=16)
    seen: dict[str, object] = {
        "bad_rows": bad_rows_error(learner),
        "agree": [learner.all_agree(True), learner.all_agree(learner.rank == 0)],
        "told": learner.broadcast_object({"answer": [42, "é"]} if learner.rank == 0 else None),
        "held_elements": held_elements(learner._model),
        "specs": learner.parameter_specs(),
    }
    for version in range(1, NUM_BATCHES):
        train_version(learner, version)
    learner.save(folder / "checkpoints" / f"{NUM_BATCHES - 1:06d}", NUM_BATCHES - 1)
    seen["metrics"] = train_version(learner, NUM_BATCHES)
    weights = all_weights(learner)
    learner.export(folder / "export")
    if learner.rank == 0:
        save_file(weights, folder / "weights.safetensors")
    seen["resumed_at"] = learner.load(folder / "checkpoints" / f"{NUM_BATCHES - 1:06d}")
    seen["optimizer_step"] = learner.optimizer_step
    train_version(learner, NUM_BATCHES)
    again = all_weights(learner)
    seen["resumed_equal"] = all(again[name].equal(weights[name]) for name in weights)
    metrics = {}
    whole_batch = WHOLE_BATCH if learner.world_size == 2 else {}
    for number, (name, config) in enumerate(whole_batch.items()):
        weights, metrics[name] = train_whole_batch(config.model_copy(update={"backend": backend}), model)
        if learner.rank == 0:
            save_file(weights, folder / f"whole{number}.safetensors")
    seen["whole_batch"] = metrics
    learner.close()
    (folder / f"rank{learner.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
