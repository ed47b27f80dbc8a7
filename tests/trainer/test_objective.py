"""The composed loss of an optimizer step against formulas in float64, and its handling of non-finite numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.trainer import learner as learner_module
from tandem.trainer import objective as objective_module
from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.batch.columns import BatchColumns
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.micro_batch import MicroBatch, rank_micro_batches
from tandem.trainer.batch.rewards import Targets
from tandem.trainer.config import TrainerConfig
from tandem.trainer.kl import first_coefficients
from tandem.trainer.learner import Learner
from tandem.trainer.models.token_logprobs import TokenStatistics
from tandem.trainer.objective import BatchObjective
from tandem.trainer.off_policy.proximal import loglinear_proximal
from tandem.trainer.policy_losses.covariance import clip_cov, select_clip_cov
from tandem.trainer.policy_losses.inputs import LossTokens
from tandem.trainer.policy_losses.registry import PolicyLoss
from tests.support.learner_rank import all_weights
from tests.support.tiny_model import build_tiny_model
from tests.support.training_groups import make_batch, make_group

CPU = torch.device("cpu")
BETA, BONUS = 0.3, 0.05
PLAIN_CLIP = {"name": "clipped_surrogate", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0}


@dataclass
class Scene:
    """A batch with made-up columns and one micro-batch per step; all tensors are in the layout's order."""

    layout: BatchLayout
    cells: list[list[MicroBatch]]
    start: BatchColumns
    targets: Targets
    current_N: Tensor
    entropy_N: Tensor

    def objective(self, **settings: Any) -> BatchObjective:
        config = AlgorithmConfig(**settings)
        return BatchObjective(
            config,
            self.layout,
            self.start,
            self.targets,
            policy_version=3,
            num_steps=len(self.cells),
            coefficients=first_coefficients(config.kl),
            max_response_tokens=12,
            seed=0,
            device=CPU,
            counts_whole_batch=True,
        )

    def policy_loss(self, objective: BatchObjective) -> tuple[float, Tensor, Tensor]:
        """Returns (loss, gradient by the log-probs, gradient by the entropies) of the only step, in
        the layout's order.
        """
        place = self.layout.place_of(0, 0)
        logprobs_M, entropy_M = (column_N[place].requires_grad_() for column_N in (self.current_N, self.entropy_N))
        outputs = TokenStatistics(logprobs_M, entropy_M, None)
        plan = objective.begin_step(0, self.current_N)
        loss = objective.policy_loss(plan, 0, 0, self.cells[0][0], outputs)
        gradients = torch.autograd.grad(loss, (logprobs_M, entropy_M), allow_unused=True, materialize_grads=True)
        by_place = [torch.zeros(len(place)).index_copy_(0, place, gradient_M) for gradient_M in gradients]
        return float(loss.detach()), by_place[0], by_place[1]

    def doubles(self) -> list[Tensor]:
        """(current, proximal, behavior, reference, advantages) in float64."""
        start = self.start
        columns = (self.current_N, start.proximal_N, start.behavior_N, start.reference_N, self.targets.advantages_N)
        return [column_N.double() for column_N in columns if column_N is not None]

    def with_reference(self, value: float) -> Scene:
        """The scene with this value as one of the reference log-probs."""
        assert self.start.reference_N is not None
        reference_N = self.start.reference_N.clone()
        reference_N[4] = value
        return replace(self, start=replace(self.start, reference_N=reference_N))


def make_scene(num_steps: int = 1, seed: int = 0) -> Scene:
    groups = [make_group(number, num_samples=3, versions=(0, 2)) for number in range(2 * num_steps)]
    batch, by_id = make_batch(groups, policy_version=3, tokens_per_micro_batch=4000, optimizer_steps=num_steps)
    layout = BatchLayout.of(batch, rank=0)
    cells = rank_micro_batches(batch, by_id, rank=0, device=CPU)
    behavior_N, versions_N = torch.zeros(layout.num_tokens), torch.zeros(layout.num_tokens, dtype=torch.int64)
    for step, (cell,) in enumerate(cells):
        behavior_N[layout.place_of(step, 0)] = cell.behavior_logprobs_N
        versions_N[layout.place_of(step, 0)] = cell.versions_N
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return 0.4 * torch.randn(layout.num_tokens, generator=generator)

    start = BatchColumns(
        behavior_N=behavior_N,
        versions_N=versions_N,
        proximal_N=behavior_N + noise(),
        reference_N=behavior_N + noise(),
        values_N=noise(),
    )
    counts_R = torch.ones(len(layout.trajectories), dtype=torch.float64)
    targets = Targets(4 * noise(), (2 * noise()).double(), counts_R, {}, 0.0)
    return Scene(layout, cells, start, targets, behavior_N + noise(), noise().abs())


@pytest.fixture
def scene() -> Scene:
    return make_scene()


def check(got: tuple[float, Tensor, Tensor], loss_N: Tensor, slope_N: Tensor, keep_N: Tensor, bonus: float) -> None:
    """Compares the loss and its gradients by log-probs and entropies with those of the mean over kept tokens."""
    num_kept = int(keep_N.sum())
    assert got[0] == pytest.approx(float((loss_N * keep_N).sum()) / num_kept, rel=1e-5)
    torch.testing.assert_close(got[1].double(), slope_N * keep_N / num_kept, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(got[2].double(), -bonus * keep_N.double() / num_kept, rtol=1e-5, atol=0.0)


def clipped(current_N: Tensor, proximal_N: Tensor, advantages_N: Tensor) -> tuple[Tensor, Tensor]:
    """−min(ρA, clip(ρ)A) and its derivative by log π_current."""
    ratio_N = (current_N - proximal_N).exp()
    held_N = ((advantages_N > 0) & (ratio_N > 1.28)) | ((advantages_N < 0) & (ratio_N < 0.8))
    bounded_N = torch.where(advantages_N > 0, 1.28, 0.8).double()
    assert 0 < int(held_N.sum()) < len(held_N)
    return -advantages_N * torch.where(held_N, bounded_N, ratio_N), -advantages_N * ratio_N * ~held_N


@pytest.mark.parametrize("correction", ["token_clip", "token_tis"])
def test_surrogate_kl_and_entropy_add_up(scene: Scene, correction: str) -> None:
    kl = {"loss": {"coefficient": BETA}}
    got = scene.policy_loss(scene.objective(loss=PLAIN_CLIP, kl=kl, entropy_coefficient=BONUS, correction=correction))
    current_N, proximal_N, behavior_N, reference_N, advantages_N = scene.doubles()
    ratio_N = (proximal_N - behavior_N).exp()
    weights_N = ratio_N.clamp(max=2.0)
    if correction == "token_clip":
        stopped_N = ((advantages_N > 0) & (ratio_N > 2.0)) | ((advantages_N < 0) & (ratio_N < 0.8))
        assert 0 < int(stopped_N.sum()) < len(stopped_N)
        weights_N = weights_N * ~stopped_N
    surrogate_N, slope_N = clipped(current_N, proximal_N, advantages_N)
    difference_N = current_N - reference_N
    penalty_N = (-difference_N).exp() + difference_N - 1
    loss_N = surrogate_N * weights_N + BETA * penalty_N - BONUS * scene.entropy_N.double()
    slope_N = slope_N * weights_N + BETA * (1 - (-difference_N).exp())
    check(got, loss_N, slope_N, torch.ones_like(loss_N, dtype=torch.bool), BONUS)


def test_rejected_rows_are_left_out_of_every_part_of_the_loss(scene: Scene) -> None:
    high = 0.08
    rejection = {"level": "geometric", "measure": "k3", "high": high}
    got = scene.policy_loss(
        scene.objective(
            loss=PLAIN_CLIP,
            correction={"preset": "k3_rs_token_tis", "rejections": [rejection]},
            kl={"loss": {"coefficient": BETA}},
            entropy_coefficient=BONUS,
        )
    )
    current_N, proximal_N, behavior_N, reference_N, advantages_N = scene.doubles()
    log_ratio_N = proximal_N - behavior_N
    rows = (log_ratio_N.exp() - 1 - log_ratio_N).split(scene.layout.lengths_S.tolist())
    keep_N = torch.cat([torch.full((len(row),), float(row.mean()) <= high) for row in rows])
    assert 0 < int(keep_N.sum()) < len(keep_N)
    surrogate_N, slope_N = clipped(current_N, proximal_N, advantages_N)
    weights_N = log_ratio_N.exp().clamp(max=2.0)
    difference_N = current_N - reference_N
    penalty_N = (-difference_N).exp() + difference_N - 1
    loss_N = surrogate_N * weights_N + BETA * penalty_N - BONUS * scene.entropy_N.double()
    slope_N = slope_N * weights_N + BETA * (1 - (-difference_N).exp())
    check(got, loss_N, slope_N, keep_N, BONUS)


def test_bypassed_weights_and_an_unbiased_kl_apply_the_ratio_once(scene: Scene) -> None:
    got = scene.policy_loss(
        scene.objective(
            loss="reinforce", correction="bypass_icepop", kl={"loss": {"coefficient": BETA, "unbiased": True}}
        )
    )
    current_N, _, behavior_N, reference_N, advantages_N = scene.doubles()
    ratio_N = (current_N - behavior_N).exp()
    weights_N = ratio_N * ((ratio_N >= 0.5) & (ratio_N <= 5.0))
    assert bool((weights_N == 0).any())
    difference_N = current_N - reference_N
    penalty_N = (-difference_N).exp() + difference_N - 1
    loss_N = -weights_N * advantages_N * current_N + BETA * ratio_N * penalty_N
    slope_N = -weights_N * advantages_N + BETA * ratio_N * (penalty_N + 1 - (-difference_N).exp())
    check(got, loss_N, slope_N, torch.ones_like(loss_N, dtype=torch.bool), 0.0)


def test_the_critic_s_loss(scene: Scene) -> None:
    objective = scene.objective(advantage="gae", critic={"value_clip": 0.2})
    place = scene.layout.place_of(0, 0)
    values_M = (0.5 * torch.randn(len(place), generator=torch.Generator().manual_seed(1))).requires_grad_()
    loss = objective.value_loss(objective.begin_step(0, None), 0, 0, values_M)
    (gradient_M,) = torch.autograd.grad(loss, values_M)
    assert scene.targets.returns_N is not None and scene.start.values_N is not None
    returns_M, before_M = scene.targets.returns_N[place], scene.start.values_N[place].double()
    errors_M = values_M.detach().double() - returns_M
    held_M = values_M.detach().double().clamp(before_M - 0.2, before_M + 0.2) - returns_M
    assert 0 < int((held_M.abs() > errors_M.abs()).sum()) < len(place)
    assert float(loss.detach()) == pytest.approx(
        float(torch.maximum(errors_M.square(), held_M.square()).mean()) / 2, rel=1e-5
    )
    expected_M = torch.where(held_M.abs() > errors_M.abs(), 0.0, errors_M) / len(place)
    torch.testing.assert_close(gradient_M.double(), expected_M, rtol=1e-4, atol=1e-7)


# ---- non-finite numbers ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"])
def test_a_reference_that_is_not_finite_leaves_no_finite_gradient(scene: Scene, estimator: str, value: float) -> None:
    broken = scene.with_reference(value)
    loss, gradient_N, _ = broken.policy_loss(broken.objective(kl={"loss": {"estimator": estimator}}))
    assert not math.isfinite(loss) and not bool(gradient_N.isfinite().any())


def test_a_nan_among_old_values_leaves_no_finite_gradient_of_the_critic(scene: Scene) -> None:
    assert scene.start.values_N is not None
    scene.start.values_N[2] = math.nan
    objective = scene.objective(advantage="gae")
    values_M = torch.zeros(scene.layout.num_tokens, requires_grad=True)
    loss = objective.value_loss(objective.begin_step(0, None), 0, 0, values_M)
    assert not bool(torch.autograd.grad(loss, values_M)[0].isfinite().any())


def test_the_guard_does_not_change_the_gradient_of_a_finite_loss(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Mapping[str, Any] = {"kl": {"loss": {"coefficient": BETA}}, "entropy_coefficient": BONUS}
    _, guarded_N, _ = scene.policy_loss(scene.objective(**settings))
    monkeypatch.setattr(objective_module, "_break_gradient", lambda loss, outputs_M: None)
    _, plain_N, _ = scene.policy_loss(scene.objective(**settings))
    assert torch.equal(guarded_N, plain_N)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_nan_reference_log_prob_skips_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimator: str, stage: int
) -> None:
    look = learner_module.compute_columns

    def look_badly(*arguments: Any, **options: Any) -> BatchColumns:
        start = look(*arguments, **options)
        assert start.reference_N is not None
        start.reference_N[3] = math.nan
        return start

    config = TrainerConfig(learning_rate=1e-2, zero_stage=stage, kl={"loss": {"estimator": estimator}})
    learner = Learner(
        config, model_path=str(build_tiny_model(tmp_path)), total_batches=10, seed=0, max_response_tokens=12
    )
    try:
        before = all_weights(learner)
        batch, by_id = make_batch([make_group(0), make_group(1)])
        with monkeypatch.context() as patch:
            patch.setattr(learner_module, "compute_columns", look_badly)
            result = learner.train(batch, by_id)
        assert result.metrics["skipped_steps"] == 1 and not result.changed
        after = all_weights(learner)
        assert all(torch.equal(after[name], before[name]) for name in before)
        batch, by_id = make_batch([make_group(0), make_group(1)], policy_version=2)
        assert learner.train(batch, by_id).changed, "the next batch is trained"
    finally:
        learner.close()


# ---- operations over the whole batch ----


def test_a_selection_uses_the_proximal_policy_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make_scene(num_steps=2)
    scene.start = replace(scene.start, proximal_N=None)
    seen: list[LossTokens] = []

    def select(tokens: LossTokens, options: Any, *, seed: int) -> Tensor:
        seen.append(tokens)
        return select_clip_cov(tokens, options, seed=seed)

    monkeypatch.setattr(objective_module, "find_loss", lambda name: PolicyLoss(clip_cov, select))
    scene.objective(loss="clip_cov", correction="areal_loglinear").begin_step(1, scene.current_N)
    place, _ = scene.layout.tokens_of(1)
    assert scene.start.behavior_N is not None and scene.start.versions_N is not None
    between_N = loglinear_proximal(
        scene.current_N[place],
        scene.start.behavior_N[place],
        scene.start.versions_N[place],
        batch_version=3,
        progress=0.5,
    )
    assert not torch.equal(between_N, scene.current_N[place])
    assert torch.equal(seen[0].proximal_logprobs_N, between_N)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalised_weights_average_1_over_trained_tokens(scene: Scene, level: str) -> None:
    counts_R = torch.tensor([0.0, 1.0, 2.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    scene.targets = replace(scene.targets, counts_R=counts_R)
    plan = scene.objective(correction={"weights": {"level": level, "normalize": True}}).begin_step(0, None)
    assert plan.weights_N is not None
    lengths_R = scene.layout.lengths_R
    if level == "token":
        values, counts = plan.weights_N, counts_R.repeat_interleave(lengths_R)
    else:
        values, counts = plan.weights_N[lengths_R.cumsum(0) - lengths_R], counts_R
    assert float(values.double() @ counts) == pytest.approx(float(counts.sum()), rel=1e-6)
    assert torch.equal(plan.keep_N, counts_R.repeat_interleave(lengths_R) > 0)
