"""Options of the adapters. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class LoraOptions(BaseModel):
    """Low-rank adapters (LoRA, arXiv 2106.09685): W + (alpha/rank)·B·A, of which only A and B are trained.

    There is no dropout, so that training sees the same policy as sampling.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: Annotated[int, Field(ge=1)] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0.0)] = 32.0
    """The product B·A is scaled by alpha/rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get adapters, by the end of their names; `all-linear` means all except the output head."""
    broadcast: Literal["adapter", "merged"] = "adapter"
    """What is sent to samplers: `adapter` sends A and B, which each sampler merges into its base weights; `merged`
    sends all weights.
    """
