"""Rejected tokens change no value, gradient, denominator, selection or row ratio of any loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tandem.protos.types import TrajectoryGroup
from tandem.trainer.aggregation import Aggregation, token_shares
from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.batch.ragged import keep_tokens
from tandem.trainer.learner import Learner
from tandem.trainer.policy_losses.inputs import LossTokens
from tandem.trainer.policy_losses.registry import find_loss
from tests.support.learner_rank import all_weights
from tests.support.loss_tokens import MODES, SMALL, every_loss, options_of, run
from tests.support.made_up_batch import MAX_TOKENS, MadeUpBatch
from tests.support.training_groups import make_batch, make_group, with_broken_row

TOKENS: Mapping[str, Any] = {"level": "token", "measure": "k3", "high": 0.05}
ROWS: Mapping[str, Any] = {"level": "geometric", "measure": "k3", "high": 0.08}
every_level = pytest.mark.parametrize("rejection", [TOKENS, ROWS], ids=["tokens", "rows"])


def config_of(name: str, mode: Aggregation = "token-mean", **settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(loss={"name": name, **SMALL.get(name, {})}, aggregation=mode, **settings)


@pytest.fixture(scope="module")
def batch() -> MadeUpBatch:
    """Four groups. Two have trajectories of two segments, which are separate rows."""
    return MadeUpBatch.of([make_group(index, num_samples=3, num_segments=1 + index % 2) for index in range(4)])


def log_ratios(batch: MadeUpBatch) -> Tensor:
    assert batch.start.proximal_N is not None and batch.start.behavior_N is not None
    return (batch.start.proximal_N - batch.start.behavior_N).double()


def kept_of(batch: MadeUpBatch, rejection: Mapping[str, Any]) -> Tensor:
    """Which tokens pass the rejections, bool (N,), computed from the definition."""
    z_N = log_ratios(batch)
    k3_N = z_N.exp() - 1 - z_N
    if rejection["level"] == "geometric":
        k3_N = torch.cat([row_N.mean().expand(len(row_N)) for row_N in rows_of(batch, k3_N)])
    keep_N = k3_N <= rejection["high"]
    assert 0 < int(keep_N.sum()) < len(keep_N)
    return keep_N


def rows_of(batch: MadeUpBatch, values_N: Tensor) -> tuple[Tensor, ...]:
    return values_N.split(batch.layout.lengths_S.tolist())


def kept_tokens(batch: MadeUpBatch, keep_N: Tensor, name: str) -> LossTokens:
    """Only the kept tokens, weighted min(e^z, 2), with the tokens the loss chooses among them."""
    start = batch.start
    assert start.proximal_N is not None and start.behavior_N is not None
    tokens = LossTokens(
        current_logprobs_N=batch.current_N[keep_N],
        proximal_logprobs_N=start.proximal_N[keep_N],
        behavior_logprobs_N=start.behavior_N[keep_N],
        advantages_N=batch.targets.advantages_N[keep_N],
        behavior_weights_N=log_ratios(batch).exp().clamp(max=2.0).float()[keep_N],
        lengths_B=keep_tokens(batch.layout.lengths_S, keep_N),
    )
    choose = find_loss(name).select
    return tokens if choose is None else replace(tokens, chosen_N=choose(tokens, options_of(name), seed=0))


@every_loss
@every_level
def test_rejecting_tokens_equals_removing_them_from_the_batch(
    name: str, batch: MadeUpBatch, rejection: Mapping[str, Any]
) -> None:
    """Compares value and gradient under every aggregation with denominators over kept tokens. A rejected token has no
    gradient.
    """
    keep_N = kept_of(batch, rejection)
    tokens = kept_tokens(batch, keep_N, name)
    counts_R = keep_tokens(batch.layout.lengths_R, keep_N)
    for mode in MODES:
        shares_K = token_shares(counts_R, mode, length_constant=MAX_TOKENS).repeat_interleave(counts_R)
        want, want_K, _ = run(tokens, options_of(name), shares_K.float())
        got = batch.outcome(config_of(name, mode, correction={"preset": "token_tis", "rejections": [rejection]}))
        assert got.num_tokens == int(keep_N.sum())
        assert got.loss == pytest.approx(float(want), rel=1e-5, abs=1e-6)
        torch.testing.assert_close(got.by_logprobs_N[keep_N], want_K.double(), rtol=1e-5, atol=1e-8)
        assert not got.by_logprobs_N[~keep_N].any()


@every_loss
@every_level
def test_values_of_a_rejected_token_are_not_read(name: str, batch: MadeUpBatch, rejection: Mapping[str, Any]) -> None:
    """Changes its log-prob and advantage, or sets them to NaN; the result and the chosen tokens stay bit-identical."""
    keep_N = kept_of(batch, rejection)
    config = config_of(name, correction={"preset": "token_tis", "rejections": [rejection]}, entropy_coefficient=0.1)
    want = batch.outcome(config)
    for value in (-30.0, math.nan):
        other = batch.with_columns(
            current_N=torch.where(keep_N, batch.current_N, value),
            advantages_N=torch.where(keep_N, batch.targets.advantages_N, value),
        )
        got = other.outcome(config)
        assert got.loss == want.loss
        assert torch.equal(got.by_logprobs_N, want.by_logprobs_N)
        assert torch.equal(got.by_entropy_N, want.by_entropy_N)


UNCLIPPED: dict[str, dict[str, float]] = {
    "gspo": {"clip_low": 1.0, "clip_high": 1e3},
    "gmpo": {"clip_low": 50.0, "clip_high": 50.0},
    "topr": {},
}


@pytest.mark.parametrize("name", UNCLIPPED)
def test_a_rejected_token_is_not_in_the_ratio_of_its_row(name: str, batch: MadeUpBatch) -> None:
    """The mean (gspo, gmpo) or sum (topr) of log-ratios is over the row's kept tokens; the loss is −A·ratio/N."""
    keep_N = kept_of(batch, TOKENS)
    start = batch.start
    assert start.proximal_N is not None and start.behavior_N is not None
    advantages = [torch.tensor(1.0 if row % 2 else -1.0) for row in range(len(batch.layout.lengths_S))]
    advantages_N = torch.stack(advantages).repeat_interleave(batch.layout.lengths_S)
    log_ratio_N = (batch.current_N - (start.behavior_N if name == "topr" else start.proximal_N)).double()

    def ratio(log_ratio_T: Tensor, advantage: float) -> float:
        if name == "topr":
            return min(1.0, float(log_ratio_T.sum().exp())) if advantage < 0 else 1.0
        return float(log_ratio_T.mean().exp())

    want_N, would_differ = [], False
    for advantage, log_ratio_T, keep_T in zip(
        advantages, rows_of(batch, log_ratio_N), rows_of(batch, keep_N), strict=True
    ):
        found = ratio(log_ratio_T[keep_T], float(advantage)) if keep_T.any() else 0.0
        would_differ |= bool(keep_T.any()) and abs(ratio(log_ratio_T, float(advantage)) - found) > 0.05
        want_N.append(-advantage.double() * found * keep_T / keep_N.sum())
    assert would_differ
    config = AlgorithmConfig(
        loss={"name": name, **UNCLIPPED[name]},
        correction={"preset": "token_tis", "rejections": [TOKENS], "weights": {"level": "none"}},
    )
    got = batch.with_columns(advantages_N=advantages_N).outcome(config)
    torch.testing.assert_close(got.by_logprobs_N, torch.cat(want_N), rtol=1e-5, atol=1e-9)


# ---- rows with non-finite log-probs ----


@every_loss
def test_a_row_with_bad_sampler_log_probs_leaves_the_denominators(name: str) -> None:
    """The row is also left out if the correction runs inside the micro-batch, which is the default."""
    groups = [make_group(index, num_samples=3) for index in range(3)]
    whole = MadeUpBatch.of(groups)
    counts_R = whole.targets.counts_R.clone()
    counts_R[0] = 0.0
    whole = whole.with_columns(counts_R=counts_R)
    corrections: tuple[Any, ...] = ("token_clip", "none", "areal_loglinear", {"rejections": [ROWS]}, "seq_tis")
    values = (math.nan, math.inf, -math.inf, math.nan, math.inf)
    for mode, correction, value in zip(MODES, corrections, values, strict=True):
        broken = MadeUpBatch.of([with_broken_row(groups[0], value=value), *groups[1:]])
        config = config_of(name, mode, correction=correction)
        want, got = whole.outcome(config), broken.outcome(config, budget=40)
        assert got.num_tokens == want.num_tokens < whole.layout.num_tokens
        assert got.loss == pytest.approx(want.loss, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(got.by_logprobs_N, want.by_logprobs_N, rtol=1e-6, atol=0.0)
        assert got.by_logprobs_N.any()


def test_a_broken_segment_does_not_remove_the_others_of_its_trajectory(batch: MadeUpBatch) -> None:
    groups = list(batch.groups)
    groups[1] = with_broken_row(groups[1])
    broken = MadeUpBatch.of(groups)
    assert broken.start.finite_N is not None
    first = int(broken.layout.lengths_R[:3].sum())
    lost = int(broken.layout.lengths_S[3])
    assert torch.nonzero(~broken.start.finite_N)[:, 0].tolist() == list(range(first, first + lost))
    assert broken.outcome(config_of("reinforce")).num_tokens == batch.layout.num_tokens - lost


@pytest.mark.parametrize(
    "settings",
    [{}, {"loss": "m2po", "advantage": "gae", "optimizer_steps_per_batch": 2, "aggregation": "seq-mean-token-mean"}],
    ids=["default", "m2po with a critic"],
)
def test_the_learner_trains_as_if_the_broken_row_were_left_out(
    make_learner: Callable[..., Learner], settings: dict[str, Any]
) -> None:
    """The result is bit-identical to the overlong filter's, which drops a row from the loss but keeps it in the
    baseline.
    """
    groups = [make_group(index, num_samples=3, rewards=(1.0, 0.0, 0.5)) for index in range(4)]

    def learned(group: TrajectoryGroup, **more: Any) -> tuple[dict[str, Tensor], Mapping[str, float]]:
        learner = make_learner(learning_rate=1e-2, zero_stage=0, **settings, **more)
        steps = settings.get("optimizer_steps_per_batch", 1)
        found = learner.train(
            learner.prepare(*make_batch([group, *groups[1:]], tokens_per_micro_batch=200, optimizer_steps=steps))
        )
        return all_weights(learner), found.metrics

    row = groups[0].scored_rows[0]
    overlong = replace(row, trajectory=replace(row.trajectory, finish_reason="length"))
    filtered = replace(groups[0], rows=(overlong, *groups[0].rows[1:]))
    want, without = learned(filtered, selection={"overlong_filter": True})
    got, metrics = learned(with_broken_row(groups[0]))
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert metrics["trained_tokens"] == without["trained_tokens"]
    assert metrics["nonfinite_row_fraction"] == pytest.approx(1 / 12) and without["nonfinite_row_fraction"] == 0
    assert metrics["skipped_steps"] == 0


# ---- rows without kept tokens ----


def without_tokens(group: TrajectoryGroup, rows: set[int]) -> TrajectoryGroup:
    """The group with no sampled tokens in these rows."""
    changed = list(group.scored_rows)
    for number in rows:
        trajectory = changed[number].trajectory
        segments = tuple(replace(one, loss_mask=np.zeros_like(one.loss_mask)) for one in trajectory.segments)
        changed[number] = replace(changed[number], trajectory=replace(trajectory, segments=segments))
    return replace(group, rows=tuple(changed))


def test_gmpo_can_count_rows_without_kept_tokens() -> None:
    """Rows that are rejected whole or have no tokens count in the step of their group, also if no row of it is left,
    with their own weight.
    """
    groups = [make_group(index, num_samples=3) for index in range(4)]
    groups[1] = without_tokens(groups[1], {0})
    groups[3] = without_tokens(groups[3], {0, 1, 2})
    batch = MadeUpBatch.of(groups, num_steps=2)
    counts_R = torch.ones(12, dtype=torch.float64)
    counts_R[4], counts_R[6] = 0.0, 2.0
    batch = batch.with_columns(counts_R=counts_R)
    kept_R = keep_tokens(batch.layout.lengths_R, kept_of(batch, ROWS)) > 0
    assert not kept_R[batch.layout.lengths_R > 0].all(), "a row is rejected whole"
    settings: dict[str, Any] = {"aggregation": "seq-mean-token-mean", "correction": {"rejections": [ROWS]}}
    plain = batch.outcome(AlgorithmConfig(loss="gmpo", **settings))
    counting = AlgorithmConfig(loss={"name": "gmpo", "count_empty_rows": True}, **settings)
    for world_size in (1, 3):
        counted = batch.outcome(counting, world_size=world_size, budget=40)
        for step in (0, 1):
            here_R = torch.arange(12) // 6 == step
            share = float(counts_R[here_R & kept_R].sum() / counts_R[here_R].sum())
            assert 0 < share < 1
            place = batch.layout.tokens_of(step)[0]
            torch.testing.assert_close(
                counted.by_logprobs_N[place], share * plain.by_logprobs_N[place], rtol=1e-5, atol=1e-9
            )


def test_count_empty_rows_is_refused_if_the_aggregation_does_not_divide_by_rows() -> None:
    with pytest.raises(ValidationError, match=r"count_empty_rows .*take seq-mean-token-mean"):
        AlgorithmConfig(loss={"name": "gmpo", "count_empty_rows": True}, aggregation="token-mean")
