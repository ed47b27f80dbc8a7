"""Answers with tool output between the sampled tokens, in the real learner: only sampled tokens are trained, each at
its own position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from tandem.protos.types import ScoredTrajectory, Segment, TrajectoryGroup
from tandem.trainer import learner as learner_module
from tandem.trainer.batch.rewards import Targets
from tandem.trainer.learner import Learner
from tests.support.learner_rank import all_weights
from tests.support.training_groups import make_batch, make_group, with_tool_output

GAMMA, LAM = 0.9, 0.8

Learned = Callable[..., tuple[Targets, dict[str, Tensor], dict[str, float]]]


@pytest.fixture(scope="module")
def groups() -> list[TrajectoryGroup]:
    found = [with_tool_output(make_group(index, num_samples=3, max_sampled=10)) for index in range(3)]
    assert all(has_gap(segment) for segment in segments_of(found) if segment.num_loss_tokens > 2)
    return found


def segments_of(groups: Sequence[TrajectoryGroup]) -> list[Segment]:
    """The segments of all answers, in the layout's order."""
    return [segment for group in groups for row in group.scored_rows for segment in row.trajectory.segments]


def has_gap(segment: Segment) -> bool:
    return bool((np.diff(np.flatnonzero(segment.loss_mask)) > 1).any())


@pytest.fixture
def learned(make_learner: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch) -> Learned:
    """Trains one batch; returns its targets, the new weights and the metrics."""
    seen: list[Targets] = []
    real = learner_module.learning_targets

    def remembered(*arguments: Any, **named: Any) -> Targets:
        seen.append(real(*arguments, **named))
        return seen[-1]

    def learn(
        groups: Sequence[TrajectoryGroup], **settings: Any
    ) -> tuple[Targets, dict[str, Tensor], dict[str, float]]:
        learner = make_learner(learning_rate=1e-2, zero_stage=0, **settings)
        metrics = dict(learner.train(learner.prepare(*make_batch(groups, tokens_per_micro_batch=80))).metrics)
        return seen[-1], all_weights(learner), metrics

    monkeypatch.setattr(learner_module, "learning_targets", remembered)
    return learn


def test_only_sampled_tokens_have_a_gradient(model: Path, groups: list[TrajectoryGroup], learned: Learned) -> None:
    """The gradient equals that of −Σ A·log π over the sampled tokens, computed with plain torch."""
    settings: dict[str, Any] = {"advantage": "dr_grpo", "loss": "reinforce", "correction": "none"}
    targets, _, metrics = learned(groups, **settings)
    policy = AutoModelForCausalLM.from_pretrained(model)
    logprobs = []
    for segment in segments_of(groups):
        ids = torch.tensor(segment.ids, dtype=torch.long)
        sampled = torch.tensor(np.flatnonzero(segment.loss_mask))
        logprobs.append(policy(ids[None]).logits[0].log_softmax(-1)[sampled - 1, ids[sampled]])
    logprobs_N = torch.cat(logprobs)
    (-(logprobs_N * targets.advantages_N).sum() / len(logprobs_N)).backward()
    norm = math.sqrt(sum(float(one.grad.square().sum()) for one in policy.parameters() if one.grad is not None))
    assert metrics["trained_tokens"] == len(logprobs_N)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_an_episode_that_forked_counts_once_in_its_groups_mean_and_in_the_loss(model: Path, learned: Learned) -> None:
    """Rewards 1, 0, 0, 0, the first of an episode of three segments: advantages 3/4 and three times −1/4. The gradient
    is that of −1/4 · Σ over episodes of A · the mean of log π over the episode's tokens.
    """
    rewards = [1.0, 0.0, 0.0, 0.0]
    (forked, *_), (_, *others) = (make_group(0, rewards=rewards, num_segments=n).scored_rows for n in (3, 1))
    group = replace(make_group(0, rewards=rewards), rows=(forked, *others))
    settings: dict[str, Any] = {"advantage": "dr_grpo", "loss": "reinforce", "correction": "none"}
    _, _, metrics = learned([group], aggregation="seq-mean-token-mean", **settings)
    policy = AutoModelForCausalLM.from_pretrained(model)
    loss = torch.zeros(())
    for row, advantage in zip(group.scored_rows, (0.75, -0.25, -0.25, -0.25), strict=True):
        logprobs = []
        for segment in row.trajectory.segments:
            ids, sampled = torch.tensor(segment.ids, dtype=torch.long), torch.tensor(np.flatnonzero(segment.loss_mask))
            logprobs.append(policy(ids[None]).logits[0].log_softmax(-1)[sampled - 1, ids[sampled]])
        loss -= advantage * torch.cat(logprobs).mean() / 4
    loss.backward()
    norm = math.sqrt(sum(float(one.grad.square().sum()) for one in policy.parameters() if one.grad is not None))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_log_probs_and_rewards_of_tool_output_are_ignored(groups: list[TrajectoryGroup], learned: Learned) -> None:
    """Sets both to NaN; the weights stay bit-identical."""

    def scribbled(group: TrajectoryGroup) -> TrajectoryGroup:
        rows = []
        for row in group.scored_rows:
            (segment,) = row.trajectory.segments
            logprobs = np.where(segment.loss_mask, segment.behavior_logprobs, np.nan).astype(np.float32)
            rewards = np.where(segment.loss_mask, 0.0, np.nan).astype(np.float32)
            segments = (replace(segment, behavior_logprobs=logprobs),)
            rows.append(replace(row, trajectory=replace(row.trajectory, segments=segments, token_rewards=(rewards,))))
        return replace(group, rows=tuple(rows))

    settings: dict[str, Any] = {
        "advantage": "reinforce_plus_plus",
        "correction": {"rejections": [{"level": "geometric", "measure": "k3", "high": 3.0}]},
    }
    _, want, figures = learned(groups, **settings)
    _, got, others = learned([scribbled(group) for group in groups], **settings)
    assert 0 < figures["rejected_fraction"] == others["rejected_fraction"] < 1
    assert all(torch.equal(got[name], want[name]) for name in want)


def a_critic(model: Path, folder: Path) -> PreTrainedModel:
    """A critic with a random head, which is also saved in the folder."""
    torch.manual_seed(1)
    critic = AutoModelForTokenClassification.from_pretrained(model, num_labels=1)
    critic.score.bias.data.fill_(0.5)
    critic.save_pretrained(folder)
    return critic.eval()


def test_gae_skips_tool_output_between_sampled_tokens(
    model: Path, groups: list[TrajectoryGroup], learned: Learned, tmp_path: Path
) -> None:
    """The critic has a head of its own. A sampled token's V precedes it; the next value is V before the next sampled
    token, with no discount for the tokens in between.
    """
    critic = a_critic(model, tmp_path)
    advantage = {"name": "gae", "gamma": GAMMA, "lam": LAM, "whiten": False}
    targets, _, _ = learned(groups, advantage=advantage, critic={"path": str(tmp_path)})
    want, returns = [], []
    for group in groups:
        for row in group.scored_rows:
            (segment,) = row.trajectory.segments
            with torch.no_grad():
                values_T = critic(torch.tensor(segment.ids, dtype=torch.long)[None]).logits[0, :, 0].double()
            value_after = advantage_after = 0.0
            reward = row.reward
            of_row: list[tuple[float, float]] = []
            for place in reversed(np.flatnonzero(segment.loss_mask).tolist()):
                value = float(values_T[place - 1])
                advantage_after = (reward or 0.0) + GAMMA * value_after - value + GAMMA * LAM * advantage_after
                value_after, reward = value, 0.0  # the whole reward was on the last token
                of_row.append((advantage_after, advantage_after + value))
            want += [one for one, _ in reversed(of_row)]
            returns += [one for _, one in reversed(of_row)]
    assert targets.returns_N is not None
    torch.testing.assert_close(targets.advantages_N, torch.tensor(want), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(targets.returns_N.float(), torch.tensor(returns), rtol=1e-4, atol=1e-5)


def with_earned_turns(group: TrajectoryGroup) -> TrajectoryGroup:
    """Every turn earns something on its last token; the scorer's reward is added at the end."""
    rows = []
    for row in group.scored_rows:
        earned = [np.zeros(len(segment.ids), np.float32) for segment in row.trajectory.segments]
        for number, (segment, turn) in enumerate(turns_of(row)):
            earned[segment][turn[-1]] = 0.25 * (number + row.trajectory.trajectory_id)
        total = float(sum(one.sum() for one in earned))
        trajectory = replace(row.trajectory, token_rewards=tuple(earned), earned_reward=total)
        rows.append(replace(row, trajectory=trajectory, reward=(row.reward or 0.0) + total))
    return replace(group, rows=tuple(rows))


def turns_of(row: ScoredTrajectory) -> list[tuple[int, NDArray[np.int64]]]:
    """The segment and the places of the tokens of each turn: sampled tokens without given ones between them."""
    found = []
    for number, segment in enumerate(row.trajectory.segments):
        sampled = np.flatnonzero(segment.loss_mask)
        found += [(number, turn) for turn in np.split(sampled, np.flatnonzero(np.diff(sampled) > 1) + 1)]
    return found


def returns_of(row: ScoredTrajectory) -> list[float]:
    """The return from each turn on, discounted between turns; the scorer's part is on the last one."""
    after, returns = 0.0, []
    earned = row.trajectory.token_rewards or ()
    score = (row.reward or 0.0) - row.trajectory.earned_reward
    for number, turn in reversed(turns_of(row)):
        after = float(earned[number][turn[-1]]) + score + GAMMA * after
        score = 0.0
        returns.append(after)
    return returns[::-1]


@pytest.fixture(scope="module")
def forked() -> list[TrajectoryGroup]:
    """Episodes of several turns in two segments each, the history of the second having been rewritten."""
    drawn = (make_group(index, num_samples=3, max_sampled=6, num_segments=2) for index in range(2))
    found = [with_earned_turns(with_tool_output(group)) for group in drawn]
    assert any(len({len(turns_of(row)) for row in group.scored_rows}) > 1 for group in found)
    return found


def test_turns_are_compared_by_their_number_in_the_episode(forked: list[TrajectoryGroup], learned: Learned) -> None:
    """Means and deviations count episodes: a turn of a second segment follows those of the first."""
    targets, _, _ = learned(forked, advantage={"name": "turn_grpo", "gamma": GAMMA})
    want: list[float] = []
    for group in forked:
        returns = [returns_of(row) for row in group.scored_rows]
        for row, own in zip(group.scored_rows, returns, strict=True):
            for number, (_, turn) in enumerate(turns_of(row)):
                here = [one[number] for one in returns if number < len(one)]
                mean, deviation = (np.mean(here), np.std(here, ddof=1)) if len(here) > 1 else (own[number], 1.0)
                want += [(own[number] - mean) / (deviation + 1e-6)] * len(turn)
    torch.testing.assert_close(targets.advantages_N, torch.tensor(want, dtype=torch.float32), rtol=1e-4, atol=1e-4)


def test_gae_over_turns_discounts_only_between_turns(
    model: Path, forked: list[TrajectoryGroup], learned: Learned, tmp_path: Path
) -> None:
    critic = a_critic(model, tmp_path)
    advantage = {"name": "turn_gae", "gamma": GAMMA, "lam": LAM, "whiten": False}
    targets, _, _ = learned(forked, advantage=advantage, critic={"path": str(tmp_path)})
    want, returns = [], []
    for row in (row for group in forked for row in group.scored_rows):
        of_turns = [*returns_of(row), 0.0]
        value_after = advantage_after = 0.0
        of_row: list[tuple[float, float]] = []
        for turn_number, (number, turn) in reversed(list(enumerate(turns_of(row)))):
            ids = torch.tensor(row.trajectory.segments[number].ids, dtype=torch.long)
            with torch.no_grad():
                value = float(critic(ids[None]).logits[0, turn[0] - 1, 0])
            reward = of_turns[turn_number] - GAMMA * of_turns[turn_number + 1]
            advantage_after = reward + GAMMA * value_after - value + GAMMA * LAM * advantage_after
            value_after = value
            of_row += [(advantage_after, advantage_after + value)] * len(turn)
        want += [one for one, _ in reversed(of_row)]
        returns += [one for _, one in reversed(of_row)]
    assert targets.returns_N is not None
    torch.testing.assert_close(targets.advantages_N, torch.tensor(want), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(targets.returns_N.float(), torch.tensor(returns), rtol=1e-4, atol=1e-5)


def test_rewards_of_turns_reach_the_tokens_before_them(forked: list[TrajectoryGroup], learned: Learned) -> None:
    """REINFORCE++ discounts by token, so that without discount a token has all that is earned from its turn on."""
    targets, _, _ = learned(forked, advantage={"name": "reinforce_plus_plus", "whiten": False})
    want: list[float] = []
    for row in (row for group in forked for row in group.scored_rows):
        left = row.reward or 0.0
        for number, turn in turns_of(row):
            want += [left] * len(turn)
            left -= float((row.trajectory.token_rewards or ())[number][turn[-1]])
    torch.testing.assert_close(targets.advantages_N, torch.tensor(want, dtype=torch.float32), rtol=1e-5, atol=1e-5)


REJECTION = {"level": "token", "measure": "k3", "high": 3.0}
CORRECTIONS: dict[str, Any] = {
    "truncated": {"preset": "token_tis"},
    "stopped": {"preset": "token_clip"},
    "not at all": {"preset": "none"},
    "rejected": {
        "preset": "token_tis",
        "rejections": [REJECTION, {"level": "max", "high": 1.5, "negative_only": True}],
    },
}


def weighed(given: str, z_N: Tensor) -> Tensor:
    """Correction weights of these log-ratios, without the tests that depend on advantages."""
    if given == "not at all":
        return torch.ones_like(z_N)
    weight_N = z_N.exp().clamp(max=2.0)
    return weight_N * (z_N.exp() - 1 - z_N <= REJECTION["high"]) if given == "rejected" else weight_N


@pytest.mark.parametrize("given", CORRECTIONS)
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_token_baseline_uses_the_correction_weights(
    model: Path, groups: list[TrajectoryGroup], learned: Learned, name: str, given: str
) -> None:
    """The baseline is Σ G·W/Σ W over the group at the same position (with or without tool output), where W = Σ w²(1 −
    2π + Σπ²) and w is 0 for rejected tokens.
    """
    settings: dict[str, Any] = {
        "advantage": {"name": name, "handle_zero_tail": False},
        "correction": CORRECTIONS[given],
    }
    targets, _, _ = learned(groups, **settings)
    policy = AutoModelForCausalLM.from_pretrained(model)
    want: list[float] = []
    for group in groups:
        gathered: list[dict[int, float]] = []
        for segment in segments_of([group]):
            sampled = np.flatnonzero(segment.loss_mask)
            with torch.no_grad():
                logits = policy(torch.tensor(segment.ids, dtype=torch.long)[None]).logits[0].double()
            probs_NV = logits[sampled - 1].softmax(-1)
            prob_N = probs_NV[torch.arange(len(sampled)), torch.tensor(segment.ids[sampled], dtype=torch.long)]
            weight_N = weighed(given, prob_N.log() - torch.tensor(segment.behavior_logprobs[sampled]).double())
            gathered_N = (weight_N.square() * (1 - 2 * prob_N + probs_NV.square().sum(-1))).cumsum(0)
            places = range(len(sampled)) if name.startswith("tir") else (sampled - sampled[0]).tolist()
            gathered.append(dict(zip(places, gathered_N.tolist(), strict=True)))
        rewards = [row.reward or 0.0 for row in group.scored_rows]
        for reward, places_of_row in zip(rewards, gathered, strict=True):
            for place in places_of_row:
                here = [(other.get(place, 0.0), score) for other, score in zip(gathered, rewards, strict=True)]
                want.append(reward - sum(w * score for w, score in here) / (sum(w for w, _ in here) + 1e-8))
    torch.testing.assert_close(targets.advantages_N, torch.tensor(want), rtol=1e-3, atol=1e-4)
