"""Exports: what they import, and that weights on a CPU are written from where they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import modeling_utils

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


def written_tensors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of the tensors that transformers writes from now on."""
    written: list[int] = []
    save = modeling_utils.safe_save_file

    def noting(tensors: Mapping[str, Tensor], *arguments: Any, **options: Any) -> None:
        written.extend(tensor.data_ptr() for tensor in tensors.values())
        save(tensors, *arguments, **options)

    monkeypatch.setattr(modeling_utils, "safe_save_file", noting)
    return written


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_an_export_of_weights_in_one_flat_buffer_has_their_bits(
    make_learner: Callable[..., Learner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    learner = make_learner(zero_stage=zero_stage)
    written = written_tensors(monkeypatch)
    learner.export(tmp_path / "export")
    held = {parameter.data_ptr() for parameter in learner._engine.module.parameters()}
    assert written and set(written) == held, "each weight is written from where it is"
    assert equal(load_file(tmp_path / "export" / "model.safetensors"), all_weights(learner))


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
def test_an_export_of_unpartitioned_weights_copies_none(
    make_learner: Callable[..., Learner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora: Mapping[str, Any] | None,
) -> None:
    learner = make_learner(zero_stage=0, lora=lora)
    written: dict[str, Tensor] = {}
    write = learner_module.write_export

    def noting(model: Any, weights: Mapping[str, Tensor], *folders: Path) -> None:
        written.update(weights)
        write(model, weights, *folders)

    monkeypatch.setattr(learner_module, "write_export", noting)
    learner.export(tmp_path / "export")
    held = {parameter.data_ptr() for parameter in learner._engine.module.parameters()}
    is_held = [tensor.data_ptr() in held for tensor in written.values()]
    assert all(is_held) if lora is None else any(is_held) and not all(is_held), "merged weights are new ones"
    assert equal(load_file(tmp_path / "export" / "model.safetensors"), all_weights(learner))
