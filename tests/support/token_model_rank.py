"""Training by token statistics on one of several ranks, for tests/trainer/models/test_token_model.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from tandem.trainer.backend.deepspeed.engine import build_engine
from tandem.trainer.batch.micro_batch import MicroBatch, stack
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.token_logprobs import TokenStatistics
from tandem.trainer.models.token_model import loss_token_statistics
from tests.support.engine_inputs import CPU, random_rows, weights_of

STEPS, NUM_ROWS, RATE = 2, 5, 1e-2


def make_batches(step: int, *, rank: int = 0, world_size: int = 1) -> list[MicroBatch]:
    """A rank's part of 5 rows in micro-batches of two; the last rank's last micro-batch is empty."""
    rows = random_rows(step, NUM_ROWS)
    own = [stack(rows[first : first + 2], CPU) for first in range(0, NUM_ROWS, 2)][rank::world_size]
    return own + [stack([], CPU)] * (rank == world_size - 1)


def loss_of(found: TokenStatistics, batch: MicroBatch) -> Tensor:
    """A loss that depends on every statistic of every token in a different way."""
    assert found.entropy_N is not None and found.squared_probs_N is not None
    factor_N = torch.sin(batch.target_N.float())
    terms_N = factor_N * found.logprobs_N - 0.1 * found.entropy_N + 0.3 * factor_N.square() * found.squared_probs_N
    return terms_N.sum() / 40


def answers(model: Any, batch: MicroBatch) -> TokenStatistics:
    return loss_token_statistics(model, batch, entropy=True, squared_probs=True)


def train(folder: Path) -> tuple[dict[str, Tensor], int]:
    """The whole weights after some steps, and how many elements this rank held whole between the steps."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    model = load_model(folder, "float32")
    engine = build_engine(TrainerConfig(zero_stage=3, gradient_clip=0.0), model)
    for step in range(STEPS):
        batches = make_batches(step, rank=rank, world_size=world_size)
        with torch.no_grad():
            known = [answers(engine, batch).logprobs_N for batch in batches]
        for batch, known_N in zip(batches, known, strict=True):
            found = answers(engine, batch)
            assert torch.equal(found.logprobs_N, known_N)
            engine.backward(loss_of(found, batch))
        assert engine.step(RATE) is not None
    held = sum(parameter.numel() for parameter in model.parameters())
    weights = weights_of(engine)
    engine.close()
    return weights, held
