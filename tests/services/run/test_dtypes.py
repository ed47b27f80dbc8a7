"""The advice to train in bfloat16 where the processor has AMX."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.services.run import dtypes
from tandem.services.run.dtypes import WIDE, dtype_hint, has_amx
from tandem.services.run.model_check import ModelFacts, check_model
from tests.support.run_inputs import Values, recipe_of

AMX = "processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile\nbogomips\t: 4000.00\n"


@pytest.fixture(autouse=True)
def processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that describes the processors, of a machine with AMX and without GPUs."""
    file = tmp_path / "cpuinfo"
    file.write_text(AMX)
    monkeypatch.setattr(dtypes, "_PROCESSORS", file)
    monkeypatch.setattr(dtypes, "gpu_ids", lambda: ())
    return file


def facts_of(values: Values, hidden_size: int) -> ModelFacts | None:
    """What a run knows of the model, with this hidden size in its files."""
    file = Path(values["model"]["path"]) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_size": hidden_size}))
    return check_model(recipe_of(values))


def test_a_wide_model_in_float32_is_advised_bfloat16(values: Values) -> None:
    wide = facts_of(values, WIDE)
    hint = dtype_hint(recipe_of(values), wide)
    assert hint.startswith("trainer.dtype is float32: this processor has AMX") and "faster in bfloat16" in hint
    assert dtype_hint(recipe_of(values, trainer={"dtype": "bfloat16"}), wide) == ""


def test_a_narrow_model_and_an_unknown_one_are_not(values: Values) -> None:
    assert dtype_hint(recipe_of(values), facts_of(values, WIDE - 1)) == ""
    assert dtype_hint(recipe_of(values), None) == ""


def test_a_machine_with_gpus_or_without_amx_advises_nothing(
    values: Values, processors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, wide = recipe_of(values), facts_of(values, WIDE)
    with monkeypatch.context() as patch:
        patch.setattr(dtypes, "gpu_ids", lambda: ("0",))
        assert dtype_hint(recipe, wide) == ""
    assert dtype_hint(recipe, wide)
    processors.write_text(AMX.replace("amx_bf16", "avx512_bf16"))
    assert not has_amx() and dtype_hint(recipe, wide) == ""
    processors.unlink()
    assert not has_amx() and dtype_hint(recipe, wide) == ""
