"""Updates do not depend on the number of ranks: every loss and aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.types import TrajectoryGroup
from tandem.trainer.aggregation import Aggregation
from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.policy_losses.options import loss_models
from tests.support.loss_tokens import MODES, SMALL
from tests.support.made_up_batch import MadeUpBatch
from tests.support.training_groups import make_group

CORRECTIONS: Sequence[dict[str, Any]] = (
    {},
    {"rejections": [{"level": "token", "measure": "k3", "high": 0.05}]},
    {"rejections": [{"level": "geometric", "measure": "k3", "high": 0.08}], "weights": {"normalize": True}},
)


def make_groups(seed: int) -> list[TrajectoryGroup]:
    """Groups of 1 to 4 answers. Every second answer has two segments, which may be trained on different ranks."""
    return [make_group(index, seed=seed, num_samples=1 + index, num_segments=1 + index % 2) for index in range(4)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", loss_models())
@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    width=st.sampled_from([2, 3, 4, 8]),
    budget=st.sampled_from([24, 60, 4000]),
    num_steps=st.integers(1, 2),
    correction=st.sampled_from(CORRECTIONS),
)
def test_losses_and_gradients_of_ranks_sum_to_those_of_one_rank(
    name: str, mode: Aggregation, seed: int, width: int, budget: int, num_steps: int, correction: dict[str, Any]
) -> None:
    """Each rank gets its own rows and the denominators of the step."""
    config = AlgorithmConfig(
        loss={"name": name, **SMALL.get(name, {})},
        aggregation=mode,
        correction=correction,
        kl={"loss": {"coefficient": 0.1}},
        entropy_coefficient=0.05,
    )
    batch = MadeUpBatch.of(make_groups(seed), seed=seed, num_steps=num_steps)
    generator = torch.Generator().manual_seed(seed)
    counts_R = torch.tensor([0.0, 0.5, 1.0, 2.0]).double()[torch.randint(4, (10,), generator=generator)]
    batch = batch.with_columns(counts_R=counts_R)
    alone, together = batch.outcome(config), batch.outcome(config, world_size=width, budget=budget)
    assert together.num_tokens == alone.num_tokens
    assert together.loss == pytest.approx(alone.loss, abs=1e-6 * (1 + float(alone.by_logprobs_N.abs().sum())))
    torch.testing.assert_close(together.by_logprobs_N, alone.by_logprobs_N, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(together.by_entropy_N, alone.by_entropy_N, rtol=1e-5, atol=1e-8)
