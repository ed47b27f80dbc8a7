"""One rank of a policy with adapters, its reference and its critic, as started by
tests/trainer/test_engine_ranks.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed

from tandem.protos.manifest import encode_manifest
from tandem.trainer.checkpoint import CheckpointState
from tandem.trainer.checkpoint_io import load_checkpoint, save_checkpoint
from tandem.trainer.config import TrainerConfig
from tandem.trainer.critic import Critic
from tandem.trainer.engine import build_engine, leave_process_group, start_process_group
from tandem.trainer.engine_options import CriticOptions, LoraOptions
from tandem.trainer.export import collect_weights
from tandem.trainer.lora import Adapters
from tandem.trainer.model import load_model
from tandem.trainer.reference import ReferencePolicy
from tandem.trainer.weight_sender import WeightSender
from tests.support.engine_inputs import NUM_TOKENS, advantages, make_micro_batches, policy_step, weights_of

STEPS = 3


class Ring:
    """Policy, reference and critic of one rank."""

    def __init__(self, model: Path, config: TrainerConfig) -> None:
        start_process_group(60)
        self.config = config
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.module = load_model(model, config.dtype)
        self.adapters = Adapters(self.module, LoraOptions(rank=4), seed=3, zero_stage=config.zero_stage)
        self.policy = build_engine(config, self.module)
        self.base = ReferencePolicy.base_weights(self.policy, self.adapters)
        self.copy = ReferencePolicy.frozen_copy(config, model)
        self.critic = Critic(config, CriticOptions(learning_rate=1e-2), model)
        self.parameter_specs = self.adapters.specs
        self.gather = self.adapters.gather

    def step(self, version: int) -> bool:
        """A step of policy and critic; True if both references said the same before it."""
        batches = make_micro_batches(version, rank=self.rank, world_size=self.world_size)
        known = [torch.cat(each.logprobs(batches)) for each in (self.base, self.copy)]
        policy_step(self.policy, batches, world_size=self.world_size)
        for batch in batches:
            self.critic.backward(((self.critic.values(batch) - advantages(batch)) ** 2).sum() / NUM_TOKENS)
        assert self.critic.step() is not None
        return torch.equal(*known)

    def weights(self) -> dict[str, Tensor]:
        """The policy merged and the critic, whole."""
        merged = collect_weights(self.adapters.specs(), self.adapters.gather, keep=True)
        critic = weights_of(self.critic.engine, TrainerConfig())
        return merged | {f"critic.{name}": tensor for name, tensor in critic.items()}

    def held_elements(self) -> list[int]:
        """Numbers that are whole on this rank between two passes: policy, reference, critic."""
        modules = self.module, self.copy._engine.module, self.critic.engine.module
        return [sum(parameter.numel() for parameter in module.parameters()) for module in modules]

    def close(self) -> None:
        self.copy.close()
        self.critic.close()
        self.policy.destroy()
        leave_process_group()


def main(model: Path, folder: Path) -> None:
    config = TrainerConfig(
        offload_optimizer=True, offload_parameters=True, offload_reference=True, gradient_checkpointing=True
    )
    ring = Ring(model, config)
    known: dict[str, Any] = {"world_size": 2, "zero_stage": 3, "dtype": "float32"}
    both: dict[str, Any] = {"rank": ring.rank, "beside": {"critic": ring.critic.engine}}
    same = [ring.step(version) for version in range(1, STEPS)]
    state = CheckpointState(batch_version=2, optimizer_step=2, trainer={}, **known)
    save_checkpoint(ring.policy, folder / "000002", state, barrier=distributed.barrier, **both)
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
    load_checkpoint(ring.policy, folder / "000002", **known, **both)
    ring.step(STEPS)
    again = ring.weights()
    seen = {
        "references_agree": same,
        "resumed_equal": all(again[name].equal(weights[name]) for name in weights),
        "held_elements": ring.held_elements(),
    }
    ring.close()
    (folder / f"rank{both['rank']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
