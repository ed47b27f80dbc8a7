"""Names of the aggregation modes. trainer/aggregation.py, which loads torch, defines them."""

from __future__ import annotations

from typing import Literal

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
