"""A small recipe, and a machine without settings of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.services.run import preflight, threads
from tests.support.run_inputs import Values, small_values


@pytest.fixture
def values(tmp_path: Path) -> Values:
    """The values of a small recipe."""
    return small_values(tmp_path)


@pytest.fixture
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides this machine's Redis setting, hub access and GPUs."""
    monkeypatch.delenv("TANDEM_REDIS_URL", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module in (preflight, threads):
        monkeypatch.setattr(module, "gpu_ids", lambda: ())
