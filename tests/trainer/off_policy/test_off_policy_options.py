"""Options of the off-policy correction: bounds, presets, and their requirements on the trainer."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from tandem.trainer.off_policy.options import CorrectionOptions, RejectionOptions, WeightOptions
from tandem.trainer.off_policy.presets import PRESETS, PresetName


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
