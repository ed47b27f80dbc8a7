"""Skips tests marked `gpu`, with the reason, where torch sees no CUDA device."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)  # after -m and -k: torch is imported only if a gpu test is really about to run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))
