"""How the losses of tokens may be aggregated; what each mode means is in trainer/aggregation.py, which loads torch."""

from __future__ import annotations

from typing import Literal

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
