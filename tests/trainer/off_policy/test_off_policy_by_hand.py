"""Off-policy correction on numbers worked out by hand, the proximal log-probs, and the options."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tandem.trainer.off_policy.correct import Corrected, correct
from tandem.trainer.off_policy.diagnostics import correction_sums
from tandem.trainer.off_policy.options import CorrectionOptions, RejectionOptions, WeightOptions
from tandem.trainer.off_policy.presets import PRESETS, PresetName
from tandem.trainer.off_policy.proximal import loglinear_proximal, proximal_logprobs


def rows_of(*rows: list[float]) -> tuple[Tensor, Tensor]:
    """(values_N, lengths_B) of rows."""
    flat = [value for row in rows for value in row]
    return torch.tensor(flat, dtype=torch.float64), torch.tensor([len(row) for row in rows])


def run(ratios: tuple[list[float], ...], advantages: list[float] | None = None, **options: Any) -> Corrected:
    """Corrects rows with the given ratios."""
    ratio_N, lengths_B = rows_of(*ratios)
    behavior_N = torch.linspace(-3.0, -0.5, len(ratio_N), dtype=torch.float64)
    advantages_N = None if advantages is None else torch.tensor(advantages)
    given = CorrectionOptions.model_validate({"preset": "token_tis", **options})
    return correct(behavior_N + ratio_N.log(), behavior_N, lengths_B, given, advantages_N=advantages_N)


@pytest.mark.parametrize("preset", ["token_tis", "token_clip"])
def test_token_weights_are_the_truncated_token_ratios_bit_for_bit(preset: PresetName) -> None:
    torch.manual_seed(0)
    proximal_N, behavior_N, advantages_N = torch.randn(3, 1000)
    behavior_N[0] -= 50
    advantages_N[:100] = 0.0
    options = CorrectionOptions(preset=preset)
    lengths_B = torch.tensor([400, 0, 600])
    weights_N = correct(proximal_N, behavior_N, lengths_B, options, advantages_N=advantages_N).weights_N
    assert weights_N.dtype == torch.float32
    ratio_N = (proximal_N - behavior_N).clamp(-20, 20).exp()
    expected_N = ratio_N.clamp(max=2.0)
    if preset == "token_clip":
        expected_N[(advantages_N > 0) & (ratio_N > 2.0)] = 0.0
        expected_N[(advantages_N < 0) & (ratio_N < 0.8)] = 0.0
        assert 0.1 < float((expected_N == 0).float().mean()) < 0.9
    assert torch.equal(weights_N, expected_N)
    assert not options.needs_whole_batch


TOKEN_STOP = {"level": "token", "low": 0.75, "high": 1.5, "outside": "stop"}


@pytest.mark.parametrize(
    ("weights", "advantages", "expected"),
    [
        ({"level": "token", "high": 1.5}, None, [1.0, 1.5, 0.5, 1.5]),
        ({"level": "sequence", "high": 8.0}, None, [1.0, 4.0, 4.0, 4.0]),
        ({"level": "geometric", "high": 8.0}, None, [1.0, 4 ** (1 / 3), 4 ** (1 / 3), 4 ** (1 / 3)]),
        ({"level": "token", "low": 0.75, "high": 5.0, "outside": "clamp"}, None, [1.0, 4.0, 0.75, 2.0]),
        ({"level": "token", "low": 0.75, "high": 3.0, "outside": "zero"}, None, [1.0, 0.0, 0.0, 2.0]),
        ({"level": "token", "high": 5.0, "normalize": True}, None, [1 / 1.875, 4 / 1.875, 0.5 / 1.875, 2 / 1.875]),
        ({"level": "sequence", "high": 8.0, "normalize": True}, None, [0.4, 1.6, 1.6, 1.6]),
        ({"level": "none"}, None, [1.0] * 4),
        # `stop`: 0 if the advantage pushes the token further out of bounds; of a sequence, for the tokens it pushes
        (TOKEN_STOP, [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.5, 0.0]),
        (TOKEN_STOP, [-1.0, -1.0, -1.0, -1.0], [1.0, 1.5, 0.0, 1.5]),
        (TOKEN_STOP, [0.0, 0.0, 0.0, 0.0], [1.0, 1.5, 0.5, 1.5]),
        ({**TOKEN_STOP, "level": "sequence", "high": 3.9}, [1.0, 1.0, -1.0, 1.0], [1.0, 0.0, 3.9, 0.0]),
    ],
)
def test_weights(weights: dict[str, Any], advantages: list[float] | None, expected: list[float]) -> None:
    corrected = run(([1.0], [4.0, 0.5, 2.0]), advantages, weights=weights)
    assert corrected.weights_N.tolist() == pytest.approx(expected)
    assert corrected.keep_N.all(), "a token that is stopped stays in the denominators"


def test_normalized_weights_average_1_over_kept_tokens() -> None:
    test = {"level": "token", "measure": "ratio", "high": 3.0}
    corrected = run(
        ([1.0], [4.0, 0.5, 2.0]), weights={"level": "token", "high": 9.0, "normalize": True}, rejections=[test]
    )
    assert corrected.keep_N.tolist() == [True, False, True, True]
    assert float(corrected.weights_N[corrected.keep_N].mean()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("test", "kept"),
    [
        ({"level": "token", "measure": "ratio", "high": 3.0}, [1, 0, 1, 1]),
        ({"level": "token", "measure": "ratio", "low": 0.75, "high": 3.0}, [1, 0, 0, 1]),
        ({"level": "sequence", "measure": "ratio", "high": 3.9}, [1, 0, 0, 0]),
        ({"level": "sequence", "measure": "ratio", "high": 4.1}, [1, 1, 1, 1]),
        ({"level": "geometric", "measure": "ratio", "high": 1.58}, [1, 0, 0, 0]),
        ({"level": "geometric", "measure": "ratio", "high": 1.59}, [1, 1, 1, 1]),
        ({"level": "max", "measure": "ratio", "high": 3.9}, [1, 0, 0, 0]),
        ({"level": "max", "measure": "ratio", "low": 0.6}, [1, 0, 0, 0]),
        ({"level": "max", "measure": "ratio", "low": 0.4, "high": 4.1}, [1, 1, 1, 1]),
        ({"level": "token", "measure": "k1", "low": -1.0}, [1, 0, 1, 1]),
        ({"level": "token", "measure": "k1", "high": 0.5}, [1, 1, 0, 1]),
        ({"level": "token", "measure": "k2", "high": 0.5}, [1, 0, 1, 1]),
        ({"level": "token", "measure": "k3", "high": 0.5}, [1, 0, 1, 1]),
        ({"level": "sequence", "measure": "k2", "high": 1.44}, [1, 0, 0, 0]),
        ({"level": "sequence", "measure": "k2", "high": 1.45}, [1, 1, 1, 1]),
    ],
)
def test_rejection(test: dict[str, Any], kept: list[int]) -> None:
    corrected = run(([1.0], [4.0, 0.5, 2.0]), rejections=[test])
    assert corrected.keep_N.tolist() == [bool(keep) for keep in kept]


def test_rejected_tokens_and_rows_are_counted() -> None:
    """One row loses one token, one loses all tokens, and one loses none."""
    tests = (RejectionOptions(high=3.0), RejectionOptions(level="max", low=0.1))
    options = CorrectionOptions(preset="token_tis", rejections=tests)
    ratio_N, lengths_B = rows_of([1.0, 4.0], [0.05, 1.0, 5.0], [1.0])
    corrected = correct(ratio_N.log(), torch.zeros(6, dtype=torch.float64), lengths_B, options)
    staleness_N = torch.tensor([0, 0, 2, 2, 2, 0])
    figures = correction_sums(corrected, ratio_N.log(), ratio_N * 0, lengths_B, staleness_N, options).figures()
    expected = {
        "rejected_fraction": 4 / 6,
        "rejected_row_fraction": 1 / 3,
        "touched_row_fraction": 2 / 3,
        "truncated_fraction": 2 / 6,
        "behavior_weight_max": 2.0,
        "behavior_weight_min": 0.05,
        "rejection/token_ratio/rejected_fraction": 2 / 6,
        "rejection/token_ratio/touched_row_fraction": 2 / 3,
        "rejection/token_ratio/max": 5.0,
        "rejection/token_ratio/min": 0.05,
        "rejection/token_ratio/mean": 12.05 / 6,
        "rejection/max_ratio/rejected_fraction": 3 / 6,
        "rejection/max_ratio/touched_row_fraction": 1 / 3,
        "rejection/max_ratio/mean": (2 * 4 + 3 * 5 + 1) / 6,
        "rejection/max_ratio/min": 0.05,
        "staleness_0/rejected_fraction": 1 / 3,
        "staleness_0/rejected_row_fraction": 0.0,
        "staleness_2/rejected_row_fraction": 1.0,
        "staleness_2/truncated_fraction": 1 / 3,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_a_catastrophic_token_rejects_its_row() -> None:
    corrected = run(([1.0, 2e-4], [1.0, 5e-5, 3.0], [0.9]), veto=1e-4)
    assert corrected.keep_N.tolist() == [True, True, False, False, False, True]
    assert run(([1e-30, 1.0], [1.0]), veto=1e-12).keep_N.tolist() == [False, False, True], "beyond the clamp of weights"


def test_only_negative_advantages_can_be_rejected() -> None:
    test = {"level": "geometric", "measure": "k1", "high": 0.5, "negative_only": True}
    ratios = ([0.1, 0.2], [0.1, 0.3], [0.9, 0.8])
    corrected = run(ratios, advantages=[1.0, 1.0, -1.0, -1.0, -1.0, -1.0], rejections=[test])
    assert corrected.keep_N.tolist() == [True, True, False, False, True, True]


# ---- proximal log-probs ----


@pytest.mark.parametrize(
    ("behavior", "current", "versions", "batch_version", "expected"),
    [
        ([-1.0, -2.0, -3.0], [-1.5, -2.5, -3.5], [0, 0, 0], 2, [-1.25, -2.25, -3.25]),
        ([-1.0, -2.0], [-1.5, -2.2], [0, 2], 4, [-1.375, -2.1]),
        ([-1.0, -1.0], [-3.0, -3.0], [3, 4], 4, [-1.0, -1.0]),  # at the proximal policy's version or newer
    ],
)
def test_loglinear_follows_the_published_interpolation(
    behavior: list[float], current: list[float], versions: list[int], batch_version: int, expected: list[float]
) -> None:
    proximal = loglinear_proximal(
        torch.tensor(current, requires_grad=True),
        torch.tensor(behavior),
        torch.tensor(versions),
        batch_version=batch_version,
    )
    assert not proximal.requires_grad
    assert proximal.tolist() == pytest.approx(expected)


def test_loglinear_depends_on_the_progress_within_the_batch() -> None:
    current, behavior = torch.tensor([-2.0, -2.0, -2.0]), torch.tensor([-1.0, -1.0, -1.0])
    # 0, 1 and 3 versions behind the start of the batch; versions ahead of it
    stale, newer = torch.tensor([4, 3, 1]), torch.tensor([5, 6, 7])

    def at(progress: float, versions: Tensor = stale) -> list[float]:
        return loglinear_proximal(current, behavior, versions, batch_version=5, progress=progress).tolist()

    assert at(0.0) == [-2.0, -2.0, -2.0], "before the first step the current policy is the proximal one"
    assert at(0.5) == pytest.approx([-1.0, -1.0 - 1 / 1.5, -1.0 - 3 / 3.5])
    assert at(1.0) == pytest.approx([-1.0, -1.5, -1.75])
    assert (at(0.0, newer), at(0.5, newer)) == ([-2.0] * 3, [-1.0] * 3)


def test_the_source_of_proximal_logprobs() -> None:
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    behavior, recomputed = torch.tensor([-1.5, -1.5]), torch.tensor([-3.0, -3.0])

    def pair(method: str, **more: Any) -> tuple[list[float], list[float]]:
        found = proximal_logprobs(method, current_logprobs_N=current, behavior_logprobs_N=behavior, **more)
        assert not any(tensor.requires_grad for tensor in found)
        return found[0].tolist(), found[1].tolist()

    assert pair("recomputed", recomputed_N=recomputed) == ([-3.0, -3.0], [-3.0, -3.0])
    assert pair("recomputed") == ([-1.0, -2.0], [-1.0, -2.0])
    assert pair("bypassed") == ([-1.5, -1.5], [-1.0, -2.0])
    assert pair("loglinear", versions_N=torch.tensor([0, 0]), batch_version=2) == ([-1.25, -1.75], [-1.25, -1.75])


def test_mismatched_shapes_are_refused() -> None:
    two, three, one_row = torch.zeros(2), torch.zeros(3), torch.tensor([3])
    for columns in ((three, two, one_row), (three[None], three[None], one_row), (three, three, one_row.float())):
        with pytest.raises(AssertionError):
            correct(*columns, CorrectionOptions(preset="token_tis"))
    with pytest.raises(AssertionError, match="negative_only needs advantages"):
        correct(three, three, one_row, CorrectionOptions(preset="opsm"))


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
