"""A model folder that cannot be loaded gives a one-line error, whichever library detects it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.protos.errors import ModelError
from tandem.trainer.models.loading import load_model, load_value_model
from tandem.trainer.sft import SftRow, SftSettings, train_sft
from tests.support.tiny_model import build_tiny_model


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


def no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def pickled_nonsense(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"nonsense")


def empty_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def wrong_type(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": "many"}))


def not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_weights, "deserializing"),
        (no_weights_at_all, ""),
        (pickled_nonsense, ""),
        (empty_pickle, ""),
        (wrong_type, "hidden_size"),
        (not_json, "config.json"),
    ],
)
def test_a_damaged_model_folder_is_a_one_line_error(
    damage: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    folder = build_tiny_model(tmp_path / "model")
    damage(folder)
    settings = SftSettings(max_steps=1, batch_size=1, learning_rate=0.0)
    for load in (
        lambda: load_model(folder, "float32"),
        lambda: load_value_model(folder, "float32"),
        lambda: train_sft([SftRow([1], [2])], str(folder), tmp_path / "out", settings),
    ):
        with pytest.raises(
            ModelError, match=f"model folder {folder} cannot be loaded: .*{says}.*; copy or save"
        ) as caught:
            load()
        assert "\n" not in str(caught.value)
