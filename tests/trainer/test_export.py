"""Exports: what they import, and that weights on a CPU are written from where they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tandem.services.data.tiny_model import build_tiny_model
from tandem.trainer import learner as learner_module
from tandem.trainer.learner import Learner
from tests.support.engine_inputs import equal
from tests.support.learner_rank import all_weights


def test_saving_a_model_imports_no_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    build_tiny_model(tmp_path)
    assert "deepspeed" not in sys.modules
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "settings",
    [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 0, "lora": {"rank": 2}}],
    ids=["stage 0", "stage 1", "stage 2", "adapters"],
)
def test_an_export_copies_no_weights_that_a_rank_holds_whole(
    make_learner: Callable[..., Learner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any]
) -> None:
    learner = make_learner(**settings)
    written: dict[str, Tensor] = {}
    write = learner_module.write_export

    def noting(model: Any, weights: Mapping[str, Tensor], *folders: Path) -> None:
        written.update(weights)
        write(model, weights, *folders)

    monkeypatch.setattr(learner_module, "write_export", noting)
    learner.export(tmp_path / "export")
    held = {parameter.data_ptr() for parameter in learner._engine.module.parameters()}
    is_held = [tensor.data_ptr() in held for tensor in written.values()]
    assert all(is_held) if "lora" not in settings else any(is_held) and not all(is_held)
    assert equal(load_file(tmp_path / "export" / "model.safetensors"), all_weights(learner))
