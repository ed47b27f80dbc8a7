"""The critic's loss: golden values and gradients under every aggregation, and bad values."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.trainer.value_loss import clipped_value_loss
from tests.support.golden_cases import GoldenCase, golden_cases
from tests.support.padded import flatten, unflatten
from tests.trainer.test_aggregation import golden_shares


@pytest.mark.parametrize("case", golden_cases("value_loss/"), ids=lambda case: case.name)
def test_golden_value_loss(case: GoldenCase) -> None:
    mask_BT = case.inputs["response_mask"]
    values_N, lengths_B = flatten(case.inputs["vpreds"], mask_BT)
    values_N = values_N.clone().requires_grad_()
    returns_N, _ = flatten(case.inputs["returns"], mask_BT)
    start_N, _ = flatten(case.inputs["values"], mask_BT)
    terms = clipped_value_loss(values_N, returns_N, start_N, clip=case.hyper["cliprange_value"])
    shares_N = golden_shares(lengths_B, case.hyper["loss_agg_mode"], case.hyper["global"] or {}, mask_BT.shape[1])
    loss = torch.dot(terms.losses_N, shares_N)
    loss.backward()
    assert values_N.grad is not None
    case.check("loss", loss)
    case.check("grad_vpreds", unflatten(values_N.grad, mask_BT))
    case.check_metric("vf_clipfrac", float(terms.marks["clipped"].double().mean()))


def test_gradients_agree_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    values_N, returns_N, start_N = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    values_N.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clipped_value_loss(x, returns_N, start_N, clip=0.4).losses_N, (values_N,))


def test_a_value_clipped_on_its_way_to_the_return_gets_no_gradient() -> None:
    values_N = torch.tensor([0.6, 1.4], requires_grad=True)
    terms = clipped_value_loss(values_N, torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0]), clip=0.5)
    assert terms.losses_N.tolist() == pytest.approx([0.125, 0.125])
    assert terms.marks["clipped"].tolist() == [True, True]
    (gradient_N,) = torch.autograd.grad(terms.losses_N.sum(), values_N)
    assert gradient_N.tolist() == [0.0, 0.0]


def test_the_unclipped_loss_is_half_the_squared_error() -> None:
    terms = clipped_value_loss(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([0.0]), clip=math.inf)
    assert terms.losses_N.tolist() == [2.0]
    assert terms.marks["clipped"].tolist() == [False]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", range(3))
def test_a_bad_value_makes_its_loss_non_finite(bad: float, place: int) -> None:
    arguments = [torch.ones(2) for _ in range(3)]
    arguments[place][1] = bad
    losses_N = clipped_value_loss(*arguments, clip=0.5).losses_N
    assert losses_N.isfinite().tolist() == [True, False] or (place == 2 and bad == math.inf)


def test_no_tokens_are_accepted_and_wrong_shapes_fail_an_assertion() -> None:
    nothing_N = torch.zeros(0, requires_grad=True)
    clipped_value_loss(nothing_N, nothing_N, nothing_N, clip=0.5).losses_N.sum().backward()
    assert nothing_N.grad is not None
    with pytest.raises(AssertionError):
        clipped_value_loss(torch.zeros(2), torch.zeros(3), torch.zeros(2), clip=0.5)
    with pytest.raises(AssertionError):
        clipped_value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), clip=0.0)
