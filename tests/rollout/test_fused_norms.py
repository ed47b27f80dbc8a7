"""vLLM's compiled norms on CPUs, against its implementation with torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments
from tandem.rollout.vllm.fused_norms import (
    PROVIDER,
    can_add_and_norm,
    can_norm,
    fused_add_rms_norm,
    register_fused_norms,
    rms_norm,
)
from tandem.rollout.vllm.launch import engine_arguments
from tandem.services.data.tiny_model import build_tiny_model

EPSILON = 1e-6


@pytest.fixture(scope="module")
def native() -> Callable[[str], Callable[..., Any]]:
    from vllm.ir import ops

    register_fused_norms()
    register_fused_norms()  # a second time changes nothing
    assert PROVIDER in ops.rms_norm.impls and PROVIDER in ops.fused_add_rms_norm.impls
    return lambda name: getattr(ops, name).impls["native"].impl_fn


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 32), (256, 128), (7, 4, 96), (3, 4096)], ids=str)
def test_the_kernels_compute_what_torch_computes(native: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype) * 3, drawn(shape[-1], dtype=dtype)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    assert can_norm(x, weight, EPSILON) and can_add_and_norm(x, residual, weight, EPSILON)
    torch.testing.assert_close(rms_norm(x, weight, EPSILON), native("rms_norm")(x, weight, EPSILON), **close)
    expected = native("fused_add_rms_norm")(x, residual, weight, EPSILON)
    found = fused_add_rms_norm(x.clone(), residual.clone(), weight, EPSILON)
    torch.testing.assert_close(found, expected, **close)


def test_the_engine_is_told_to_prefer_the_kernels(tmp_path: Path) -> None:
    arguments = SamplerArguments(
        RolloutConfig(), str(build_tiny_model(tmp_path / "model")), "float32", max_model_tokens=64, seed=0
    )
    priority = engine_arguments(arguments).create_engine_config().kernel_config.ir_op_priority
    assert (priority.rms_norm, priority.fused_add_rms_norm) == ([PROVIDER, "native"], [PROVIDER, "native"])


def test_what_the_kernels_do_not_take_stays_with_torch() -> None:
    x, weight = drawn(4, 128), drawn(128)
    assert not can_norm(x, None, EPSILON) and not can_norm(x, weight, EPSILON, 64)
    assert not can_norm(x, weight.bfloat16(), EPSILON)
    assert not can_norm(drawn(4, 48), drawn(48), EPSILON), "48 is no whole number of vectors"
    heads = drawn(4, 256)[:, :128].view(4, 4, 32)  # as the queries of a model that norms each head
    assert not heads.is_contiguous() and not can_norm(heads, drawn(32), EPSILON)
    assert not can_add_and_norm(x, drawn(4, 256)[:, :128], weight, EPSILON)
    assert not can_add_and_norm(x, x.double(), weight, EPSILON)
