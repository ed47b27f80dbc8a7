"""Log-probs, entropy and Σπ² in chunks: golden values, equality with the naive computation, and gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tandem.trainer.models.token_logprobs
from tandem.protos.types import SamplingMask, Segment
from tandem.services.run import estimates
from tandem.trainer.batch.kept_tokens import KeptTokens
from tandem.trainer.models.token_logprobs import TokenStatistics, statistics_from_logits, token_statistics
from tests.support.golden_cases import GoldenCase, golden_cases

NUM_TOKENS, HIDDEN, VOCABULARY = 23, 8, 50
EVERYTHING = {"entropy": True, "squared_probs": True}


@pytest.fixture(autouse=True)
def chunks_of_four_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.trainer.models.token_logprobs, "_CHUNK_LOGITS", 4 * VOCABULARY)


def make_inputs(dtype: torch.dtype = torch.float32, *, bias: bool = True, scale: float = 1.0) -> list[Any]:
    """Hidden states, weight and bias of a head; the bias is None without one."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight_VH = scale * torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    bias_V = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) if bias else None
    return [None if given is None else given.to(dtype).requires_grad_() for given in (hidden_NH, weight_VH, bias_V)]


def make_targets() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    target_N = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    return target_N, 0.5 + torch.rand(NUM_TOKENS, generator=generator)


def chunked(inputs: list[Any], **asked: bool) -> TokenStatistics:
    return token_statistics(*inputs, *make_targets(), **asked)


def naive(inputs: list[Any], **asked: bool) -> TokenStatistics:
    return statistics_from_logits(functional.linear(*inputs), *make_targets(), **asked)


def gradients(found: TokenStatistics, inputs: list[Any]) -> list[Tensor]:
    """Gradients of a sum in which every statistic of every token has its own factor."""
    generator = torch.Generator().manual_seed(2)
    values = [values_N for values_N in found if values_N is not None]
    terms = [values_N @ torch.randn(NUM_TOKENS, generator=generator).to(values_N) for values_N in values]
    return list(torch.autograd.grad(torch.stack(terms).sum(), [given for given in inputs if given is not None]))


@pytest.mark.parametrize("case", golden_cases("masked_ops/from_logits/"), ids=lambda case: case.name)
@pytest.mark.parametrize("in_chunks", [True, False])
def test_statistics_from_logits_agree_with_golden_values(
    case: GoldenCase, in_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_BTV, labels_BT = case.inputs["logits"], case.inputs["labels"]
    logits_NV, vocabulary = logits_BTV.flatten(0, 1), logits_BTV.shape[-1]
    monkeypatch.setattr(tandem.trainer.models.token_logprobs, "_CHUNK_LOGITS", 5 * vocabulary)
    target_N, temperature_N = labels_BT.flatten(), torch.ones(labels_BT.numel())
    if in_chunks:  # with an identity matrix as the head, the hidden states are the logits
        identity_VV = torch.eye(vocabulary, dtype=logits_NV.dtype)
        found = token_statistics(logits_NV, identity_VV, None, target_N, temperature_N, **EVERYTHING)
    else:
        found = statistics_from_logits(logits_NV, target_N, temperature_N, **EVERYTHING)
    for name, values_N in zip(("log_prob", "entropy", "sum_pi_squared"), found, strict=True):
        case.check(name, values_N.view_as(labels_BT))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("asked", [{}, {"entropy": True}, {"squared_probs": True}, EVERYTHING])
def test_statistics_and_gradients_equal_the_naive_computation(bias: bool, scale: float, asked: dict[str, bool]) -> None:
    inputs = make_inputs(bias=bias, scale=scale)
    got, want = chunked(inputs, **asked), naive(inputs, **asked)
    for got_N, want_N in zip(got, want, strict=True):
        assert (got_N is None) == (want_N is None)
        if got_N is not None:
            torch.testing.assert_close(got_N, want_N, rtol=1e-5, atol=1e-5)
    for got_grad, want_grad in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(got_grad, want_grad, rtol=1e-5, atol=1e-5 * max(1.0, float(want_grad.abs().max())))


def make_masks() -> list[Segment]:
    """Rows whose loss tokens, the same as the targets, have a mask of 1 to 6 tokens; the last row has none."""
    random, target_N = np.random.default_rng(3), make_targets()[0].numpy().astype(np.int32)
    rows = []
    for tokens in np.split(target_N, [5, 6, 17]):
        ids = np.concatenate([[1], tokens]).astype(np.int32)
        loss_mask = np.concatenate([[0], np.ones(len(tokens))]).astype(np.uint8)
        others = [random.permutation(np.delete(np.arange(VOCABULARY), t))[: random.integers(0, 6)] for t in tokens]
        kept = [random.permutation([t, *more]) for t, more in zip(tokens, others, strict=True)]
        counts = np.array([0, *map(len, kept)], np.int32)
        mask = SamplingMask(np.concatenate(kept).astype(np.int32), counts)
        rows.append(Segment(ids, np.zeros(len(ids), np.float32), loss_mask, (), mask))
    return [*rows[:-1], replace(rows[-1], sampling_mask=None)]


@pytest.mark.parametrize("scale", [1.0, 20.0])
@pytest.mark.parametrize("asked", [{}, {"entropy": True}, {"squared_probs": True}, EVERYTHING])
@pytest.mark.parametrize("in_chunks", [True, False])
def test_truncated_distributions_are_normalised_over_the_kept_tokens(
    scale: float, asked: dict[str, bool], in_chunks: bool
) -> None:
    """Against a softmax over only the kept logits of each token, written out in float64."""
    inputs, rows = make_inputs(torch.float64, scale=scale), make_masks()
    kept = KeptTokens.of(rows, torch.device("cpu"))
    if in_chunks:
        got = token_statistics(*inputs, *make_targets(), kept, **asked)
    else:
        got = statistics_from_logits(functional.linear(*inputs), *make_targets(), kept, **asked)
    logits_NV = functional.linear(*inputs) / make_targets()[1][:, None]
    masks = [one.sampling_mask for one in rows]
    sets = [ids for mask in masks if mask for ids in np.split(mask.ids, np.cumsum(mask.counts))[1:-1]]
    sets += [np.arange(VOCABULARY)] * (NUM_TOKENS - len(sets))
    want = [[], [], []]
    for logits_V, ids, target in zip(logits_NV, sets, make_targets()[0], strict=True):
        logprobs_K = logits_V[torch.from_numpy(ids).long()].log_softmax(-1)
        want[0].append(logprobs_K[ids.tolist().index(int(target))])
        want[1].append(-(logprobs_K.exp() * logprobs_K).sum())
        want[2].append((2 * logprobs_K).exp().sum())
    expected = [torch.stack(values) if got_N is not None else None for values, got_N in zip(want, got, strict=True)]
    for got_N, want_N in zip(got, expected, strict=True):
        if got_N is not None:
            torch.testing.assert_close(got_N, want_N, rtol=1e-9, atol=1e-9)
    found = gradients(got, inputs)
    torch.testing.assert_close(found, gradients(TokenStatistics(*expected), inputs), rtol=1e-9, atol=1e-9)
    assert all(bool(gradient.isfinite().all()) for gradient in found)


@pytest.mark.parametrize("used", range(3))
def test_gradient_of_one_statistic_when_all_are_computed(used: int) -> None:
    inputs = make_inputs(torch.float64)
    got, want = (torch.autograd.grad(of(inputs, **EVERYTHING)[used].sum(), inputs) for of in (chunked, naive))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("tokens_kept", [0, 9, NUM_TOKENS])
def test_bfloat16_is_as_precise_as_the_naive_computation(tokens_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.trainer.models.token_logprobs, "_KEPT_SLOPES", tokens_kept * VOCABULARY)
    inputs = make_inputs(torch.bfloat16)
    exact = [None if given is None else given.detach().double().requires_grad_() for given in inputs]
    got, want, truth = chunked(inputs), naive(inputs), naive(exact)
    assert got.logprobs_N.dtype == torch.float32
    # computed from the same bfloat16 logits
    torch.testing.assert_close(got.logprobs_N, want.logprobs_N, rtol=1e-5, atol=1e-5)
    for got_grad, want_grad, true_grad in zip(
        gradients(got, inputs), gradients(want, inputs), gradients(truth, exact), strict=True
    ):
        assert got_grad.dtype == torch.bfloat16
        assert (got_grad - true_grad).norm() <= 1.2 * (want_grad - true_grad).norm() + 1e-3 * true_grad.norm()


@pytest.mark.parametrize(
    ("dtype", "tokens_kept", "sizes"),
    [
        (torch.bfloat16, 0, [4, 4, 4, 4, 4, 3]),
        (torch.bfloat16, 9, [8, 8, 7]),
        (torch.bfloat16, NUM_TOKENS + 1, [23]),
        (torch.float32, NUM_TOKENS + 1, [4, 4, 4, 4, 4, 3]),
    ],
)
def test_in_bfloat16_a_part_of_the_heads_gradient_is_that_of_several_whole_chunks(
    dtype: torch.dtype, tokens_kept: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tandem.trainer.models.token_logprobs
    monkeypatch.setattr(module, "_KEPT_SLOPES", tokens_kept * VOCABULARY)
    added, seen = module._added, []

    def noted(total: Tensor | None, slopes_GV: Tensor, hidden_GH: Tensor, *, alone: bool) -> Tensor:
        seen.append(len(slopes_GV))
        return added(total, slopes_GV, hidden_GH, alone=alone)

    monkeypatch.setattr(module, "_added", noted)
    inputs = make_inputs(dtype)
    gradients(chunked(inputs), inputs)
    assert seen == sizes


def test_the_check_before_a_run_counts_the_gradients_that_are_kept() -> None:
    assert estimates._KEPT_SLOPES == tandem.trainer.models.token_logprobs._KEPT_SLOPES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_heads_gradient_is_the_sum_over_chunks_bit_for_bit(dtype: torch.dtype) -> None:
    hidden_NH, weight_VH, _ = make_inputs(dtype, bias=False)
    target_N, temperature_N = make_targets()
    found = token_statistics(hidden_NH, weight_VH, None, target_N, temperature_N)
    (got,) = torch.autograd.grad(found.logprobs_N.sum(), [weight_VH])
    want = torch.zeros_like(weight_VH)
    for first in range(0, NUM_TOKENS, 4):
        part = slice(first, first + 4)
        logits_CV = functional.linear(hidden_NH[part], weight_VH) / temperature_N[part, None].to(dtype)
        slopes_CV = -logits_CV.detach().log_softmax(-1).exp()
        slopes_CV[torch.arange(len(slopes_CV)), target_N[part]] += 1.0
        want.addmm_((slopes_CV / temperature_N[part, None]).T, hidden_NH.detach()[part])
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_gets_no_gradient(dtype: torch.dtype) -> None:
    hidden_NH, weight_VH, _ = make_inputs(dtype, bias=False)
    weight_VH.requires_grad_(False)
    found = token_statistics(hidden_NH, weight_VH, None, *make_targets())
    found.logprobs_N.sum().backward()
    assert hidden_NH.grad is not None and weight_VH.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_batch_gives_zero_gradients(dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype)
    hidden_NH, weight_VH, bias_V = inputs
    target_N, temperature_N = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    found = token_statistics(hidden_NH[:0], weight_VH, bias_V, target_N, temperature_N, entropy=True)
    assert found.logprobs_N.shape == found.entropy_N.shape == (0,)
    for gradient in torch.autograd.grad(found.logprobs_N.sum(), [hidden_NH, weight_VH, bias_V]):
        assert not gradient.any()


def test_bad_hidden_states_and_temperatures_give_non_finite_results() -> None:
    inputs = make_inputs()
    with torch.no_grad():
        inputs[0][3, 0] = math.nan
    found = chunked(inputs, entropy=True)
    assert found.logprobs_N.isnan().nonzero().tolist() == [[3]]
    assert all(not bool(gradient.isfinite().all()) for gradient in gradients(found, inputs))
    hidden_NH, weight_VH, bias_V = make_inputs()
    cold = token_statistics(hidden_NH, weight_VH, bias_V, make_targets()[0], torch.zeros(NUM_TOKENS))
    assert not bool(cold.logprobs_N.isfinite().any())
