"""Properties of off-policy correction for every option and every batch, and the options."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from tandem.trainer.batch.ragged import keep_tokens
from tandem.trainer.off_policy.correct import Corrected, correct
from tandem.trainer.off_policy.diagnostics import CorrectionSums, correction_sums
from tandem.trainer.off_policy.options import CorrectionOptions, RejectionOptions, WeightOptions
from tandem.trainer.off_policy.presets import PRESETS, PresetName

laws = settings(max_examples=40, deadline=None)


@st.composite
def weight_options(draw: st.DrawFn) -> WeightOptions:
    return WeightOptions(
        level=draw(st.sampled_from(["none", "token", "sequence", "geometric"])),
        low=draw(st.sampled_from([0.0, 0.5, 0.9])),
        high=draw(st.sampled_from([1.0, 1.1, 2.0, 5.0])),
        outside=draw(st.sampled_from(["clamp", "zero", "stop"])),
        normalize=draw(st.booleans()),
    )


@st.composite
def rejection_options(draw: st.DrawFn) -> RejectionOptions:
    level = draw(st.sampled_from(["token", "sequence", "geometric", "max"]))
    measure = draw(st.sampled_from(["ratio", "k1", "k2", "k3"]))
    low, high = {
        "ratio": (draw(st.sampled_from([None, 0.3, 0.9])), draw(st.sampled_from([1.05, 1.5, 4.0]))),
        "k1": (draw(st.sampled_from([None, -0.5, -0.1])), draw(st.sampled_from([0.0, 0.2, 1.0]))),
    }.get(measure, (None, draw(st.sampled_from([0.01, 0.1, 0.5]))))
    return RejectionOptions(level=level, measure=measure, low=low, high=high, negative_only=draw(st.booleans()))


@st.composite
def correction_options(draw: st.DrawFn) -> CorrectionOptions:
    return CorrectionOptions(
        weights=draw(weight_options()),
        rejections=tuple(draw(st.lists(rejection_options(), max_size=3, unique_by=lambda test: test.name))),
        veto=draw(st.sampled_from([0.0, 0.1])),
    )


class Batch:
    """Rows whose ratios are far enough from 1 to reach every bound above."""

    def __init__(self, lengths: list[int], seed: int, scale: float = 0.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths_B = torch.tensor(lengths, dtype=torch.int64)
        count = sum(lengths)
        self.behavior_N = -torch.rand(count, generator=generator, dtype=torch.float64) * 4
        self.proximal_N = self.behavior_N + scale * torch.randn(count, generator=generator, dtype=torch.float64)
        self.advantages_N = torch.randn(count, generator=generator, dtype=torch.float64)
        self.staleness_N = torch.randint(-1, 12, (count,), generator=generator)

    def take(self, rows: list[int]) -> Batch:
        """The given rows in the given order."""
        ends = self.lengths_B.cumsum(0)
        tokens = [torch.arange(int(ends[row] - self.lengths_B[row]), int(ends[row])) for row in rows]
        index = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
        part = Batch([], 0)
        part.lengths_B = self.lengths_B[rows]
        for name in ("behavior_N", "proximal_N", "advantages_N", "staleness_N"):
            setattr(part, name, getattr(self, name)[index])
        return part

    def correct(self, options: CorrectionOptions) -> Corrected:
        return correct(self.proximal_N, self.behavior_N, self.lengths_B, options, advantages_N=self.advantages_N)

    def sums(self, options: CorrectionOptions) -> CorrectionSums:
        corrected = self.correct(options)
        return correction_sums(corrected, self.proximal_N, self.behavior_N, self.lengths_B, self.staleness_N, options)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    return Batch(lengths, draw(st.integers(0, 2**16)), draw(st.sampled_from([0.05, 0.5, 3.0])))


def check_close(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():  # a standard deviation is the root of a difference that may cancel
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-6 if name.endswith("_std") else 1e-9), name


@laws
@given(batch=batches(), options=correction_options())
def test_an_on_policy_batch_has_weights_1_and_rejects_nothing(batch: Batch, options: CorrectionOptions) -> None:
    batch.proximal_N = batch.behavior_N
    corrected = batch.correct(options)
    assert torch.equal(corrected.weights_N, torch.ones_like(corrected.weights_N))
    assert corrected.keep_N.all()
    figures = batch.sums(options).figures()
    for name in ("effective_sample_size", "perplexity_ratio"):
        assert figures[name] == 1.0
    zero = ("kl", "kl_k1", "difference", "chi_squared_token", "chi_squared_sequence", "fraction", "std")
    assert all(value == 0.0 for name, value in figures.items() if name.endswith(zero))


@laws
@given(batch=batches(), options=correction_options())
def test_weights_and_masks_require_no_gradient(batch: Batch, options: CorrectionOptions) -> None:
    batch.proximal_N.requires_grad_()
    batch.behavior_N.requires_grad_()
    corrected, sums = batch.correct(options), batch.sums(options)
    found = [getattr(corrected, name) for name in ("weights_N", "keep_N", "log_ratio_N", "ratio_N", "bounded_N")]
    assert not any(tensor.requires_grad for tensor in [*found, sums.sums_SK, sums.maxima_SM])


@laws
@given(batch=batches(), options=correction_options())
def test_a_token_must_pass_every_test(batch: Batch, options: CorrectionOptions) -> None:
    keep_N = torch.ones_like(batch.behavior_N, dtype=torch.bool)
    for test in options.rejections:
        keep_N &= batch.correct(CorrectionOptions(rejections=(test,))).keep_N
    keep_N &= batch.correct(CorrectionOptions(veto=options.veto)).keep_N
    assert torch.equal(batch.correct(options).keep_N, keep_N)


@laws
@given(batch=batches(), test=rejection_options())
def test_row_tests_keep_or_reject_rows_whole(batch: Batch, test: RejectionOptions) -> None:
    if test.level == "token":
        return
    keep_N = batch.correct(CorrectionOptions(rejections=(test.model_copy(update={"negative_only": False}),))).keep_N
    kept_B = keep_tokens(batch.lengths_B, keep_N)
    assert ((kept_B == 0) | (kept_B == batch.lengths_B)).all()


@laws
@given(batch=batches(), options=correction_options(), data=st.data())
def test_row_order_and_micro_batches_do_not_matter(
    batch: Batch, options: CorrectionOptions, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(batch.lengths_B))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=3)))
    parts = [batch.take(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    shuffled = batch.take(order)
    whole = shuffled.correct(options)
    pieces = [part.correct(options) for part in parts]
    assert torch.equal(torch.cat([piece.keep_N for piece in pieces]), whole.keep_N)
    assert torch.equal(torch.cat([piece.bounded_N for piece in pieces]), whole.bounded_N)
    if not options.weights.normalize:
        assert torch.equal(torch.cat([piece.weights_N for piece in pieces]), whole.weights_N)

    total = sum((part.sums(options) for part in parts), CorrectionSums.zeros(options))
    check_close(total.figures(), batch.sums(options).figures())


@laws
@given(batch=batches(), options=correction_options())
def test_metrics_per_staleness_add_up_to_the_total(batch: Batch, options: CorrectionOptions) -> None:
    figures = batch.sums(options).figures()
    assert all(map(math.isfinite, figures.values()))
    buckets = [name.split("/")[0] for name in figures if name.endswith("/num_loss_tokens")]
    assert set(buckets) <= {*(f"staleness_{s}" for s in range(8)), "staleness_8_plus"}
    tokens = [figures[f"{bucket}/num_loss_tokens"] for bucket in buckets]
    assert sum(tokens) == len(batch.behavior_N)
    assert sum(figures[f"{bucket}/num_rows"] for bucket in buckets) == int((batch.lengths_B > 0).sum())
    for name in ("behavior_proximal_kl", "behavior_weight_mean", "chi_squared_token", "rejected_fraction"):
        mean = sum(n * figures[f"{bucket}/{name}"] for n, bucket in zip(tokens, buckets, strict=True))
        assert mean / max(1, sum(tokens)) == pytest.approx(figures[name], rel=1e-9, abs=1e-12)


def test_metrics_of_a_staleness_equal_those_of_a_batch_of_only_its_rows() -> None:
    batch, options = Batch([4, 3, 5, 2], 3), CorrectionOptions(preset="seq_tis_rs")
    batch.staleness_N = torch.tensor([1] * 4 + [-3] * 3 + [1] * 5 + [11] * 2)
    figures = batch.sums(options).figures()
    for bucket, rows in {"staleness_0": [1], "staleness_1": [0, 2], "staleness_8_plus": [3]}.items():
        alone = batch.take(rows).sums(options).figures()
        whole = {name: value for name, value in alone.items() if not name.startswith("staleness_")}
        assert {"rejection/sequence_ratio/mean", "perplexity_ratio", "truncated_above_fraction"} <= whole.keys()
        check_close({name: figures[f"{bucket}/{name}"] for name in whole}, whole)
    assert not any(name.startswith(("staleness_2", "staleness_7")) for name in figures)


def test_a_row_is_as_stale_as_its_stalest_token() -> None:
    batch, options = Batch([3], 0), CorrectionOptions()
    batch.staleness_N = torch.tensor([2, 0, 1])
    figures = batch.sums(options).figures()
    assert [figures[f"staleness_{s}/num_loss_tokens"] for s in (0, 1, 2)] == [1, 1, 1]
    assert [figures[f"staleness_{s}/num_rows"] for s in (0, 1, 2)] == [0, 0, 1]


def test_metrics_equal_the_divergences_they_are_named_after() -> None:
    """The frequencies of 16 tokens equal the sampler's probabilities, so means over them are expectations."""
    behavior = torch.tensor([8.0, 4.0, 2.0, 2.0], dtype=torch.float64) / 16
    proximal = torch.tensor([2.0, 4.0, 4.0, 6.0], dtype=torch.float64) / 16
    counts = (behavior * 16).long()
    behavior_N, proximal_N = behavior.repeat_interleave(counts).log(), proximal.repeat_interleave(counts).log()
    options = CorrectionOptions(weights=WeightOptions(high=100.0))
    lengths_B = torch.ones(16, dtype=torch.int64)
    corrected = correct(proximal_N, behavior_N, lengths_B, options)
    staleness_N = torch.zeros(16, dtype=torch.int64)
    figures = correction_sums(corrected, proximal_N, behavior_N, lengths_B, staleness_N, options).figures()
    divergence = float((behavior * (behavior / proximal).log()).sum())
    chi_squared = float((proximal**2 / behavior).sum()) - 1
    assert figures["behavior_proximal_kl_k1"] == pytest.approx(divergence)
    assert figures["behavior_proximal_kl"] == pytest.approx(divergence)
    assert figures["chi_squared_token"] == pytest.approx(chi_squared)
    assert figures["chi_squared_sequence"] == pytest.approx(chi_squared), "rows of one token"
    assert figures["behavior_weight_mean"] == pytest.approx(1.0), "unbounded weights average 1 under the sampler"
    assert figures["behavior_weight_std"] == pytest.approx(math.sqrt(chi_squared))
    assert figures["effective_sample_size"] == pytest.approx(1 / (1 + chi_squared))
    assert figures["perplexity_ratio"] == pytest.approx(float((behavior**2 / proximal).sum()))


@laws
@given(
    batch=batches(), options=correction_options(), bad=st.sampled_from([math.nan, math.inf, -math.inf]), data=st.data()
)
def test_a_row_that_is_not_finite_is_rejected_without_affecting_others(
    batch: Batch, options: CorrectionOptions, bad: float, data: st.DataObject
) -> None:
    filled = [row for row, length in enumerate(batch.lengths_B.tolist()) if length]
    if not filled:
        return
    row = data.draw(st.sampled_from(filled))
    others = [other for other in range(len(batch.lengths_B)) if other != row]
    clean = batch.take(others)
    starts = batch.lengths_B.cumsum(0) - batch.lengths_B
    first, last = int(starts[row]), int(starts[row] + batch.lengths_B[row])
    column: Tensor = getattr(batch, data.draw(st.sampled_from(["behavior_N", "proximal_N"])))
    column[data.draw(st.integers(first, last - 1))] = bad

    corrected, expected = batch.correct(options), clean.correct(options)
    in_row_N = torch.zeros_like(corrected.keep_N)
    in_row_N[first:last] = True
    assert not corrected.keep_N[in_row_N].any() and not corrected.weights_N[in_row_N].any()
    assert corrected.log_ratio_N.isfinite().all() and not corrected.log_ratio_N[in_row_N].any()
    assert torch.equal(corrected.keep_N[~in_row_N], expected.keep_N)
    torch.testing.assert_close(corrected.weights_N[~in_row_N], expected.weights_N, rtol=1e-12, atol=0)
    figures = batch.sums(options).figures()
    assert figures.pop("nonfinite_row_fraction") == pytest.approx(1 / len(filled))
    whole = {name: value for name, value in figures.items() if not name.startswith("staleness_")}
    without = clean.sums(options).figures()
    check_close(whole, {name: without[name] for name in whole})
    assert all(map(math.isfinite, figures.values()))


@pytest.mark.parametrize("lengths", [[0], [0, 0], [3, 0, 2]])
@pytest.mark.parametrize("normalize", [False, True])
def test_rejecting_everything_gives_finite_metrics(lengths: list[int], normalize: bool) -> None:
    batch = Batch(lengths, 0)
    batch.proximal_N = batch.behavior_N - 1.0
    options = CorrectionOptions(
        weights=WeightOptions(low=0.5, outside="zero", normalize=normalize),
        rejections=(RejectionOptions(measure="k3", high=0.01), RejectionOptions(level="sequence", low=0.9)),
        veto=0.9,
    )
    corrected = batch.correct(options)
    assert not corrected.keep_N.any() and not corrected.weights_N.any()
    assert keep_tokens(batch.lengths_B, corrected.keep_N).tolist() == [0] * len(lengths)
    figures = batch.sums(options).figures()
    assert all(map(math.isfinite, figures.values()))
    some = float(sum(lengths) > 0)
    assert figures["rejected_fraction"] == figures["rejected_row_fraction"] == some
    assert figures["effective_sample_size"] == 1.0 - some


@laws
@given(seed=st.integers(0, 2**16), scale=st.sampled_from([1e2, 1e4, 1e30]), options=correction_options())
def test_extreme_log_ratios_give_finite_weights_and_metrics(
    seed: int, scale: float, options: CorrectionOptions
) -> None:
    batch = Batch([4, 1, 7], seed, scale)
    assert batch.correct(options).weights_N.isfinite().all()
    assert all(map(math.isfinite, batch.sums(options).figures().values()))


def test_long_rows_are_summed_precisely() -> None:
    """The sequence ratio of a long row of float32 log-probs equals the one computed in float64."""
    torch.manual_seed(0)
    behavior_N = -torch.rand(20_000) * 5
    proximal_N = behavior_N + 1e-3 * torch.randn(20_000)
    options = CorrectionOptions(weights=WeightOptions(level="sequence", high=1e6))
    weights_N = correct(proximal_N, behavior_N, torch.tensor([20_000]), options).weights_N
    assert weights_N.dtype == torch.float32
    expected = (proximal_N - behavior_N).double().sum().exp()
    assert float(weights_N[0]) == pytest.approx(float(expected), rel=1e-6)


# ---- options ----


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (WeightOptions, {"low": 0.5, "high": 0.5}, "low must be below high"),
        (WeightOptions, {"high": 0.9}, "1, the ratio of a fresh token, must lie within"),
        (WeightOptions, {"low": 1.5, "high": 2.0}, "1, the ratio of a fresh token, must lie within"),
        (WeightOptions, {"high": 0.0}, "greater than 0"),
        (WeightOptions, {"high": math.inf}, "finite number"),
        (WeightOptions, {"low": -0.1}, "greater than or equal to 0"),
        (WeightOptions, {"level": "row"}, "'none', 'token', 'sequence' or 'geometric'"),
        (RejectionOptions, {}, "token ratio rejects nothing: give low or high"),
        (RejectionOptions, {"low": 2.0, "high": 0.5}, "low must be below high"),
        (RejectionOptions, {"low": 0.0, "high": 2.0}, "low must be above 0"),
        (RejectionOptions, {"low": 1.1}, "1, the value of a fresh token"),
        (RejectionOptions, {"high": 0.9}, "1, the value of a fresh token"),
        (RejectionOptions, {"measure": "k1", "low": 0.1}, "0, the value of a fresh token"),
        (RejectionOptions, {"measure": "k3", "high": -0.1}, "0, the value of a fresh token"),
        (RejectionOptions, {"measure": "k2", "low": 0.0, "high": 1.0}, "k2 has no low"),
        (RejectionOptions, {"high": math.nan}, "finite number"),
        (CorrectionOptions, {"veto": 1.0}, "below 1"),
        (CorrectionOptions, {"preset": "geo_r"}, "'geo_rs'"),
        (CorrectionOptions, {"preset": ["geo_rs"]}, "preset"),
        (CorrectionOptions, {"cap": 2.0}, "Extra inputs are not permitted"),
        (CorrectionOptions, {"rejections": [{"high": 2.0}, {"low": 0.5}]}, "token_ratio is there twice"),
    ],
)
def test_bad_options_are_refused(model: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(values)  # type: ignore[attr-defined]
    assert message in str(caught.value)


def test_every_preset_survives_a_round_trip() -> None:
    assert list(get_args(PresetName)) == list(PRESETS)
    for name in PRESETS:
        options = CorrectionOptions(preset=name)
        assert CorrectionOptions.model_validate(options.model_dump(mode="json")) == options
        assert CorrectionOptions.model_validate_json(options.model_dump_json()) == options
    assert CorrectionOptions(preset="token_clip") == CorrectionOptions()


def test_keys_beside_a_preset_override_only_themselves() -> None:
    options = CorrectionOptions.model_validate({"preset": "icepop", "weights": {"high": 3.0}, "veto": 1e-6})
    assert options.weights == WeightOptions(level="token", low=0.5, high=3.0, outside="zero")
    assert set(options.tests) == {"veto"}
    assert CorrectionOptions(preset="icepop", weights=WeightOptions()).weights == WeightOptions()


def test_which_presets_can_be_computed_one_micro_batch_at_a_time() -> None:
    alone = {name for name in PRESETS if not CorrectionOptions(preset=name).needs_whole_batch}
    assert alone == {
        *("token_clip", "token_tis", "none", "recompute_only", "seq_tis", "icepop", "areal", "areal_truncated"),
        *("areal_loglinear", "trl", "bypass_seq_tis", "bypass_icepop"),
    }
    assert CorrectionOptions(weights=WeightOptions(normalize=True)).needs_whole_batch
    assert CorrectionOptions(veto=1e-4).needs_whole_batch
