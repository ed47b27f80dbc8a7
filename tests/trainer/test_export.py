from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem.services.data.tiny_model import build_tiny_model


def test_saving_a_model_imports_no_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    build_tiny_model(tmp_path)
    assert "deepspeed" not in sys.modules
    assert (tmp_path / "model.safetensors").is_file()
