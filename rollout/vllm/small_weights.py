"""Linear layers with small weights on CPUs, which torch multiplies instead of oneDNN.

vLLM gives each weight a oneDNN kernel for every number of rows that it meets. Making one takes half a millisecond, and
each version of the weights needs new ones; small weights gain nothing from them (benchmarks/small_weights.py).
"""

from __future__ import annotations

import functools

import torch
from torch import nn

MOST_ELEMENTS = 1 << 17
"""Of a weight in float32 that torch multiplies."""


def multiply_small_weights_with_torch() -> None:
    """Changes vLLM in this process and its forks."""
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    if hasattr(dispatch, "__wrapped__"):
        return

    @functools.wraps(dispatch)
    def choose(layer: nn.Module, remove_weight: bool) -> None:
        if _is_small(layer.get_parameter("weight")):
            vars(layer)["cpu_linear"] = nn.functional.linear
        else:
            dispatch(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = choose


def _is_small(weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and weight.dtype == torch.float32 and weight.numel() <= MOST_ELEMENTS and not weight.is_meta
