"""Answers sampled with top-k, top-p and min-p, in the real learner: log-probs are over the tokens that were left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.protos.errors import DataError
from tandem.protos.types import Packing, Prompt, SamplingParameters, ScoredTrajectory, Trajectory, TrajectoryGroup
from tandem.rollout.sampler import SamplingRequest
from tandem.rollout.segments import unsampled, with_sampled
from tandem.rollout.transformers.batch import Batch, LanguageModel, Row
from tandem.trainer.learner import Learner
from tests.support.training_groups import make_batch, make_group, with_sampling_masks, with_tool_output

MakeLearner = Callable[..., Learner]
SAMPLING = SamplingParameters(temperature=0.8, top_k=20, top_p=0.7, min_p=0.02, max_tokens=12)
PROMPT = np.arange(10, 18, dtype=np.int32)


@torch.inference_mode()
def sampled_group(model: Path) -> TrajectoryGroup:
    """A group that the transformers engine samples from these weights."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = [Row(SamplingRequest("", PROMPT, SAMPLING, seed)) for seed in range(6)]
    batch = Batch(LanguageModel(policy, AutoTokenizer.from_pretrained(model)), rows, (1, 0))
    batch.remove_ended()
    while batch.rows:
        batch.step((1, 0))
        batch.remove_ended()
    scored = []
    for number, row in enumerate(rows):
        found = row.completion()
        segment = with_sampled(unsampled(PROMPT), found.token_ids, found.logprobs, found.spans, found.mask)
        trajectory = Trajectory(number, "policy", (segment,), found.finish_reason, "", SAMPLING)
        scored.append(ScoredTrajectory(trajectory, float(number % 2)))
    return TrajectoryGroup(Prompt(0, 0, PROMPT, len(rows), SAMPLING), tuple(scored))


def without_masks(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group as if its log-probs were over the whole vocabulary."""
    rows = []
    for row in group.scored_rows:
        segments = tuple(replace(segment, sampling_mask=None) for segment in row.trajectory.segments)
        sampling = SamplingParameters(temperature=row.trajectory.sampling.temperature)
        rows.append(replace(row, trajectory=replace(row.trajectory, segments=segments, sampling=sampling)))
    return replace(group, rows=tuple(rows))


def test_fresh_samples_have_ratios_of_1_and_no_distance_to_the_same_reference(
    make_learner: MakeLearner, model: Path
) -> None:
    group = sampled_group(model)
    settings = {"kl": {"loss": {"coefficient": 0.1}}, "entropy_coefficient": 0.01, "correction": "token_tis"}
    learner = make_learner(**settings, learning_rate=0.0)
    metrics = learner.train(learner.prepare(*make_batch([group]))).metrics
    assert metrics["behavior_proximal_kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["behavior_weight_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["behavior_weight_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["reference_kl"] == 0
    assert 0 < metrics["entropy"] < np.log(20), "over at most top-k tokens"
    wrong = learner.train(learner.prepare(*make_batch([without_masks(group)], policy_version=2))).metrics
    assert wrong["behavior_proximal_kl"] > 0.01, "over the whole vocabulary the ratios are below 1"


def test_the_result_does_not_depend_on_how_rows_are_packed(make_learner: MakeLearner) -> None:
    masked = [with_sampling_masks(with_tool_output(make_group(index, versions=(0,)))) for index in range(3)]
    groups = [*masked, make_group(3)]  # the last one was sampled from the whole vocabulary
    settings = {"kl": {"loss": {"coefficient": 0.1}}, "entropy_coefficient": 0.1, "advantage": "optimal_token_baseline"}
    found = []
    cuts: list[tuple[Packing, int]] = [("padded", 1000), ("padded", 40), ("flat", 60), ("shared", 200)]
    for packing, budget in cuts:
        learner = make_learner(**settings, packing=packing)
        batch = make_batch(groups, tokens_per_micro_batch=budget, packing=packing)
        result = learner.train(learner.prepare(*batch))
        found.append([result.metrics[name] for name in ("loss", "grad_norm", "entropy", "behavior_proximal_kl")])
    for others in found[1:]:
        assert others == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_a_sampled_token_that_its_mask_lacks_is_refused(make_learner: MakeLearner) -> None:
    group = with_sampling_masks(make_group(0))
    row = group.scored_rows[0]
    segment = row.trajectory.segments[0]
    assert segment.sampling_mask is not None
    others = replace(segment.sampling_mask, ids=segment.sampling_mask.ids * 0)
    broken = replace(row, trajectory=replace(row.trajectory, segments=(replace(segment, sampling_mask=others),)))
    learner = make_learner()
    with pytest.raises(DataError, match=r"top-k 5, and its sampling mask lacks a sampled token"):
        learner.train(learner.prepare(*make_batch([replace(group, rows=(broken, *group.rows[1:]))])))
