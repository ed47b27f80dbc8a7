"""One rank of a learner in a process of its own, started by tests/test_learner.py: trains, saves, resumes, and writes what it saw."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from protos.errors import DataError
from protos.nouns import SamplingParameters, ScoredTrajectory, TrajectoryGroup
from tests.training_groups import make_batch, make_group
from trainer.config import TrainerConfig
from trainer.learner import Learner

CONFIG = TrainerConfig(
    learning_rate=1e-3, tokens_per_micro_batch=64, optimizer_steps_per_batch=2, collective_timeout_seconds=60
)
NUM_BATCHES = 3


def train_version(learner: Learner, version: int) -> dict[str, float]:
    """Batch `version`, the same whatever the number of ranks; an odd number of rows, so that one rank has fewer."""
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


def all_weights(learner: Learner) -> dict[str, Tensor]:
    """Every parameter, whole."""
    names = [name for name, _, _ in learner.parameter_specs()]
    with learner.gather(names) as tensors:
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def untrainable(group: TrajectoryGroup) -> TrajectoryGroup:
    """The same group as if sampled with top-p."""
    rows = tuple(
        ScoredTrajectory(replace(row.trajectory, sampling=SamplingParameters(top_p=0.9)), row.reward)
        for row in group.scored_rows
    )
    return replace(group, rows=rows)


def bad_rows_error(learner: Learner) -> str:
    """What training says when only the last rank holds rows that cannot be trained."""
    groups = [make_group(i, seed=1) for i in range(4)]
    batch, by_id = make_batch(groups, policy_version=1, world_size=learner.world_size)
    if learner.rank == learner.world_size - 1:
        by_id = {group_id: untrainable(group) for group_id, group in by_id.items()}
    try:
        learner.train(batch, by_id)
    except DataError as error:
        return str(error)
    return "trained"


def main(model: str, folder: Path) -> None:
    learner = Learner(CONFIG, model_path=model, total_batches=NUM_BATCHES, seed=0)
    seen: dict[str, object] = {
        "bad_rows": bad_rows_error(learner),
        "agree": [learner.all_agree(True), learner.all_agree(learner.rank == 0)],
        "told": learner.broadcast_object({"answer": [42, "é"]} if learner.rank == 0 else None),
        "held_elements": sum(parameter.numel() for parameter in learner._model.parameters()),
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
    learner.close()
    (folder / f"rank{learner.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
