"""A pickle that somebody plants in a checkpoint or in a model's folder runs no code."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from safetensors import SafetensorError

from tandem.protos.errors import DataError, ModelError
from tandem.trainer.config import TrainerConfig
from tandem.trainer.models.loading import load_model
from tests.support import engine_inputs as engines
from tests.trainer.conftest import Settings, every_engine, model, process_group

__all__ = ["model", "process_group"]  # fixtures
pytestmark = pytest.mark.usefixtures("process_group")


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.file), "w")


def written(form: str, planted: object, file: Path) -> None:
    if form == "pickle":
        file.write_bytes(pickle.dumps(planted, protocol=2))
    else:
        torch.save({"module": planted}, file, _use_new_zipfile_serialization=form == "zip")


@every_engine
def test_a_planted_checkpoint_runs_no_code(model: Path, tmp_path: Path, engine_settings: Settings) -> None:
    config = TrainerConfig(**engine_settings)
    folder, mark = tmp_path / "000002", tmp_path / "the code ran"
    engine = engines.engine_of(model, config)
    engines.policy_step(engine, engines.make_micro_batches())
    engines.save({"engine": engine}, folder, config)
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in (".pt", ".safetensors")]
    assert len(files) >= 2
    for file in files:
        for form in ("zip", "legacy", "pickle"):
            before = file.read_bytes()
            written(form, Planted(mark), file)
            by_pickle = file.suffix == ".pt"
            says = (
                r"settings( \(.*\))?, so Tandem did not write it .*: remove it to resume"
                if by_pickle
                else "HeaderTooLarge|[Hh]eader"
            )
            with pytest.raises(DataError if by_pickle else (DataError, SafetensorError), match=says) as refused:
                engines.load({"engine": engine}, folder, config)
            assert "\n" not in str(refused.value)
            assert not mark.exists(), (file, form)
            file.write_bytes(before)
    engines.load({"engine": engine}, folder, config)
    engine.close()
    pickle.loads(pickle.dumps(Planted(mark))).close()  # noqa: S301 (the test's own)
    assert mark.exists(), "the planted object does its work where pickles are trusted"


@every_engine
def test_a_checkpoint_is_read_back_whatever_python_wrote_it(
    model: Path, tmp_path: Path, engine_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python before 3.11.4, Debian's for instance, pickles an enumeration as a call of `getattr`."""
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", lambda stage, _: (getattr, (ZeroStageEnum, stage.name)))
    config = TrainerConfig(**engine_settings)
    engine = engines.engine_of(model, config)
    engines.policy_step(engine, engines.make_micro_batches())
    engines.save({"engine": engine}, tmp_path / "000002", config)
    saved = {name: weight.clone() for name, weight in engines.weights_of(engine).items()}
    engines.policy_step(engine, engines.make_micro_batches())
    changed = engines.weights_of(engine)
    assert not all(torch.equal(changed[name], weight) for name, weight in saved.items())
    engines.load({"engine": engine}, tmp_path / "000002", config)
    loaded = engines.weights_of(engine)
    assert all(torch.equal(loaded[name], weight) for name, weight in saved.items())
    engine.close()


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_planted_model_runs_no_code(model: Path, tmp_path: Path, form: str) -> None:
    folder, mark = shutil.copytree(model, tmp_path / "model"), tmp_path / "the code ran"
    (folder / "model.safetensors").unlink()
    written(form, Planted(mark), folder / "pytorch_model.bin")
    with pytest.raises(ModelError):
        load_model(folder, "float32")
    assert not mark.exists()
