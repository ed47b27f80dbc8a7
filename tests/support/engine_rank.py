"""One rank of a policy with adapters, its reference and its critic, for tests/trainer/backend/test_engine_ranks.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed

from tandem.protos.manifest import encode_manifest
from tandem.trainer.backend.registry import load_backend
from tandem.trainer.checkpoints.export import collect_weights
from tandem.trainer.checkpoints.files import load_checkpoint, save_checkpoint
from tandem.trainer.checkpoints.state import CheckpointState
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.critic import Critic
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.lora import Adapters, insert_adapters
from tandem.trainer.models.options import CriticOptions, LoraOptions
from tandem.trainer.models.reference import ReferencePolicy
from tandem.trainer.weight_sender import WeightSender
from tests.support.engine_inputs import (
    NUM_TOKENS,
    advantages,
    held_elements,
    make_micro_batches,
    policy_step,
    weights_of,
)

STEPS = 3


class Ring:
    """Policy, reference and critic of one rank."""

    def __init__(self, model: Path, config: TrainerConfig) -> None:
        self.backend = load_backend(config)
        self.backend.join_process_group(60)
        self.config = config
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.module = load_model(model, config.dtype)
        options = LoraOptions(rank=4)
        adapted = insert_adapters(self.module, options, seed=3)
        self.policy = self.backend.build_engine(config, self.module)
        self.adapters = Adapters(adapted, options, self.policy)
        self.base = ReferencePolicy.base_weights(self.policy, self.adapters)
        self.copy = ReferencePolicy.frozen_copy(self.backend, config, model)
        self.critic = Critic(self.backend, config, CriticOptions(learning_rate=1e-2), model)
        self.parameter_specs = self.adapters.specs
        self.gather = self.adapters.gather

    def step(self, version: int) -> bool:
        """Trains policy and critic for one step; returns whether both references agreed before it."""
        batches = make_micro_batches(version, rank=self.rank, world_size=self.world_size)
        known = [torch.cat(each.logprobs(batches)) for each in (self.base, self.copy)]
        policy_step(self.policy, batches)
        for batch in batches:
            self.critic.backward(((self.critic.values(batch) - advantages(batch)) ** 2).sum() / NUM_TOKENS)
        assert self.critic.step() is not None
        return torch.equal(*known)

    def weights(self) -> dict[str, Tensor]:
        """The merged policy and the critic, whole."""
        merged = collect_weights(self.adapters.specs(), self.adapters.gather, keep=True)
        critic = weights_of(self.critic.engine)
        return merged | {f"critic.{name}": tensor for name, tensor in critic.items()}

    def held_fractions(self) -> list[float]:
        """The fractions of policy, reference and critic that this rank's parameters hold between two passes."""
        engines = self.policy, self.copy._engine, self.critic.engine
        return [held_elements(engine.module) / engine.num_elements for engine in engines]

    def close(self) -> None:
        self.copy.close()
        self.critic.close()
        self.policy.close()
        self.backend.leave_process_group()


SETTINGS: dict[str, dict[str, Any]] = {
    "deepspeed": {"offload_optimizer": True, "offload_parameters": True, "offload_reference": True},
    "fsdp": {"backend": "fsdp"},
}


def main(model: Path, backend: str, folder: Path) -> None:
    config = TrainerConfig(**SETTINGS[backend], gradient_checkpointing=True)
    ring = Ring(model, config)
    known: dict[str, Any] = {"backend": config.backend, "world_size": 2, "zero_stage": 3, "dtype": "float32"}
    both: dict[str, Any] = {"rank": ring.rank}
    engines = {"engine": ring.policy, "critic": ring.critic.engine}
    same = [ring.step(version) for version in range(1, STEPS)]
    state = CheckpointState(batch_version=2, optimizer_step=2, trainer={}, **known)
    save_checkpoint(engines, folder / "000002", state, barrier=distributed.barrier, **both)
    same.append(ring.step(STEPS))
    weights = ring.weights()
    trained = collect_weights(ring.adapters.adapter_specs(), ring.adapters.gather_adapters, keep=ring.rank == 0)
    if ring.rank == 0:
        ring.adapters.write_adapters(trained, str(model), folder / "adapters")
        save_file(weights, folder / "weights.safetensors")
    sender = WeightSender(ring, bucket_bytes=1 << 13, adapters=ring.adapters)
    version = sender.broadcast(sender.manifest(1, STEPS, "disk", location=str(folder / "version")), 10.0)
    if ring.rank == 0:
        (folder / "manifest.json").write_bytes(encode_manifest(version))
    load_checkpoint(engines, folder / "000002", **known, **both)
    ring.step(STEPS)
    again = ring.weights()
    seen = {
        "references_agree": same,
        "resumed_equal": all(again[name].equal(weights[name]) for name in weights),
        "held_fractions": ring.held_fractions(),
        "most_held": 0.01 if backend == "deepspeed" else 0.51,  # DeepSpeed keeps its shards elsewhere
    }
    ring.close()
    (folder / f"rank{both['rank']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
