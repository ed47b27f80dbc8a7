"""Prompts of evaluation sets that are in the training data, too."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.protos.errors import DataError
from tandem.services.cli import app
from tandem.services.data.overlap import num_shared, trained_prompts
from tandem.services.launchers.supervisor import OverlapReport
from tests.support.dataset_files import BAD_ROWS, verl_row, write_lines, write_parquet
from tests.support.run_inputs import recipe_of, small_values

SYSTEM = {"role": "system", "content": "Answer briefly."}


def test_prompts_with_the_same_messages_are_counted_in_files_of_both_formats(tmp_path: Path) -> None:
    two = [SYSTEM, {"role": "user", "content": "9 + 1 ="}]
    rows = [
        *(verl_row(f"{n} + 1 =", "9") for n in range(5)),
        verl_row("", "9", prompt=two),
        verl_row("", "9", prompt=[]),
    ]
    train = write_parquet(tmp_path / "train.parquet", rows)
    texts = [{"prompt": "7 + 1 =", "answer": "8"}, {"prompt": "8 + 1 =", "answer": "9"}]
    more = write_lines(tmp_path / "more.jsonl", [*(bad for _, bad in BAD_ROWS), *texts])
    questions = {"both": ("0 + 1 =", "7 + 1 =", "7 + 1 =", "50 + 1 ="), "none": ("0 + 1 = ",), "empty": ()}
    sets = {name: [[{"role": "user", "content": one}] for one in own] for name, own in questions.items()}
    sets["none"].append([SYSTEM, {"role": "user", "content": "0 + 1 ="}])
    sets["two"] = [two, two[1:]]
    assert num_shared(sets, [train, more]) == {"both": 3, "none": 0, "empty": 0, "two": 1}
    assert num_shared(sets, [more])["both"] == 2
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        num_shared(sets, [tmp_path / "gone.jsonl"])


def test_the_sets_of_a_recipe_are_compared_as_far_as_they_are_used(tmp_path: Path) -> None:
    values = small_values(tmp_path)
    write_lines(Path(values["data"]["train_file"]), [verl_row(f"{n} + 1 =", "9") for n in range(4)])
    file = str(write_lines(tmp_path / "aime.jsonl", [verl_row(f"{n} + 1 =", "9") for n in range(2, 8)]))
    sets = [{"file": file}, {"name": "first", "file": file, "limit": 1}]
    recipe = recipe_of(values, eval={"sets": sets})
    assert trained_prompts(recipe) == {"aime": (2, 6), "first": (1, 1)}
    assert trained_prompts(recipe_of(values)) == {}


def test_a_run_says_once_which_sets_have_prompts_of_the_training_data(tmp_path: Path) -> None:
    values = small_values(tmp_path)
    train = values["data"]["train_file"]
    other = str(write_lines(tmp_path / "other.jsonl", [verl_row("20 + 1 =", "21")]))
    recipe = recipe_of(values, eval={"sets": [{"name": "seen", "file": train}, {"file": other}]})
    lines: list[str] = []
    plays = recipe_of(values, eval={"sets": recipe.eval.sets}, environment={"path": "a:B"})
    reports = [OverlapReport(one, lines.append) for one in (plays, recipe)]
    ends = time.monotonic() + 10.0
    while not lines and time.monotonic() < ends:
        for report in reports:
            report.tell()
        time.sleep(0.01)
    for report in reports:
        report.tell()
    assert lines == ["evaluation set seen: 4 of 4 prompts are in the training data, too"]


def test_data_check_counts_the_rows_that_are_in_training_files(tmp_path: Path) -> None:
    train, held_out = (
        write_lines(tmp_path / f"{name}.jsonl", [verl_row(f"{n} + 1 =", "9") for n in numbers])
        for name, numbers in (("train", range(5)), ("held_out", range(3, 9)))
    )
    done = CliRunner().invoke(app, ["data", "check", str(held_out), "--training", str(train)])
    assert done.exit_code == 0, "it is no fault of a row"
    assert [line.split()[-2] for line in done.output.splitlines() if "in the training data" in line] == ["2"]
    assert "in the training data" not in CliRunner().invoke(app, ["data", "check", str(held_out)]).output
