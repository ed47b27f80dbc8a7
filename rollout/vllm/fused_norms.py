"""RMS norms on CPUs by vLLM's compiled kernels, which its operators use only on GPUs.

vLLM's other implementation is five to seven of torch's operations, each of which reads and writes all rows
(benchmarks/step_cpu.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

PROVIDER = "tandem_cpu"
PRIORITY = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}
"""vLLM's setting `ir_op_priority`; its own implementation follows."""
_VECTOR = 32
"""The kernels read whole vectors, of at most so many elements."""


def register_fused_norms() -> None:
    """Offers the kernels to vLLM in this process and its forks. May be called twice."""
    from vllm.ir import ops
    from vllm.platforms import current_platform

    if PROVIDER in ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    ops.rms_norm.register_impl(PROVIDER, supports_args=can_norm)(rms_norm)
    ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=can_add_and_norm, inplace=True)(fused_add_rms_norm)


def can_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whether the kernel takes these arguments; the parameters are vLLM's."""
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.shape[-1] % _VECTOR == 0
        and x.is_contiguous()
    )


def can_add_and_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return can_norm(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype and x_residual.is_contiguous()


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """x / √(mean(x²) + ε) · weight over the last dimension."""
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum; in the memory of the arguments."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
