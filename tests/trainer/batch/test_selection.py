"""Selection of training rows: dynamic sampling, overlong answers, clipping and PF-PPO."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tandem.protos.errors import DataError
from tandem.trainer.algorithm import OverlongPenalty, PolicyFiltration, SelectionOptions
from tandem.trainer.batch.selection import filtration_weights, overlong_penalties, zero_variance
from tests.support.golden_cases import GoldenCase, golden_cases

METHODS = ("best_of_n", "best_random", "best_worst", "power")


@pytest.mark.parametrize("case", golden_cases("dapo/group_filter/"), ids=lambda case: case.name)
def test_golden_group_filter(case: GoldenCase) -> None:
    """The peculiar cases count the rounding errors of a computed deviation as variance; ours does not."""
    scores, groups = case.inputs["score"].numpy(), case.inputs["index"].numpy()
    same = [zero_variance(scores[groups == group]) for group in groups]
    if case.peculiar:
        rounded = [scores[groups == group].std() != 0.0 for group in groups]
        same = [equal and not error for equal, error in zip(same, rounded, strict=True)]
    case.check("keep_row", ~torch.tensor(same))


@pytest.mark.parametrize("case", golden_cases("dapo/overlong/"), ids=lambda case: case.name)
def test_golden_overlong_penalty(case: GoldenCase) -> None:
    options = OverlongPenalty(
        buffer_tokens=case.hyper["overlong_buffer_len"],
        factor=case.hyper["penalty_factor"],
        beyond="ramp" if case.peculiar else "flat",
    )
    penalties_R = overlong_penalties(case.inputs["lengths"].numpy(), options, max_tokens=case.hyper["max_resp_len"])
    case.check("penalty", torch.from_numpy(penalties_R))
    case.check("reward", case.inputs["base_score"] + torch.from_numpy(penalties_R))


def test_the_overlong_penalty_is_constant_past_the_limit() -> None:
    lengths = np.array([0, 6, 7, 10, 11, 50])
    options = OverlongPenalty(buffer_tokens=4, factor=2.0)
    assert overlong_penalties(lengths, options, max_tokens=10).tolist() == [0.0, 0.0, -0.5, -2.0, -2.0, -2.0]


def test_groups_of_one_and_of_none_are_kept() -> None:
    assert not zero_variance([1.0]) and not zero_variance([])
    assert zero_variance([0.1, 0.1, 0.1]), "rounding errors are no variance"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rewards_are_refused(bad: float) -> None:
    rewards, groups = np.array([1.0, bad]), np.zeros(2, np.int64)
    for refuse in (
        lambda: zero_variance([1.0, bad]),
        lambda: zero_variance([bad]),
        *(
            lambda method=method: filtration_weights(rewards, groups, PolicyFiltration(method=method), seed=0)
            for method in METHODS
        ),
    ):
        with pytest.raises(DataError, match=r"1 of \d rewards are NaN or infinite"):
            refuse()


@pytest.mark.parametrize(
    ("method", "want"),
    [
        ("best_of_n", [0.0, 4.0, 0.0, 0.0]),
        ("best_random", [2 / 3, 2.0, 2 / 3, 2 / 3]),
        ("best_worst", [0.0, 2.0, 0.0, 2.0]),
    ],
)
def test_filtration_weights_match_the_paper(method: str, want: list[float]) -> None:
    options = PolicyFiltration.model_validate({"method": method})
    rewards, groups = np.array([0.5, 0.9, 0.3, 0.1]), np.zeros(4, np.int64)
    assert filtration_weights(rewards, groups, options, seed=0).tolist() == pytest.approx(want)


def test_equal_rewards_share_the_weights_of_their_ranks() -> None:
    groups = np.array([1, 1, 1, 1, 2, 2, 7])
    rewards = np.array([1.0, 0.0, 1.0, 0.5, 3.0, 3.0, 5.0])
    weights = filtration_weights(rewards, groups, PolicyFiltration(method="best_worst"), seed=0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, 1.0, 0.0, 1.0, 1.0, 1.0])


def test_power_weights_over_the_whole_batch() -> None:
    rewards, groups = np.array([1.0, -2.0, 0.0, 1.0]), np.array([0, 0, 1, 1])
    options = PolicyFiltration(method="power")
    assert filtration_weights(rewards, groups, options, seed=0).tolist() == pytest.approx(
        [2 / 3, 8 / 3, 0, 2 / 3], abs=1e-7
    )
    assert filtration_weights(np.zeros(4), groups, options, seed=0).tolist() == [1.0] * 4
    with pytest.raises(DataError, match="powers of rewards"):
        filtration_weights(np.full(4, 1e200), groups, options, seed=0)


@given(
    seed=st.integers(0, 1000),
    method=st.sampled_from(METHODS),
    resample=st.booleans(),
    sizes=st.lists(st.integers(1, 6), max_size=5),
)
def test_filtration_keeps_the_size_of_the_batch(seed: int, method: str, resample: bool, sizes: list[int]) -> None:
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    rewards = random.integers(0, 3, len(groups)).astype(float)
    options = PolicyFiltration.model_validate({"method": method, "resample": resample})
    weights = filtration_weights(rewards, groups, options, seed=seed)
    assert weights.sum() == pytest.approx(len(groups))
    assert np.array_equal(weights, filtration_weights(rewards, groups, options, seed=seed))
    if method != "power":
        assert np.bincount(groups, weights, len(sizes)) == pytest.approx(np.array(sizes, float))
    if resample:
        assert np.array_equal(weights, weights.round())
    else:
        order = random.permutation(len(groups))
        assert filtration_weights(rewards[order], groups[order], options, seed=seed + 1) == pytest.approx(
            weights[order]
        )


def test_resampling_follows_the_weights_on_average() -> None:
    rewards, groups = np.array([0.5, 0.9, 0.3, 0.1]), np.zeros(4, np.int64)
    options = PolicyFiltration(method="best_random", resample=True)
    mean = np.mean([filtration_weights(rewards, groups, options, seed=seed) for seed in range(4000)], axis=0)
    assert mean == pytest.approx([2 / 3, 2.0, 2 / 3, 2 / 3], abs=0.06)
    draws = [filtration_weights(rewards, groups, options, seed=seed).tolist() for seed in range(20)]
    assert any(draw != draws[0] for draw in draws)


@pytest.mark.parametrize(
    "bad",
    [
        {"reward_clip": [1.0, 1.0]},
        {"reward_clip": [0.0, math.nan]},
        {"advantage_clip": 0.0},
        {"overlong_penalty": {"buffer_tokens": 0}},
        {"filtration": {"method": "best"}},
        {"filtration": {"power": 0.0}},
        {"dynamic_sampling": True},
    ],
)
def test_bad_options_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SelectionOptions.model_validate(bad)
