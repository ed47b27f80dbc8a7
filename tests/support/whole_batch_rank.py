"""One rank of those that train the same batches, for tests/trainer/test_data_parallel.py; rank 0 writes the weights."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner
from tests.support.algorithm_groups import groups_of, plain_policy
from tests.support.learner_rank import all_weights
from tests.support.training_groups import make_batch, with_broken_row

NUM_BATCHES = 2
CONFIG = TrainerConfig(
    learning_rate=1e-3,
    tokens_per_micro_batch=48,
    optimizer_steps_per_batch=2,
    collective_timeout_seconds=60,
    correction={
        "weights": {"level": "token", "normalize": True},
        "rejections": [{"level": "token", "measure": "k3", "high": 0.01}],
    },
    loss={"name": "m2po", "threshold": 0.001},
    aggregation="seq-mean-token-mean",
)


def train(model: Path, num_batches: int, folder: Path | None = None) -> dict[str, Tensor]:
    """Every weight after this many batches; rank 0 also writes them to `folder` if given."""
    learner = Learner(CONFIG, model_path=str(model), total_batches=10, seed=0, max_response_tokens=12)
    try:
        policy = plain_policy(model)
        for version in range(1, num_batches + 1):
            groups = groups_of(version, policy, num_groups=6, num_samples=3)
            batch, by_id = make_batch(
                [with_broken_row(groups[0]), *groups[1:]],
                policy_version=version,
                world_size=learner.world_size,
                tokens_per_micro_batch=CONFIG.tokens_per_micro_batch,
                optimizer_steps=CONFIG.optimizer_steps_per_batch,
            )
            own = {row.group_id for row in batch.plan if learner.rank in (0, row.rank)}
            learner.train(batch, {group_id: by_id[group_id] for group_id in own})
        weights = all_weights(learner)
        if folder is not None and learner.rank == 0:
            save_file(weights, folder / "weights.safetensors")
        return weights
    finally:
        learner.close()


if __name__ == "__main__":
    train(Path(sys.argv[1]), NUM_BATCHES, Path(sys.argv[2]))
