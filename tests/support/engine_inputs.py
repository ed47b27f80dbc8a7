"""Shared by the engines' tests: random micro-batches, an optimizer step on them, and whole weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tandem.protos.types import Segment
from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.backend.registry import load_backend
from tandem.trainer.batch.micro_batch import MicroBatch, TrainingRow, stack
from tandem.trainer.checkpoints.files import load_checkpoint, save_checkpoint
from tandem.trainer.checkpoints.state import CheckpointState
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.token_model import token_logprobs
from tandem.trainer.rank import Rank

CPU = torch.device("cpu")
NUM_ROWS = 8
NUM_TOKENS = 48.0  # roughly the number of loss tokens for any seed
RATE = 1e-2


def random_rows(seed: int, number: int) -> list[TrainingRow]:
    """Short rows, each with a prompt and a temperature."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        num_prompt, num_sampled = int(random.integers(2, 8)), int(random.integers(1, 12))
        ids = random.integers(3, 98, num_prompt + num_sampled).astype(np.int32)
        loss_mask = (np.arange(len(ids)) >= num_prompt).astype(np.uint8)
        segment = Segment(ids, np.zeros(len(ids), np.float32), loss_mask, ())
        rows.append(TrainingRow(segment, float(random.choice([0.7, 1.0]))))
    return rows


def make_micro_batches(seed: int = 0, *, rank: int = 0, world_size: int = 1, rows_each: int = 2) -> list[MicroBatch]:
    """A rank's part of 8 random rows, cut into micro-batches."""
    own = random_rows(seed, NUM_ROWS)[rank::world_size]
    return [stack(own[first : first + rows_each], CPU) for first in range(0, len(own), rows_each)]


def engine_of(folder: Path, config: TrainerConfig) -> TrainingEngine:
    """The configured backend's engine around the folder's model."""
    return load_backend(config).build_engine(config, load_model(folder, config.dtype))


def save(engines: Mapping[str, TrainingEngine], folder: Path, config: TrainerConfig, version: int = 2) -> None:
    """Saves the engines' checkpoint of a batch, with all ranks of the process group."""
    save_checkpoint(
        engines,
        folder,
        config,
        Rank(CPU),
        batch_version=version,
        incarnation=1,
        optimizer_step=version,
        kl_coefficients={},
    )


def load(engines: Mapping[str, TrainingEngine], folder: Path, config: TrainerConfig) -> CheckpointState:
    """Restores what `save` saved."""
    return load_checkpoint(engines, folder, config, Rank(CPU))


def policy_step(engine: TrainingEngine, micro_batches: Sequence[MicroBatch]) -> float:
    """One REINFORCE step with a different advantage for every token; returns the gradient norm."""
    for batch in micro_batches:
        engine.backward(-torch.dot(token_logprobs(engine, batch), advantages(batch)) / NUM_TOKENS)
    norm = engine.step(RATE)
    assert norm is not None
    return norm


def advantages(batch: MicroBatch) -> Tensor:
    """Advantages of both signs that depend only on the token, not on the rank that trains it."""
    return torch.sin(batch.target_N.float())


@torch.no_grad()
def logprobs_of(model: Any, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Log-probs of all loss tokens, micro-batch by micro-batch."""
    return torch.cat([token_logprobs(model, batch) for batch in micro_batches])


def weights_of(engine: TrainingEngine, *, trained: bool = True) -> dict[str, Tensor]:
    """Whole copies of the trained parameters (or of the frozen ones)."""
    names = [name for name, each in engine.module.named_parameters() if each.requires_grad is trained]
    with engine.gather(names) as tensors:
        return {name: each.to("cpu", copy=True) for name, each in tensors.items()}


def held_elements(module: nn.Module) -> int:
    """Number of parameter elements that this rank holds between two passes."""
    held = [each.to_local() if isinstance(each, DTensor) else each for each in module.parameters()]
    return sum(each.numel() for each in held)


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Relative L2 error of the accumulated update."""
    assert got.keys() == want.keys() <= start.keys()
    error = sum((got[name].double() - want[name].double()).square().sum() for name in want)
    return float((error / sum((want[name].double() - start[name].double()).square().sum() for name in want)) ** 0.5)


def plain_model(folder: Path, weights: dict[str, Tensor] | None = None, dtype: str = "float32") -> Any:
    """The folder's model without an engine, with the given weights if any."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if weights is not None:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model
