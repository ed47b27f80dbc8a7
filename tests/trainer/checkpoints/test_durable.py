"""Folders are replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.protos.errors import EnvironmentLackError
from tandem.trainer.checkpoints.durable import atomic_folder


def test_a_folder_replaces_the_previous_one(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with atomic_folder(tmp_path / "new") as begun:
            (begun / text).touch()
    assert os.listdir(tmp_path) == ["new"] and os.listdir(tmp_path / "new") == ["two"]


def test_an_exception_keeps_the_previous_folder(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "new"):
        raise RuntimeError("a bug")
    assert os.listdir(tmp_path) == ["new"]


def test_a_file_at_the_target_path_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("mine")
    refused = pytest.raises(EnvironmentLackError, match="new: a file stands where a folder is needed")
    with refused, atomic_folder(tmp_path / "new"):
        pytest.fail("it was begun")
    assert os.listdir(tmp_path) == ["new"] and (tmp_path / "new").read_text() == "mine"
