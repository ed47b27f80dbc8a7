"""`tandem sft`: faults are found before the training, skipped rows are counted, nothing is overwritten."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.errors import ConfigError, EnvironmentLackError
from tandem.services.commands import sft as sft_command
from tandem.services.config import Recipe
from tandem.trainer.config import SftConfig
from tandem.trainer.sft import SftResult
from tests.support.dataset_files import chat_folder, verl_row, write_lines
from tests.support.run_inputs import recipe_of, small_values


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The outputs of the trainings that would have run; none really runs."""
    outputs: list[Path] = []

    def train(rows: Any, model: str, config: SftConfig, seed: int, validate: Any) -> SftResult:
        outputs.append(Path(config.output))
        return SftResult(1, 0.0, None)

    monkeypatch.setattr(sft_command, "train_sft", train)
    return outputs


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    values = small_values(tmp_path)
    rows = [verl_row("1 + 1 =", "2"), verl_row("1 + 2 =", ""), verl_row("1" * 99, "3"), verl_row("1 + 3 =", "")]
    return recipe_of(
        values,
        model={"path": str(chat_folder(tmp_path / "chat"))},
        data={"eval_file": str(write_lines(tmp_path / "eval.jsonl", rows)), "max_prompt_tokens": 64},
        sft={"train_file": values["data"]["train_file"], "output": str(tmp_path / "out" / "warm")},
    )


def test_unusable_rows_of_the_validation_file_are_counted(
    recipe: Recipe, trained: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft_command.main(recipe) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "validation file" in line]
    assert f"{recipe.data.eval_file}: rows skipped: " in line
    assert "'no_ground_truth': 2" in line and "'too_long': 1" in line


def file_there(output: Path) -> None:
    output.parent.mkdir()
    output.write_text("mine")


def folder_there(output: Path) -> None:
    output.mkdir(parents=True)
    (output / "model.safetensors").write_text("mine")


def file_above(output: Path) -> None:
    output.parent.write_text("mine")


@pytest.mark.parametrize(
    ("put", "error", "says"),
    [
        (file_there, ConfigError, "is there already; move it away, or choose another sft.output"),
        (folder_there, ConfigError, "is there already; move it away, or choose another sft.output"),
        (file_above, EnvironmentLackError, "cannot be written"),
    ],
)
def test_an_existing_output_is_refused_before_the_training_and_kept(
    recipe: Recipe, trained: list[Path], tmp_path: Path, put: Callable[[Path], None], error: type[Exception], says: str
) -> None:
    put(Path(recipe.sft.output))
    before = {file: file.read_text() for file in tmp_path.joinpath("out").rglob("*") if file.is_file()}
    with pytest.raises(error, match=rf"sft\.output: .*warm .*{says}") as caught:
        sft_command.main(recipe)
    assert "\n" not in str(caught.value) and not trained
    assert {file: file.read_text() for file in tmp_path.joinpath("out").rglob("*") if file.is_file()} == before


def test_a_new_or_empty_output_is_accepted_and_the_check_adds_no_file(recipe: Recipe, trained: list[Path]) -> None:
    output = Path(recipe.sft.output)
    for _ in range(2):
        assert sft_command.main(recipe) == 0
        assert [path for path in os.listdir(output.parent) if path != "warm"] == []
        output.mkdir(exist_ok=True)
    assert trained == [output, output]
