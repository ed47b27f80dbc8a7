"""Named combinations of off-policy correction, as values of `CorrectionOptions`: published ones and the default.
Imports no torch.

TIS is truncated, MIS masked importance sampling; RS is rejection. A `bypass_` preset uses the sampler's log-probs as
the proximal ones and saves a forward pass; if it has weights, the loss must not have an importance ratio of its own
(use `reinforce`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

PresetName = Literal[
    "token_clip", "token_tis", "none", "recompute_only", "seq_tis", "icepop", "seq_mis", "seq_tis_rs", "geo_rs",
    "geo_rs_veto", "geo_rs_token_tis", "geo_rs_seq_tis", "k1_rs_veto", "k3_rs", "k3_rs_token_tis", "k3_rs_seq_tis",
    "areal", "areal_truncated", "areal_loglinear", "trl", "prime_rl", "opsm", "bypass_geo_rs", "bypass_k3_rs",
    "bypass_seq_tis", "bypass_icepop", "bypass_geo_rs_token_tis", "bypass_geo_rs_seq_tis"
]  # fmt: skip

_Values = Mapping[str, object]

_UNWEIGHTED: _Values = {"level": "none"}
_TOKEN_TIS: _Values = {"level": "token", "high": 2.0}
_SEQ_TIS: _Values = {"level": "sequence", "high": 2.0}
_ICEPOP: _Values = {"level": "token", "low": 0.5, "high": 5.0, "outside": "zero"}
_GEO_RS: _Values = {"level": "geometric", "measure": "ratio", "low": 0.999, "high": 1.001}
_K1_RS: _Values = {"level": "geometric", "measure": "k1", "low": -0.001, "high": 0.001}
_K3_RS: _Values = {"level": "geometric", "measure": "k3", "high": 0.01}
_VETO = 1e-4

PRESETS: Mapping[str, _Values] = {
    "token_clip": {"weights": {"level": "token", "low": 0.8, "high": 2.0, "outside": "stop"}},
    "token_tis": {"weights": _TOKEN_TIS},
    "none": {"proximal": "bypassed", "weights": _UNWEIGHTED},
    "recompute_only": {"weights": _UNWEIGHTED},
    "seq_tis": {"weights": _SEQ_TIS},
    "icepop": {"weights": _ICEPOP},
    "seq_mis": {"weights": _SEQ_TIS, "rejections": [{"level": "sequence", "measure": "ratio", "high": 2.0}]},
    "seq_tis_rs": {
        "weights": _SEQ_TIS,
        "rejections": [{"level": "sequence", "measure": "ratio", "low": 0.5, "high": 2.0}],
    },
    "geo_rs": {"weights": _UNWEIGHTED, "rejections": [_GEO_RS]},
    "geo_rs_veto": {"weights": _UNWEIGHTED, "rejections": [_GEO_RS], "veto": _VETO},
    "geo_rs_token_tis": {"weights": _TOKEN_TIS, "rejections": [_GEO_RS]},
    "geo_rs_seq_tis": {"weights": _SEQ_TIS, "rejections": [_GEO_RS]},
    "k1_rs_veto": {"weights": _UNWEIGHTED, "rejections": [_K1_RS], "veto": _VETO},
    "k3_rs": {"weights": _UNWEIGHTED, "rejections": [_K3_RS]},
    "k3_rs_token_tis": {"weights": _TOKEN_TIS, "rejections": [_K3_RS]},
    "k3_rs_seq_tis": {"weights": _SEQ_TIS, "rejections": [_K3_RS]},
    "areal": {"weights": {"level": "token", "high": 5.0, "outside": "zero"}},
    "areal_truncated": {"weights": {"level": "token", "high": 5.0}},
    "areal_loglinear": {"proximal": "loglinear", "weights": {"level": "token", "high": 5.0, "outside": "zero"}},
    "trl": {"weights": {"level": "sequence", "high": 3.0, "outside": "zero"}},
    "prime_rl": {
        "proximal": "bypassed",
        "weights": {"level": "token", "high": 8.0},
        "rejections": [
            {"level": "token", "measure": "ratio", "low": 0.125, "high": 8.0},
            {"level": "max", "measure": "ratio", "high": 100.0},
            {"level": "geometric", "measure": "ratio", "low": 0.1, "high": 10.0},
        ],
    },
    "opsm": {
        "proximal": "bypassed",
        "weights": _UNWEIGHTED,
        "rejections": [{"level": "geometric", "measure": "k1", "high": 0.5, "negative_only": True}],
    },
    "bypass_geo_rs": {"proximal": "bypassed", "weights": _UNWEIGHTED, "rejections": [_GEO_RS]},
    "bypass_k3_rs": {"proximal": "bypassed", "weights": _UNWEIGHTED, "rejections": [_K3_RS]},
    "bypass_seq_tis": {"proximal": "bypassed", "weights": _SEQ_TIS},
    "bypass_icepop": {"proximal": "bypassed", "weights": _ICEPOP},
    "bypass_geo_rs_token_tis": {"proximal": "bypassed", "weights": _TOKEN_TIS, "rejections": [_GEO_RS]},
    "bypass_geo_rs_seq_tis": {"proximal": "bypassed", "weights": _SEQ_TIS, "rejections": [_GEO_RS]},
}
