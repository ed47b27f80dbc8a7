"""Several training files with weights, as one dataset."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tandem.protos.errors import ConfigError
from tandem.services.config.recipe import TrainFile
from tandem.services.data.dataset import Mixture, Row, RowFault
from tests.support.dataset_files import verl_row, write_lines
from tests.support.run_inputs import recipe_of, small_values


def questions(mixture: Mixture, epoch: int) -> list[str]:
    rows = [mixture.row(index, epoch) for index in range(len(mixture))]
    assert [row.index for row in rows] == list(range(len(mixture))), "every place of an epoch is another group"
    return [row.messages[0]["content"] for row in rows if isinstance(row, Row)]


def files(folder: Path, *weights: float) -> list[TrainFile]:
    """A file of four rows for each weight: a0 … a3, b0 … b3."""
    made = []
    for name, weight in zip("abc", weights, strict=False):
        file = write_lines(folder / f"{name}.jsonl", [verl_row(f"{name}{number}", "1") for number in range(4)])
        made.append(TrainFile(path=str(file), weight=weight))
    return made


def test_one_file_keeps_its_order_in_every_epoch(tmp_path: Path) -> None:
    mixture = Mixture(files(tmp_path, 1.0))
    assert questions(mixture, 0) == questions(mixture, 5) == ["a0", "a1", "a2", "a3"]


def test_an_epoch_repeats_each_file_by_its_weight(tmp_path: Path) -> None:
    mixture = Mixture(files(tmp_path, 2.0, 0.5))
    assert (len(mixture), mixture.num_rows) == (10, 8)
    assert Counter(questions(mixture, 0)) == {"a0": 2, "a1": 2, "a2": 2, "a3": 2, "b0": 1, "b1": 1}
    assert Counter(questions(mixture, 1))["b2"] == 1, "the next epoch goes on where this one stopped"
    used = Counter(question for epoch in range(4) for question in questions(mixture, epoch))
    assert set(used.values()) == {8, 2}


def test_a_fault_has_the_same_row_number_in_all_epochs(tmp_path: Path) -> None:
    (first,) = files(tmp_path, 1.0)
    bad = TrainFile(
        path=str(write_lines(tmp_path / "bad.jsonl", [verl_row("x", None), verl_row("y", "1")])), weight=2.0
    )
    mixture = Mixture([first, bad])
    fault = mixture.row(4, 0)
    assert isinstance(fault, RowFault) and fault.index == 0, "a fault names the row of its file"
    assert mixture.locate(4, 0) == mixture.locate(6, 0) == mixture.locate(4, 3) == 4


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"train_file": ""}, "data.train_file is missing"),
        ({"train": [{"path": "b.jsonl"}]}, "exclude each other"),
        ({"train_file": "", "train": [{"path": "b.jsonl", "weight": 0}]}, r"data\.train\[0\]\.weight"),
        ({"train_file": "", "train": [{"file": "b.jsonl"}]}, r"unknown key data\.train\[0\]\.file"),
    ],
)
def test_wrongly_configured_train_files_are_refused(tmp_path: Path, data: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recipe_of(small_values(tmp_path), data=data)
