"""The clipped surrogate, the truncated behavior weight, the aggregation, and that the cut of a batch leaves no trace in them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.golden_cases import GoldenCase, golden_cases
from trainer.corrections import behavior_weights, correction_sums
from trainer.losses import ClipRange, policy_loss, token_shares
from trainer.schedule import learning_rate


def shares_of(mask: Tensor, aggregation: str, world: dict[str, int] | None) -> Tensor:
    """Each token's share; `world` gives totals over all ranks, whose other rows stand in as made-up ones."""
    counts = [int(count) for count in mask.sum(1)]
    others: list[int] = []
    if world and aggregation == "token-mean":
        others = [world["batch_num_tokens"] - sum(counts)]
    elif world:
        others = [7] * (world["global_batch_size"] - sum(1 for count in counts if count))
    shares = token_shares([*counts, *others], aggregation)[: len(counts)]  # type: ignore[arg-type]
    return mask * torch.tensor(shares, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("case", golden_cases("aggregation/"), ids=lambda case: case.name)
def test_aggregation_agrees_with_golden_values(case: GoldenCase) -> None:
    losses = case.inputs["loss_mat"].clone().requires_grad_()
    shares = shares_of(case.inputs["loss_mask"], case.name.split("/")[1], case.hyper if "global" in case.name else None)
    loss = (losses * shares).sum() * case.hyper.get("dp_size", 1)
    loss.backward()
    assert losses.grad is not None
    case.check("loss", loss.detach())
    case.check("grad", losses.grad)


@pytest.mark.parametrize("case", golden_cases("policy_loss/vanilla/"), ids=lambda case: case.name)
def test_clipped_surrogate_agrees_with_golden_values(case: GoldenCase) -> None:
    current = case.inputs["log_prob"].clone().requires_grad_()
    mask = case.inputs["response_mask"]
    shares = shares_of(mask, case.hyper["loss_agg_mode"], case.hyper["global"])
    clip = ClipRange(case.hyper["clip_ratio_low"], case.hyper["clip_ratio_high"], case.hyper["clip_ratio_c"])
    weights = case.inputs.get("rollout_is_weights", torch.ones_like(shares))
    loss, sums = policy_loss(
        current, case.inputs["old_log_prob"], case.inputs["advantages"], weights, shares, clip=clip
    )
    loss = loss * (case.hyper["global"] or {"dp_size": 1})["dp_size"]
    loss.backward()
    assert current.grad is not None
    case.check("loss", loss.detach())
    case.check("grad_log_prob", current.grad)
    assert float(sums["clipped"] / mask.sum()) == pytest.approx(case.metrics["pg_clipfrac"], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("case", golden_cases("rollout_correction/"), ids=lambda case: case.name)
def test_truncated_weights_agree_with_golden_values(case: GoldenCase) -> None:
    mask = case.inputs["response_mask"]
    proximal, behavior, cap = (
        case.inputs["old_log_prob"],
        case.inputs["rollout_log_prob"],
        case.hyper["rollout_is_threshold"],
    )
    weights = behavior_weights(proximal, behavior, cap=cap)
    case.check("is_weights", weights * mask)
    valid = mask.bool()
    sums = correction_sums(proximal[valid], behavior[valid], weights[valid], cap=cap)
    tokens = int(mask.sum())
    assert float(sums["weight"] / tokens) == pytest.approx(case.metrics["rollout_is_mean"])
    assert float(sums["truncated"] / tokens) == pytest.approx(case.metrics["rollout_is_ratio_fraction_high"])
    effective = float(sums["weight"] ** 2 / (tokens * sums["weight_squared"]))
    assert effective == pytest.approx(case.metrics["rollout_is_eff_sample_size"], rel=1e-5)
    if "extreme" not in case.name:  # beyond ±20 the clamp of this implementation acts
        assert float(sums["kl"] / tokens) == pytest.approx(case.metrics["k3_kl"], rel=1e-5)


def test_weights_carry_no_gradient() -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    assert not behavior_weights(logprobs, torch.zeros(3), cap=2.0).requires_grad


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=9).filter(any),
    aggregation=st.sampled_from(["token-mean", "seq-mean-token-mean"]),
    parts=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_cutting_a_batch_changes_neither_loss_nor_gradient(
    counts: list[int], aggregation: str, parts: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(counts))[None] < torch.tensor(counts)[:, None]).double()
    current, proximal, advantages, weights = torch.randn(4, *mask.shape, generator=generator, dtype=torch.float64)
    shares = shares_of(mask, aggregation, None)
    clip = ClipRange(0.2, 0.3)

    def gradient(pieces: list[Tensor]) -> tuple[float, Tensor]:
        leaf = current.clone().requires_grad_()
        total = 0.0
        for rows in pieces:
            loss, _ = policy_loss(
                leaf[rows], proximal[rows], advantages[rows], weights[rows].abs(), shares[rows], clip=clip
            )
            loss.backward()
            total += float(loss.detach())
        assert leaf.grad is not None
        return total, leaf.grad

    whole_loss, whole_gradient = gradient([torch.arange(len(counts))])
    order = torch.randperm(len(counts), generator=generator)
    cut_loss, cut_gradient = gradient(list(order.tensor_split(parts)))
    assert cut_loss == pytest.approx(whole_loss, abs=1e-12)
    torch.testing.assert_close(cut_gradient, whole_gradient, atol=1e-14, rtol=1e-12)
    assert float(shares.sum()) == pytest.approx(1.0)


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    def rate(version: int, schedule: str, warmup: int = 4) -> float:
        return learning_rate(version, peak=2.0, warmup_batches=warmup, total_batches=20, schedule=schedule)  # type: ignore[arg-type]

    assert [rate(version, "constant") for version in (1, 2, 4, 20)] == [0.5, 1.0, 2.0, 2.0]
    assert rate(4, "cosine") == 2.0
    assert rate(12, "cosine") == pytest.approx(1.1)
    assert rate(20, "cosine") == pytest.approx(0.2)
    assert rate(25, "cosine") == pytest.approx(0.2)
    assert rate(1, "constant", warmup=0) == 2.0
    assert all(math.isfinite(rate(version, "cosine", warmup=20)) for version in range(1, 30))
