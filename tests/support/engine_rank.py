"""One rank of a policy with adapters, its reference and its critic, for tests/trainer/test_learner_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed

from tandem.protos.manifest import encode_manifest
from tandem.trainer.backend.registry import load_backend
from tandem.trainer.config import LoraOptions, TrainerConfig
from tandem.trainer.models.critic import Critic
from tandem.trainer.models.reference import ReferencePolicy
from tandem.trainer.weight_sender import WeightSender
from tests.support.adapter_policy import TrainedPolicy
from tests.support.engine_inputs import (
    NUM_TOKENS,
    RATE,
    advantages,
    equal,
    held_elements,
    load,
    make_micro_batches,
    policy_step,
    save,
    weights_of,
)

STEPS = 3


class Ring(TrainedPolicy):
    """Policy, reference and critic of one rank."""

    def __init__(self, model: Path, config: TrainerConfig) -> None:
        self.backend = load_backend(config)
        self.backend.join_process_group(60)
        super().__init__(model, config, LoraOptions(rank=4), seed=3)
        self.base = ReferencePolicy(self.engine, self.adapters.disabled)
        self.copy = ReferencePolicy.frozen_copy(self.backend, config, model)
        self.critic = Critic(self.backend, config, model)

    def step(self, version: int) -> bool:
        """Trains policy and critic for one step; returns whether both references agreed before it."""
        batches = make_micro_batches(version, rank=self.rank, world_size=distributed.get_world_size(), rows_each=4)
        known = [torch.cat(each.logprobs(batches)) for each in (self.base, self.copy)]
        policy_step(self.engine, batches)
        for batch in batches:
            loss = ((self.critic.values(batch) - advantages(batch)) ** 2).sum() / NUM_TOKENS
            self.critic.engine.backward(loss)
        assert self.critic.engine.step(RATE) is not None
        return torch.equal(*known)

    def weights(self) -> dict[str, Tensor]:
        """The merged policy and the critic, whole."""
        critic = weights_of(self.critic.engine)
        return self.merged() | {f"critic.{name}": tensor for name, tensor in critic.items()}

    def held_fractions(self) -> list[float]:
        """The fractions of policy, reference and critic that this rank's parameters hold between two passes."""
        engines = self.engine, self.copy.engine, self.critic.engine
        return [held_elements(engine.module) / engine.num_elements for engine in engines]

    def close(self) -> None:
        for engine in (self.copy.engine, self.critic.engine, self.engine):
            engine.close()
        self.backend.leave_process_group()


SETTINGS: dict[str, dict[str, Any]] = {
    "deepspeed": {"offload_optimizer": True, "offload_parameters": True, "offload_reference": True},
    "fsdp": {"backend": "fsdp"},
}


def run(model: Path, backend: str, folder: Path) -> dict[str, Any]:
    """Trains, saves, sends and resumes; returns this rank's report."""
    ring = Ring(model, TrainerConfig(**SETTINGS[backend], gradient_checkpointing=True))
    engines = {"engine": ring.engine, "critic": ring.critic.engine}
    same = [ring.step(version) for version in range(1, STEPS)]
    save(engines, folder / "000002", ring.config)
    same.append(ring.step(STEPS))
    weights = ring.weights()
    ring.adapters.export(model, folder / "adapters", writes=ring.rank == 0)
    if ring.rank == 0:
        save_file(weights, folder / "adapted.safetensors")
    sender = WeightSender(ring, bucket_bytes=1 << 13, adapters=ring.adapters)
    version = sender.broadcast(sender.manifest(1, STEPS, "disk", location=str(folder / "version")), 10.0)
    if ring.rank == 0:
        (folder / "manifest.json").write_bytes(encode_manifest(version))
    load(engines, folder / "000002", ring.config)
    ring.step(STEPS)
    return {
        "references_agree": same,
        "resumed_equal": equal(ring.weights(), weights),
        "held_fractions": ring.held_fractions(),
        "most_held": 0.01 if backend == "deepspeed" else 0.51,  # DeepSpeed keeps its shards elsewhere
    }
