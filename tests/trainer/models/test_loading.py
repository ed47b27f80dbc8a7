"""A model folder that cannot be loaded gives a one-line error, whichever library detects it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.protos.errors import ModelError
from tandem.trainer.config import SftConfig
from tandem.trainer.models.loading import load_model, load_value_model
from tandem.trainer.sft import SftRow, train_sft

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"


@pytest.mark.parametrize(
    ("file", "damaged", "says"),
    [
        (WEIGHTS, lambda data: data[:-64], "deserializing"),
        (WEIGHTS, lambda data: b"", ""),
        (PICKLE, lambda data: b"nonsense", ""),
        (PICKLE, lambda data: b"", ""),
        (CONFIG, lambda data: json.dumps({**json.loads(data), "hidden_size": "many"}).encode(), "hidden_size"),
        (CONFIG, lambda data: b"{", "config.json"),
    ],
    ids=["cut weights", "no weights at all", "pickled nonsense", "empty pickle", "wrong type", "not json"],
)
def test_a_damaged_model_folder_is_a_one_line_error(
    file: str, damaged: Callable[[bytes], bytes], says: str, model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    if file == PICKLE:
        (folder / WEIGHTS).rename(folder / PICKLE)
    (folder / file).write_bytes(damaged((folder / file).read_bytes()))
    config = SftConfig(output=str(tmp_path / "out"))
    for load in (
        lambda: load_model(folder, "float32"),
        lambda: load_value_model(folder, "float32"),
        lambda: train_sft([SftRow([1], [2])], str(folder), config, 0),
    ):
        refusal = f"model folder {folder} cannot be loaded: .*{says}.*; copy or save"
        with pytest.raises(ModelError, match=refusal) as caught:
            load()
        assert "\n" not in str(caught.value)
